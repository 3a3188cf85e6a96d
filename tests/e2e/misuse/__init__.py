"""Misuses: each gives one message within 15 seconds, the right exit code and nothing half-written.

A case is one line of a table. The tables are the files ``cases_*.py`` of this folder: each has a list ``CASES`` of
:class:`~tests.e2e.misuse.case.Case`. A new file is found by its name. A file looks like this::

    from tests.e2e.misuse.case import Case, Place

    def empty_file(place: Place) -> None:
        (place.tmp / "empty.jsonl").write_text("")

    CASES = [
        Case("misspelt estimator", "train", ["algorithm.adv_estimator=grop"], words=["grop", "did you mean", "grpo"]),
        Case("empty file", "sft", ["data.train_files={tmp}/empty.jsonl"], prepare=empty_file, words=["empty.jsonl"]),
    ]

- The command of a case is the working base command of its program (``case.BASE``) with the changes merged in. The
  change ``key=None!`` removes a key. ``argv`` replaces the whole command.
- ``{tmp}`` in changes, words, argv and environment is a fresh directory of the case, ``{task}`` the read-only files of
  the base commands, ``{model}`` a tiny model. The output directory is ``{tmp}/out``.
- ``prepare`` makes the files of the case. It may change ``place.changes`` and ``place.env``.
- ``environment`` changes variables; the value None removes one.
- Every case is checked for: the exit code, the words, one message and no traceback, the time, and an output directory
  without files (``leaves`` lists globs of files that may be there).
- A case usually runs in a fork of a process that has imported everything (``zygote.py``): it costs tenths of a second,
  with its own exit code, file descriptors, environment and session. ``fresh=True`` starts a new interpreter instead. It
  is for what is decided before ``main`` begins: encodings, variables that are read on import, closed descriptors.
- ``stdout`` is ``pipe``, ``closed`` (the descriptor does not exist), ``broken`` (a pipe without a reader), ``full``
  (a full device) or ``tty`` (a pseudo-terminal). ``stderr`` is always a pipe.
- ``during`` runs beside the command, with the process id of the command: to send a signal, for example.

Run some of them: ``python -m pytest tests/e2e/misuse -q -k "estimator or empty"``. The slowest ones are reported with
``--durations``; the line ``misuse_seconds`` of ``--junitxml`` has the honest seconds of each case.
"""

r"""Programs: the last code block of the response against tests, run in a sandbox.

The reference (a mapping, or its JSON text) is one of

* ``{"inputs": [...], "outputs": [...]}``: each input goes to the program's standard input, and what it prints must be
  the output, compared word by word (numbers with a fraction to a relative 1e-6);
* ``{"inputs": [...], "outputs": [...], "fn_name": "f"}``: ``f`` (or ``Solution().f``) is called with each input, a list
  of arguments or one JSON value per line, and its value must equal the output;
* ``{"assert_case": ["assert f(1) == 2", ...]}``, or such a list: each must hold after the program ran;
* ``{"test": "def check(candidate): ...", "entry_point": "f"}``: ``check(f)`` must not raise.

Expected values never enter the sandbox, except where the reference itself is code.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl.errors import DataError
from verl.rewards.sandbox.local import LocalSandbox
from verl.rewards.sandbox.pool import shared_pool
from verl.rewards.sandbox.remote import RemoteSandbox
from verl.rewards.sandbox.spec import Limits, ProgramResult, Status

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+#-]*)[^\n]*\n(.*?)(?:\n)?```", re.DOTALL)
_LANGUAGES = {"": "python", "py": "python", "python3": "python", "c++": "cpp", "cc": "cpp", "cxx": "cpp"}
_COMPILERS = {
    "c": ("main.c", ["gcc", "-O2", "-o", "main", "main.c", "-lm"]),
    "cpp": ("main.cpp", ["g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"]),
}
_MODULE = """
import json, sys, types
call = json.loads(sys.stdin.readline())
module = sys.modules["solution"] = types.ModuleType("solution")
exec(compile({code}, "solution.py", "exec"), vars(module))
"""
_CALL = (
    _MODULE
    + """
function = getattr(module, call["name"], None) or getattr(module.Solution(), call["name"])
print("\\n" + call["mark"] + json.dumps(function(*call["arguments"])))
"""
)
_ASSERT = (
    _MODULE
    + """
exec(compile(call["test"], "test.py", "exec"), vars(module))
print("\\n" + call["mark"] + "true")
"""
)

Run = Callable[[str, str], ProgramResult]
"""Code and input -> how it ended."""


@dataclass(frozen=True)
class Check:
    """One test: a program around the policy's code, its input, and whether the output is right."""

    template: str | None
    stdin: str
    right: Callable[[str], bool]

    def program(self, code: str) -> str:
        """The source that is run."""
        return code if self.template is None else self.template.replace("{code}", repr(code))


def extract_code(text: str) -> tuple[str, str] | None:
    """The last fenced code block and its language (``python`` if it names none); ``None`` without a block."""
    blocks = _FENCE.findall(text)
    if not blocks:
        return None
    tag, code = blocks[-1]
    return code, _LANGUAGES.get(tag.lower(), tag.lower())


def checks_of(ground_truth: Any) -> list[Check]:
    """The tests that a reference describes.

    Raises:
        DataError: none of the known forms.
    """
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = {"assert_case": [truth]}
    if isinstance(truth, Sequence) and not isinstance(truth, str):
        truth = {"assert_case": list(truth)}
    if isinstance(truth, Mapping):
        if truth.get("assert_case") is not None:
            return [_assertion(str(test)) for test in truth["assert_case"]]
        if truth.get("test") is not None:
            call = f"\ncheck({truth['entry_point']})" if truth.get("entry_point") else ""
            return [_assertion(f"{truth['test']}{call}")]
        inputs, outputs = truth.get("inputs"), truth.get("outputs")
        if inputs is not None and outputs is not None and len(inputs) == len(outputs) > 0:
            name = truth.get("fn_name")
            make = _stdin if not name else (lambda given, wanted: _function(str(name), given, wanted))
            return [make(given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    raise DataError(
        f"the reference {str(ground_truth)[:200]!r} describes no tests; give inputs and outputs of equal number, "
        "assert_case, or test with entry_point"
    )


def _stdin(given: Any, wanted: Any) -> Check:
    source = "\n".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    expected = "\n".join(map(str, wanted)) if isinstance(wanted, list | tuple) else str(wanted)
    return Check(None, source, lambda printed: same_words(printed, expected))


def _function(name: str, given: Any, wanted: Any) -> Check:
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    if isinstance(wanted, str):
        with suppress(ValueError):  # a text is a value too
            wanted = json.loads(wanted)
    mark = secrets.token_hex(8)
    call = json.dumps({"name": name, "arguments": list(arguments), "mark": mark})

    def right(printed: str) -> bool:
        value = _marked(printed, mark)
        # some data sets wrap every expected value into a list of one
        return value is not None and any(_same_value(value[0], expected) for expected in _candidates(wanted))

    return Check(_CALL, call + "\n", right)


def _candidates(wanted: Any) -> Iterable[Any]:
    yield wanted
    if isinstance(wanted, list) and len(wanted) == 1:
        yield wanted[0]


def _assertion(test: str) -> Check:
    mark = secrets.token_hex(8)
    call = json.dumps({"test": test, "mark": mark})
    return Check(_ASSERT, call + "\n", lambda printed: _marked(printed, mark) is not None)


def _marked(printed: str, mark: str) -> list[Any] | None:
    for line in reversed(printed.splitlines()):
        if line.startswith(mark):
            try:
                return [json.loads(line[len(mark) :])]
            except ValueError:
                return None
    return None


def same_words(printed: str, expected: str) -> bool:
    """Whether two texts have the same words; numbers with a fraction may differ by a relative 1e-6."""
    left, right = printed.split(), expected.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", expected):
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        both = isinstance(value, int | float) and isinstance(expected, int | float)
        return both and math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_value(value[k], expected[k]) for k in value)
    return bool(value == expected)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    continuous: bool = False,
    url: str | None = None,
    max_concurrent: int | None = None,
    memory_limit_mb: int = 1024,
    timeout_s: float = 10.0,
    isolation: str = "auto",
) -> dict[str, Any]:
    """Run the response's last code block against the reference's tests.

    Args:
        solution_str: the response's text.
        ground_truth: the tests, see the module.
        extra_info: ``language``, where the block does not name it. ``python``, ``c`` and ``cpp`` run here, and whatever
            the remote sandbox knows there.
        continuous: the score is the share of tests passed; otherwise 1.0 if all pass, and the first failure ends it.
        url: of a remote sandbox; ``None`` = on this machine.
        max_concurrent: programs at the same time: one per CPU here, 64 remotely, unless given.
        memory_limit_mb: per program, in MiB.
        timeout_s: CPU seconds per test; the wall-clock limit is twice that.
        isolation: of the local sandbox, see :class:`~verl.rewards.sandbox.local.LocalSandbox`.

    Returns:
        ``score``, ``acc`` (all passed), ``code_status`` (``passed``, ``wrong``, ``error``, ``timeout``, ``memory``,
        ``output``, ``compile``, ``no_code``), the status of the first test that failed.

    Raises:
        DataError: the reference describes no tests.
        RewardError: the sandbox failed; that says nothing about the program.
    """
    checks = checks_of(ground_truth)
    found = extract_code(solution_str)
    if found is None:
        return {"score": 0.0, "acc": False, "code_status": "no_code"}
    code, language = found
    language = str((extra_info or {}).get("language") or language)
    limits = Limits(cpu_s=timeout_s, wall_s=2 * timeout_s, memory_mb=memory_limit_mb)
    if url is not None:
        remote = RemoteSandbox(url, limits, max_concurrent=max_concurrent or 64)
        run: Run = lambda program, stdin: remote.run(program, language=language, stdin=stdin)  # noqa: E731
        return _verdict(checks, code, run, continuous)
    if language != "python" and language not in _COMPILERS:
        return {"score": 0.0, "acc": False, "code_status": "no_code"}
    with shared_pool(isolation, max_concurrent).lend() as box:
        if language == "python":
            return _verdict(checks, code, lambda program, stdin: _python(box, program, stdin, limits), continuous)
        if not _compiled(box, code, language, limits):
            return {"score": 0.0, "acc": False, "code_status": "compile"}
        run = lambda _, stdin: box.run(["./main"], stdin=stdin, limits=limits, keep=True)  # noqa: E731
        return _verdict(checks, code, run, continuous)


def _python(box: LocalSandbox, program: str, stdin: str, limits: Limits) -> ProgramResult:
    return box.run([sys.executable, "-I", "main.py"], files={"main.py": program}, stdin=stdin, limits=limits)


def _compiled(box: LocalSandbox, code: str, language: str, limits: Limits) -> bool:
    name, command = _COMPILERS[language]
    return box.run(command, files={name: code}, limits=limits).ok


def _verdict(checks: Sequence[Check], code: str, run: Run, continuous: bool) -> dict[str, Any]:
    passed, first_failure = 0, ""
    for check in checks:
        result = run(check.program(code), check.stdin)
        right = result.ok and check.right(result.stdout)
        passed += right
        if not right:
            first_failure = first_failure or ("wrong" if result.status is Status.OK else str(result.status))
            if not continuous:
                break
    rate = passed / len(checks)
    everything = passed == len(checks)
    return {
        "score": rate if continuous else float(everything),
        "acc": everything,
        "code_status": first_failure or "passed",
    }

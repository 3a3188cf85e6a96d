"""Tasks of the package ``reasoning-gym``, by name: its own scorers on the entry that the row carries."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.errors import ConfigError, DataError
from verl.rewards.helper import Helper, limit_memory
from verl.rewards.math import last_boxed
from verl.rewards.outcome import OutcomeKind
from verl.rewards.references import is_missing, mapping_of, reads_reference
from verl.rewards.tags import last_answer

logger = logging.getLogger(__name__)

_LONGEST = 20_000


def extract_answer(solution_str: str) -> str | None:
    r"""What the last ``<answer>...</answer>`` holds, else the last ``\boxed{...}``; ``None`` without either."""
    answer = last_answer(solution_str)
    return last_boxed(solution_str) if answer is None else answer


def task_of(data_source: str, extra_info: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """The task's name: ``extra_info["task"]``, what follows ``reasoning_gym/``, or the entry's own record."""
    if extra_info.get("task"):
        return str(extra_info["task"])
    _, _, name = data_source.partition("/")
    name = name or str((entry.get("metadata") or {}).get("source_dataset") or "")
    if not name:
        raise DataError(
            f"data_source={data_source!r} names no task; use reasoning_gym/<task>, or give extra_info['task']"
        )
    return name


def read_reference(
    _ground_truth: Any, extra_info: Mapping[str, Any] | None, data_source: str = "reasoning_gym", **_: Any
) -> tuple[str, dict[str, Any]]:
    """The task's name and its entry; ``ground_truth`` is not read.

    Args:
        extra_info: ``entry``: the task's entry, a mapping or its JSON text; optionally ``task``.
        data_source: ``reasoning_gym/<task>``.

    Raises:
        ConfigError: the package is not installed, or has no such task.
        DataError: the row has no entry.
    """
    info = extra_info or {}
    if is_missing(info.get("entry")):
        raise DataError(f"extra_info of {data_source!r} has no 'entry', the task's entry as JSON, which scores need")
    entry = mapping_of(info["entry"], "give the task's entry", "extra_info.entry")
    task = task_of(data_source, info, entry)
    _scorer(task)
    return task, dict(entry)


def check_reference(ground_truth: Any, extra_info: Mapping[str, Any] | None, data_source: str, **_: Any) -> None:
    """:func:`read_reference`, and that the task can score the entry's own answer.

    Raises:
        ConfigError: see there.
        DataError: see there, or the task's scorer fails on the entry.
    """
    task, entry = read_reference(ground_truth, extra_info, data_source)
    if entry.get("answer") is None:  # some tasks know none
        return
    outcome = HELPER(task=task, answer=str(entry["answer"]), entry=entry)
    if outcome.score is None:
        reason = outcome.message.strip().rpartition("\n")[2]
        raise DataError(f"extra_info.entry of {data_source!r}: the scorer of reasoning-gym fails on it: {reason}")


@reads_reference(check_reference)
def compute_score(
    solution_str: str, extra_info: Mapping[str, Any] | None, data_source: str = "reasoning_gym"
) -> dict[str, Any]:
    """The task's own score, between 0 and 1, of the answer in the response.

    Args:
        solution_str: the response's text.
        extra_info: ``entry``: the task's entry, a mapping or its JSON text; optionally ``task``.
        data_source: ``reasoning_gym/<task>``.

    Returns:
        ``score`` (0.0 without an answer), ``acc`` (a full score), and the answer as ``pred``.

    Raises:
        ConfigError: the package is not installed, or has no such task.
        DataError: the row has no entry.
    """
    task, entry = read_reference(None, extra_info, data_source)
    answer = extract_answer(solution_str)
    score = 0.0 if answer is None else score_of(task, answer, entry)
    return {"score": score, "acc": score >= 1.0, "pred": answer or ""}


def score_of(task: str, answer: str, entry: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> float:
    """The task's score of an answer; 0.0 for one that its scorer fails on, or does not end with in 5 seconds.

    Args:
        task: its name.
        answer: cut to 20,000 characters.
        entry: the task's entry.
        settings: of the task, where scores depend on them.

    Raises:
        DataError: the scorer fails on the entry's own answer too.
        RewardError: the helper process cannot be started.
    """
    outcome = HELPER(task=task, answer=answer[:_LONGEST], entry=dict(entry), settings=dict(settings or {}))
    if outcome.score is not None:
        return outcome.score
    logger.debug("reasoning-gym's %s did not score %r: %s", task, answer[:100], outcome.message)
    if outcome.kind is OutcomeKind.ERROR:
        check_reference(None, {"entry": entry, "task": task}, f"reasoning_gym/{task}")
    return 0.0


def score_in_helper(
    task: str, answer: str, entry: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> float:
    """In the helper process: what the task's scorer says."""
    limit_memory()
    return float(_scorer(task, json.dumps(settings or {}, sort_keys=True, default=str))(answer, entry))


# scorers of tasks parse answers with computer algebra, and some compute as long as an answer asks them to
HELPER = Helper(score_in_helper, limit_s=5.0)


def reasoning_gym_package() -> Any:
    """The package ``reasoning_gym``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "reasoning_gym tasks need the package reasoning-gym; install it with: pip install 'verl[reasoning-gym]'"
        ) from error
    return reasoning_gym


@cache
def _scorer(task: str, settings: str = "{}") -> Any:
    package = reasoning_gym_package()
    try:
        if settings == "{}":
            return package.get_score_answer_fn(task)
        return package.create_dataset(task, **{"size": 1, "seed": 0, **json.loads(settings)}).score_answer
    except (KeyError, ValueError) as error:
        raise ConfigError(f"reasoning-gym has no task {task!r}: {error}") from error

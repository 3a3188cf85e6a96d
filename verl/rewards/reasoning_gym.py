"""Tasks of the package ``reasoning-gym``, by name: its own scorers on the entry that the row carries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.errors import ConfigError, DataError
from verl.rewards.math import last_boxed
from verl.rewards.references import is_missing, mapping_of, reads_reference
from verl.rewards.tags import last_answer


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


@reads_reference(read_reference)
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
    score = 0.0 if answer is None else float(_scorer(task)(answer, entry))
    return {"score": score, "acc": score >= 1.0, "pred": answer or ""}


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
def _scorer(task: str) -> Any:
    try:
        return reasoning_gym_package().get_score_answer_fn(task)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"reasoning-gym has no task {task!r}: {error}") from error

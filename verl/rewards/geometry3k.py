r"""Geometry3k: the boxed answer, and a little for thinking first: ``<think>...</think> ... \boxed{...}``."""

from __future__ import annotations

from typing import Any

from verl.rewards.math import is_any_of, last_boxed, read_reference
from verl.rewards.references import reads_reference

_PARTS = ("</think>", "\\boxed{", "}")


def format_reward(solution_str: str) -> float:
    """1.0 for a response of the asked form, else 0.0."""
    if not solution_str.lstrip().startswith("<think>"):
        return 0.0
    place = solution_str.index("<think>") + len("<think>")
    for part in _PARTS:
        found = solution_str.find(part, place)
        if found < 0:
            return 0.0
        place = found + len(part)
    return 1.0


def acc_reward(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 if the last ``\boxed{...}`` equals the reference, else 0.0."""
    references = read_reference(ground_truth)
    answer = last_boxed(solution_str)
    return float(answer is not None and is_any_of(answer, references))


@reads_reference(read_reference)
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.1) -> dict[str, Any]:
    """``(1 - format_score)`` for the right answer plus ``format_score`` for the form.

    Returns:
        ``score``, ``acc``, ``format``.
    """
    right, form = acc_reward(solution_str, ground_truth), format_reward(solution_str)
    return {"score": (1.0 - format_score) * right + format_score * form, "acc": right == 1.0, "format": form}

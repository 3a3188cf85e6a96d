r"""Geometry3k: the boxed answer, and a little for thinking first: ``<think>...</think> ... \boxed{...}``."""

from __future__ import annotations

import re
from typing import Any

from verl.rewards.math import last_boxed, same_answer

_FORM = re.compile(r"\s*<think>.*?</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(solution_str: str) -> float:
    """1.0 for a response of the asked form, else 0.0."""
    return float(_FORM.fullmatch(solution_str) is not None)


def acc_reward(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 if the last ``\boxed{...}`` equals the reference, else 0.0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and same_answer(answer, str(ground_truth)))


def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.1) -> dict[str, Any]:
    """``(1 - format_score)`` for the right answer plus ``format_score`` for the form.

    Returns:
        ``score``, ``acc``, ``format``.
    """
    right, form = acc_reward(solution_str, ground_truth), format_reward(solution_str)
    return {"score": (1.0 - format_score) * right + format_score * form, "acc": right == 1.0, "format": form}

r"""Competition mathematics as DAPO and AIME recipes score it: +1 or -1 for the answer after ``Answer:``."""

from __future__ import annotations

import re
from typing import Any

from verl.rewards.math import is_any_of, last_boxed, read_reference
from verl.rewards.references import reads_reference

_TAIL = 300
_STATED = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def extract_answer(solution_str: str) -> str | None:
    r"""The answer that the last 300 characters state: after the last ``Answer:``, else in the last ``\boxed{...}``."""
    tail = solution_str[-_TAIL:]
    stated = _STATED.findall(tail)
    if not stated:
        return last_boxed(tail)
    text = stated[-1].strip().strip("*").strip()
    return last_boxed(text) or text


@reads_reference(read_reference)
def compute_score(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, wrong_score: float = -1.0
) -> dict[str, Any]:
    """Compare the stated answer with the reference.

    Args:
        solution_str: the response's text.
        ground_truth: the right answer, see :func:`verl.rewards.math.read_reference`.
        score: of a right answer.
        wrong_score: of any other response.

    Returns:
        ``score`` (``wrong_score`` also where no answer is stated), ``acc``, and the answer as ``pred``.
    """
    references = read_reference(ground_truth)
    answer = extract_answer(solution_str)
    right = answer is not None and is_any_of(answer, references)
    return {"score": score if right else wrong_score, "acc": right, "pred": answer or ""}

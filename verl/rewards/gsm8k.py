"""Grade-school arithmetic: the final number, written after ``####``."""

from __future__ import annotations

import re

_NUMBER = r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\$?\.[0-9]+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer that a solution states, without thousands separators and currency sign.

    Args:
        solution_str: the response's text.
        method: ``"strict"`` takes the last number after ``####``; ``"flexible"`` the last number anywhere.

    Returns:
        The number as text, or ``None`` if there is none.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}: choose 'strict' or 'flexible'")
    found = (_MARKED if method == "strict" else _ANY).findall(solution_str)
    return _plain(found[-1]) if found else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Exact match of the final answer.

    Answers are compared as text, after thousands separators and ``$`` are removed: ``1,000`` equals ``1000``, but
    ``007`` differs from ``7``.

    Args:
        solution_str: the response's text.
        ground_truth: the right answer.
        method: where to look for the answer, see :func:`extract_solution`.
        format_score: reward of an answer that is there but wrong.
        score: reward of the right answer.

    Returns:
        ``score``, ``format_score``, or 0.0 where no answer is found.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == _plain(str(ground_truth).strip()) else format_score


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")

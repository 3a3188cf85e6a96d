"""Multiple choice: the letter that the response settles on."""

from __future__ import annotations

import re
from typing import Any

from verl.rewards.math import last_boxed
from verl.rewards.tags import last_answer

_LETTER = r"[(\[]?\s*([A-Z])\s*[)\]]?(?![A-Za-z])"
_ALONE = re.compile(rf"\s*(?:\\text\s*\{{\s*)?{_LETTER}(?:[.:)\s}}].*)?", re.DOTALL)
_STATED = re.compile(
    rf"(?:answer|choice|option)\b(?:\s+is)?\s*:?\s*(?:option|choice)?\s*[*_$]*{_LETTER}", re.IGNORECASE
)
_LINE = re.compile(rf"^\s*[*_]*{_LETTER}[.:)*_\s]*$", re.MULTILINE)


def extract_choice(solution_str: str, method: str = "flexible") -> str | None:
    r"""The letter chosen, upper case.

    Args:
        solution_str: the response's text.
        method: ``"strict"`` reads ``<answer>B</answer>``, ``\boxed{B}`` and "answer is B"; ``"flexible"`` also a letter
            alone on a line, or a response that is nothing but a letter.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}: choose 'strict' or 'flexible'")
    for marked in (last_answer(solution_str), last_boxed(solution_str)):
        if marked is not None and (match := _ALONE.fullmatch(marked)):
            return match.group(1)
    stated = [letter for letter in _STATED.findall(solution_str) if letter.isupper()]
    if stated:
        return stated[-1]
    alone = _LINE.findall(solution_str) if method == "flexible" else []
    return alone[-1] if alone else None


def compute_score(solution_str: str, ground_truth: Any, method: str = "flexible") -> dict[str, Any]:
    """1.0 for the right letter, else 0.0.

    Args:
        solution_str: the response's text.
        ground_truth: the letter, bare or as in ``(B)`` or ``B. text``; a whole number counts choices from 0.
        method: see :func:`extract_choice`.

    Returns:
        ``score``, ``acc``, and the letter as ``pred``.
    """
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool):
        right = chr(ord("A") + ground_truth)
    else:
        match = _ALONE.fullmatch(str(ground_truth).strip())
        if match is None:
            raise ValueError(f"ground_truth={ground_truth!r} is not a choice; give a capital letter or its number")
        right = match.group(1)
    choice = extract_choice(solution_str, method)
    return {"score": float(choice == right), "acc": choice == right, "pred": choice or ""}

"""Multiple choice: the letter that the response settles on."""

from __future__ import annotations

import re
from typing import Any

from verl.errors import DataError
from verl.rewards.math import last_boxed
from verl.rewards.references import reads_reference, required, shown, whole_number
from verl.rewards.tags import last_answer

# The quantifiers are possessive (``*+``): they give nothing back, so each text is read once.
_LETTER = r"[(\[]?+\s*+([A-Z])"
_MARKED = re.compile(rf"\s*+(?:\\text\s*+\{{\s*+)?+{_LETTER}(?=\]?(?:[.:)\s}}]|\Z))")
_STATED = re.compile(
    rf"(?:answer|choice|option)\b(?:\s++is)?+\s*+:?+\s*+(?:option|choice)?+\s*+[*_$]*+{_LETTER}(?![A-Za-z])",
    re.IGNORECASE,
)
_LINE = re.compile(rf"\s*+[*_]*+{_LETTER}(?![A-Za-z])\s*+[)\]]?+[.:)*_\s]*+\Z")


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
        if marked is not None and (match := _MARKED.match(marked)):
            return match.group(1)
    stated = [letter for letter in _STATED.findall(solution_str) if letter.isupper()]
    if stated:
        return stated[-1]
    if method == "flexible":
        for line in reversed(solution_str.split("\n")):
            if match := _LINE.match(line):
                return match.group(1)
    return None


def read_reference(ground_truth: Any, *_: Any, **__: Any) -> list[str]:
    """The letters that are right.

    Args:
        ground_truth: the letter, bare or as in ``(B)`` or ``B. text``; a whole number counts choices from 0; or a list
            of them.

    Raises:
        DataError: one is missing, or is no choice.
    """
    given = required(ground_truth)
    letters = []
    for place, value in enumerate(given if isinstance(given, list | tuple) else [given]):
        value = required(value, "ground_truth" if value is given else f"ground_truth[{place}]")
        if isinstance(value, str):
            match = _MARKED.match(value.strip())
            letter = match.group(1) if match else None
        else:
            number = whole_number(value, "ground_truth")
            letter = chr(ord("A") + number) if 0 <= number < 26 else None
        if letter is None:
            raise DataError(
                f"ground_truth={shown(value)} is not a choice; give a capital letter, or its number from 0 to 25"
            )
        letters.append(letter)
    return letters


@reads_reference(read_reference)
def compute_score(solution_str: str, ground_truth: Any, method: str = "flexible") -> dict[str, Any]:
    """1.0 for the right letter, else 0.0.

    Args:
        solution_str: the response's text.
        ground_truth: see :func:`read_reference`.
        method: see :func:`extract_choice`.

    Returns:
        ``score``, ``acc``, and the letter as ``pred``.
    """
    letters = read_reference(ground_truth)
    choice = extract_choice(solution_str, method)
    return {"score": float(choice in letters), "acc": choice in letters, "pred": choice or ""}

"""Grade-school arithmetic: the final number, written after ``####``."""

from __future__ import annotations

import re
from typing import Any

from verl.errors import DataError
from verl.rewards.references import accepted, reads_reference, required, shown

_NUMBER = r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\$?\.[0-9]+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_IS_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


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


def read_reference(ground_truth: Any, *_: Any, **__: Any) -> list[tuple[str, bool]]:
    """The accepted numbers: their text, and whether they were given as numbers.

    Args:
        ground_truth: a number or its text, a whole solution with ``####``, or a list of them.

    Raises:
        DataError: one is missing or holds no number, so that no answer could equal it.
    """
    given = required(ground_truth)
    values = given if isinstance(given, list | tuple) else [given]
    numbers = []
    for value, text in zip(values, accepted(given), strict=True):
        number = _plain(extract_solution(text) or text.strip())
        if not _IS_NUMBER.fullmatch(number):
            raise DataError(
                f"ground_truth={shown(ground_truth)}: {shown(text)} is no number, so no answer could equal it; write "
                "digits such as 72, -5 or 0.5"
            )
        numbers.append((number, not isinstance(value, str)))
    return numbers


@reads_reference(read_reference)
def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Exact match of the final answer.

    Answers are compared as text, after thousands separators and ``$`` are removed: ``1,000`` equals ``1000``, but
    ``007`` differs from ``7``. A reference that is given as a number is compared as a number: 5.0 equals ``5``.

    Args:
        solution_str: the response's text.
        ground_truth: the right answer, see :func:`read_reference`.
        method: where to look for the answer, see :func:`extract_solution`.
        format_score: reward of an answer that is there but wrong.
        score: reward of the right answer.

    Returns:
        ``score``, ``format_score``, or 0.0 where no answer is found.
    """
    references = read_reference(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    right = any(
        answer == number or (by_value and _canonical(answer) == _canonical(number)) for number, by_value in references
    )
    return score if right else format_score


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def _canonical(number: str) -> str:
    """One text for each value, whatever its number of digits."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0"), fraction.rstrip("0")
    return f"{sign if whole or fraction else ''}{whole}.{fraction}"

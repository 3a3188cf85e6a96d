"""Countdown: an expression that makes a target from given numbers, each used once."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verl.errors import DataError
from verl.rewards.references import is_number, mapping_of, plain, reads_reference, required, shown, whole_number
from verl.rewards.tags import last_answer

_LONGEST = 300
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of ``+ - * /`` over whole numbers, and the numbers used; ``None`` for anything else."""
    text = expression.replace("×", "*").replace("÷", "/").replace("−", "-").strip()
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9+\-*/()\s]+", text):
        return None
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        raise ValueError("not an expression of numbers")

    try:
        return value(ast.parse(text, mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def read_reference(ground_truth: Any, *_: Any, **__: Any) -> tuple[Fraction, list[int]]:
    """Target and numbers.

    Args:
        ground_truth: ``{"target": 24, "numbers": [1, 2, 3, 4]}`` (or ``nums``), or its JSON text.

    Raises:
        DataError: the reference has no target or numbers.
    """
    expected = "countdown needs 'target' and 'numbers'"
    truth = mapping_of(ground_truth, expected)
    numbers = plain(truth.get("numbers") if truth.get("numbers") is not None else truth.get("nums"))
    if not isinstance(numbers, list | tuple) or not numbers or truth.get("target") is None:
        raise DataError(f"ground_truth={shown(ground_truth)}: {expected}")
    target = required(truth["target"], "target")
    try:
        value = Fraction(target.strip() if isinstance(target, str) else str(target))
    except (ValueError, ZeroDivisionError):
        value = None
    if value is None or not (isinstance(target, str) or is_number(target)):
        raise DataError(f"ground_truth={shown(ground_truth)}: target={shown(target)} is no number")
    return value, [whole_number(number, f"numbers[{place}]") for place, number in enumerate(numbers)]


@reads_reference(read_reference)
def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.1, score: float = 1.0
) -> dict[str, Any]:
    """Score the expression in the last ``<answer>...</answer>``; a trailing ``= value`` is ignored.

    Args:
        solution_str: the response's text.
        ground_truth: see :func:`read_reference`.
        format_score: for an answer that is wrong, or no such expression.
        score: for the right value from exactly the given numbers.

    Returns:
        ``score`` (0.0 without an answer), ``acc``, and the expression as ``pred``.
    """
    target, numbers = read_reference(ground_truth)
    answer = last_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": ""}
    expression = answer.split("=", 1)[0].strip()
    result = evaluate(expression)
    right = result is not None and result[0] == target and Counter(result[1]) == Counter(numbers)
    return {"score": score if right else format_score, "acc": right, "pred": expression}

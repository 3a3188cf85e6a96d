"""What a reference may be: one way to read ``ground_truth`` for every scorer, and the check of whole data sets.

A scorer declares how it reads a reference with :func:`reads_reference`. The rule gives the reference in the one form
that the scorer compares with, or raises :class:`~verl.errors.DataError`. A missing reference (``None``, NaN, an empty
text or list) is an error for each of them. A number means its text, so ``5.0`` is ``5``: an integer column with gaps
that pandas wrote has such numbers. A list means any of its values, for scorers that compare answers.

A function of a user that declares nothing takes any reference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

from verl.errors import ConfigError, DataError

Rule = Callable[..., Any]
"""Called with ``(ground_truth, extra_info, data_source)`` and the function's own arguments as keywords."""

_RULE = "reference_rule"
_LONGEST_SHOWN = 80

F = TypeVar("F", bound=Callable[..., Any])


def reads_reference(rule: Rule) -> Callable[[F], F]:
    """Decorator: declare what a reward function accepts as a reference.

    Args:
        rule: called with ``ground_truth``, ``extra_info``, ``data_source`` and, as keywords, the function's configured
            arguments. It returns the reference as the function uses it, or raises
            :class:`~verl.errors.DataError` with the remedy.
    """

    def declare(function: F) -> F:
        setattr(function, _RULE, rule)
        return function

    return declare


def rule_of(function: Any) -> Rule | None:
    """What a reward function declares; None: it takes any reference."""
    rule: Rule | None = getattr(function, _RULE, None)
    return rule


def problem_of(
    function: Any,
    data_source: Any,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> str | None:
    """What is wrong with a row's reference for a reward function; None if nothing is.

    Args:
        function: the plain function, without its configured arguments.
        data_source: of the row.
        ground_truth: of the row.
        extra_info: of the row; some scorers have their reference there.
        arguments: the function's configured arguments.
    """
    rule = rule_of(function)
    if rule is None:
        return None
    try:
        rule(ground_truth, extra_info or {}, data_source, **(arguments or {}))
    except (DataError, ConfigError) as error:
        return str(error)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        # rules raise DataError; a form that one did not foresee is a problem of the row, not of the program
        return f"ground_truth={shown(ground_truth)} cannot be read: {type(error).__name__}: {error}"
    return None


# ---- reading values --------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """NumPy scalars and arrays as Python values; everything else as it is."""
    kind = getattr(getattr(value, "dtype", None), "kind", None)  # of NumPy, which is not imported for it
    if kind is None or not hasattr(value, "tolist"):
        return value
    if kind == "f" and value.dtype.itemsize < 8:  # 0.1, not the nearest float32's 0.10000000149
        return [plain(one) for one in value] if value.shape else float(str(value))
    return value.tolist()


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, not a time, an empty text or an empty list."""
    value = plain(value)
    if value is None:
        return True
    if isinstance(value, str | bytes | list | tuple | Mapping):
        return not (value.strip() if isinstance(value, str) else value)
    try:
        return bool(value != value)  # NaN, pandas' NaT, Decimal's NaN
    except (TypeError, ValueError):
        return True  # pandas' NA compares to itself as NA


def shown(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def required(value: Any, what: str = "ground_truth") -> Any:
    """A value that is there, as a Python value.

    Raises:
        DataError: it is missing.
    """
    if is_missing(value):
        raise DataError(
            f"{what}={shown(value)}: the reference is missing, so no answer could be right; give one, or leave the row "
            "out"
        )
    return plain(value)


def is_number(value: Any) -> bool:
    """Whether a value is a number; truth values are not."""
    return isinstance(value, int | float | Decimal | Fraction) and not isinstance(value, bool)


def text_of(value: Any, what: str = "ground_truth") -> str:
    """The text that a text or a number means: ``5.0`` is ``5``, ``0.5`` is ``0.5``, ``1e-7`` is ``0.0000001``.

    Raises:
        DataError: the value is missing, not finite, or of another type.
    """
    value = required(value, what)
    if isinstance(value, str):
        return value
    if not is_number(value):
        raise DataError(
            f"{what}={shown(value)} ({type(value).__name__}) is no text and no number; write the right answer as text"
        )
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Fraction):
        return str(value)
    if not math.isfinite(value):
        raise DataError(f"{what}={shown(value)} is not a finite number; give the right answer")
    exact = Decimal(repr(value)) if isinstance(value, float) else value
    text = format(exact, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def whole_number(value: Any, what: str) -> int:
    """The integer that a number, or its text, is: ``4``, ``4.0``, ``"4"``.

    Raises:
        DataError: it is missing or no whole number.
    """
    value = required(value, what)
    try:
        number = Fraction(value.strip()) if isinstance(value, str) else Fraction(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or number.denominator != 1:
        raise DataError(f"{what}={shown(value)} is no whole number")
    return int(number)


def accepted(value: Any, what: str = "ground_truth") -> list[str]:
    """The answers that count as right: a text or a number is one, each value of a list is one.

    Raises:
        DataError: a value is missing, or is no text and no number.
    """
    value = required(value, what)
    if isinstance(value, list | tuple):
        return [text_of(one, f"{what}[{place}]") for place, one in enumerate(value)]
    return [text_of(value, what)]


def mapping_of(value: Any, expected: str, what: str = "ground_truth") -> Mapping[str, Any]:
    """A mapping, given as one or as its JSON text.

    Raises:
        DataError: it is missing, or something else.
    """
    value = required(value, what)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(f"{what}={shown(value)} is no JSON text of an object; {expected}") from None
    if not isinstance(value, Mapping):
        raise DataError(f"{what}={shown(value)} ({type(value).__name__}) is no mapping; {expected}")
    return value


# ---- whole data sets -------------------------------------------------------------------------------------------------

Check = Callable[[Any, Any, "Mapping[str, Any] | None"], "str | None"]
"""``(data_source, ground_truth, extra_info)`` -> what is wrong with them."""


def row_problem(check: Check, data_source: Any, reward_model: Any, extra_info: Any) -> str | None:
    """What is wrong with the reference of a row of a data file; None if nothing is.

    Args:
        check: :meth:`verl.rewards.manager.RewardManager.check_reference`, or of a function.
        data_source: of the row.
        reward_model: of the row: a mapping with ``ground_truth``, or its JSON text.
        extra_info: of the row: a mapping, its JSON text, or None.
    """
    try:
        given = reward_model
        if not isinstance(given, Mapping):  # an empty one has lost its null, which is for the rule to judge
            given = mapping_of(given, "it needs 'ground_truth'", "reward_model")
        more = None if is_missing(extra_info) else mapping_of(extra_info, "", "extra_info")
    except DataError as error:
        return str(error).rstrip("; ")
    return check(data_source, given.get("ground_truth"), more)

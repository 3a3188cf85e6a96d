"""What became of one sample's reward: a number, an abstention, an error or a time-out."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from verl.errors import ScoreError

LARGEST = 3.4028234663852886e38
"""The largest score: scores are kept as float32."""


class OutcomeKind(StrEnum):
    """The four ways in which scoring a sample can end."""

    SCORE = "score"
    ABSTAIN = "abstain"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class RewardOutcome:
    """The result for one sample.

    A reward function may return one of these instead of a number, to abstain for example.

    Attributes:
        kind: how scoring ended.
        score: a finite number if ``kind`` is ``SCORE``, otherwise ``None``.
        extra: further values that the function reported, by name.
        message: why there is no score; for an error the traceback.
        fatal: the error is one of set-up, so that no sample can be scored, whatever the policy.
    """

    kind: OutcomeKind
    score: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    fatal: bool = False

    @classmethod
    def scored(cls, score: float, extra: Mapping[str, Any] | None = None) -> RewardOutcome:
        """A score; a number that is not finite becomes an error."""
        if not is_score(score):
            return cls.error(f"the reward function returned the score {score}, which is not a finite number")
        return cls(OutcomeKind.SCORE, float(score), dict(extra or {}))

    @classmethod
    def abstain(cls, reason: str = "") -> RewardOutcome:
        """No opinion on this sample."""
        return cls(OutcomeKind.ABSTAIN, message=reason)

    @classmethod
    def error(cls, message: str, *, fatal: bool = False) -> RewardOutcome:
        """Scoring failed."""
        return cls(OutcomeKind.ERROR, message=message, fatal=fatal)

    @classmethod
    def timeout(cls, seconds: float, detail: str = "") -> RewardOutcome:
        """Scoring took longer than allowed."""
        return cls(OutcomeKind.TIMEOUT, message=f"no score within {seconds:g} s{detail}")


def is_score(number: float) -> bool:
    """Whether a number can be a score: finite, also as float32."""
    return math.isfinite(number) and abs(number) <= LARGEST


def checked_score(value: Any, source: str) -> float:
    """The one check that every score passes that no reward function has made.

    Args:
        value: what was given.
        source: who gave it, for the message: ``tool 'search'``, for example.

    Raises:
        ScoreError: it is no finite number.
    """
    number = as_number(value)
    if number is None or not is_score(number):
        raise ScoreError(f"{source} gave the reward {describe(value)}; a finite number is needed")
    return number


def as_outcome(value: Any) -> RewardOutcome:
    """Read what a reward function returned.

    A number (Python, NumPy, or a tensor of one element) is a score; a mapping needs the key ``score`` and its other
    keys are extra values. ``None``, strings, missing scores, NaN and infinities are errors, never a score of 0.
    """
    if isinstance(value, RewardOutcome):
        return _checked(value)
    if isinstance(value, Mapping):
        if "score" not in value:
            return RewardOutcome.error(
                f"the reward function returned a mapping without 'score'; its keys are {list(value)}"
            )
        score = as_number(value["score"])
        if score is None:
            return RewardOutcome.error(f"the reward function returned the score {describe(value['score'])}")
        return RewardOutcome.scored(score, {str(k): v for k, v in value.items() if k != "score"})
    score = as_number(value)
    if score is None:
        return RewardOutcome.error(
            f"the reward function returned {describe(value)}; expected a number or a mapping with 'score'"
        )
    return RewardOutcome.scored(score)


def _checked(value: RewardOutcome) -> RewardOutcome:
    if value.kind is not OutcomeKind.SCORE:
        return value
    score = as_number(value.score)
    if score is None:
        return RewardOutcome.error("the reward function returned a score outcome without a score")
    return RewardOutcome.scored(score, value.extra)


def as_number(value: Any) -> float | None:
    """The number that a value is (Python, NumPy, or a tensor of one element); None if it is none."""
    try:
        if isinstance(value, numbers.Real):
            return float(value)
        if getattr(value, "shape", None) is not None and hasattr(value, "item"):  # NumPy and torch, neither imported
            item = value.item()
            return float(item) if isinstance(item, numbers.Real) else None
    except OverflowError:
        return math.inf  # an integer beyond all floats
    except (ValueError, RuntimeError, TypeError):
        return None
    return None


def describe(value: Any) -> str:
    """A value and its type for a message."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  values are of users' classes
        text = f"<repr failed: {type(error).__name__}>"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"

"""What became of one sample's reward: a number, an abstention, an error or a time-out."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
        if not math.isfinite(score):
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


def as_outcome(value: Any) -> RewardOutcome:
    """Read what a reward function returned.

    A number (Python, NumPy, or a tensor of one element) is a score; a mapping needs the key ``score`` and its other
    keys are extra values. ``None``, strings, missing scores, NaN and infinities are errors, never a score of 0.
    """
    if isinstance(value, RewardOutcome):
        return RewardOutcome.scored(value.score, value.extra) if value.score is not None else _without_score(value)
    if isinstance(value, Mapping):
        if "score" not in value:
            return RewardOutcome.error(
                f"the reward function returned a mapping without 'score'; its keys are {list(value)}"
            )
        score = _number(value["score"])
        if score is None:
            return RewardOutcome.error(f"the reward function returned the score {_describe(value['score'])}")
        return RewardOutcome.scored(score, {str(k): v for k, v in value.items() if k != "score"})
    score = _number(value)
    if score is None:
        return RewardOutcome.error(
            f"the reward function returned {_describe(value)}; expected a number or a mapping with 'score'"
        )
    return RewardOutcome.scored(score)


def _without_score(value: RewardOutcome) -> RewardOutcome:
    if value.kind is OutcomeKind.SCORE:
        return RewardOutcome.error("the reward function returned a score outcome without a score")
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "shape", None) is not None and hasattr(value, "item"):  # NumPy and torch, neither imported
        try:
            item = value.item()
        except (ValueError, RuntimeError):
            return None
        return float(item) if isinstance(item, numbers.Real) else None
    return None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"

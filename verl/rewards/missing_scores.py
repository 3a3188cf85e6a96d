"""What a missing score means: the configured consequence of an abstention, an error or a time-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from verl.errors import ConfigError
from verl.rewards.outcome import OutcomeKind, RewardOutcome


class Action(StrEnum):
    """What is done with a sample.

    Attributes:
        SCORE: its score counts.
        STOP: the run ends with the cause.
        PENALISE: it gets ``error_score``.
        DROP_SAMPLE: it leaves the loss and its prompt's group; the other samples of the prompt stay.
        DROP_GROUP: every sample of its prompt leaves the loss, so that no group is compared on fewer samples.
    """

    SCORE = "score"
    STOP = "stop"
    PENALISE = "penalise"
    DROP_SAMPLE = "drop_sample"
    DROP_GROUP = "drop_group"


CONSEQUENCES = (Action.STOP, Action.PENALISE, Action.DROP_SAMPLE, Action.DROP_GROUP)
SPELLINGS = {
    "fail": Action.STOP,
    "score": Action.PENALISE,
    "penalize": Action.PENALISE,
    "abstain": Action.DROP_SAMPLE,
}
"""Other words for the same consequences."""


def consequence(name: str, key: str) -> Action:
    """The action that a configured word stands for.

    Raises:
        ConfigError: no such consequence; ``key`` is named in the message.
    """
    word = SPELLINGS.get(name, name)
    if word not in CONSEQUENCES:
        raise ConfigError(f"{key}={name!r}: choose one of {', '.join(CONSEQUENCES)}")
    return Action(word)


@dataclass(frozen=True)
class ScoringOptions:
    """How samples are scored and what a missing score means.

    Attributes:
        timeout_s: seconds that one call may take; ``None`` for no limit. Waiting for a free place or for ``max_rpm``
            does not count.
        num_workers: processes that score; 1 scores in this process.
        max_concurrent: calls at the same time of an ``async`` function (256 unless given), and of a manager that
            streams (8 unless given).
        max_rpm: calls started per minute, evenly spaced; ``None`` for no limit.
        max_retries: further calls after an error or a time-out, before its consequence applies.
        retry_wait_s: seconds before the first further call; doubles with each.
        on_error: consequence of an error, see :class:`Action`.
        on_timeout: consequence of a time-out.
        on_abstain: consequence of an abstention.
        error_score: the score of ``penalise``.
        max_failed_fraction: more errors and time-outs than this part of a batch raise, whatever the consequence.
    """

    timeout_s: float | None = None
    num_workers: int = 1
    max_concurrent: int | None = None
    max_rpm: float | None = None
    max_retries: int = 0
    retry_wait_s: float = 1.0
    on_error: str = "stop"
    on_timeout: str = "stop"
    on_abstain: str = "drop_sample"
    error_score: float = 0.0
    max_failed_fraction: float = 0.5

    def __post_init__(self) -> None:
        for key in ("on_error", "on_timeout", "on_abstain"):
            object.__setattr__(self, key, consequence(getattr(self, key), f"reward.{key}"))

    def action(self, kind: OutcomeKind) -> Action:
        """What happens to a sample whose scoring ended so."""
        return {
            OutcomeKind.SCORE: Action.SCORE,
            OutcomeKind.ABSTAIN: Action(self.on_abstain),
            OutcomeKind.ERROR: Action(self.on_error),
            OutcomeKind.TIMEOUT: Action(self.on_timeout),
        }[kind]

    def key(self, kind: OutcomeKind) -> str:
        """The configuration key that decides about such an outcome."""
        return {OutcomeKind.ABSTAIN: "on_abstain", OutcomeKind.TIMEOUT: "on_timeout"}.get(kind, "on_error")


def resolve(
    outcomes: Sequence[RewardOutcome], groups: Sequence[str] | None, options: ScoringOptions
) -> list[float | None]:
    """The score of every sample after the configured consequences; ``None`` for one that does not count.

    Args:
        outcomes: one per sample, none of which stops the run.
        groups: the prompt (``uid``) of each sample; ``None`` where they are not known, and then only the sample itself
            is dropped.
        options: the consequences.
    """
    scores: list[float | None] = []
    dropped: set[str] = set()
    for row, outcome in enumerate(outcomes):
        action = options.action(outcome.kind)
        if action is Action.DROP_GROUP and groups is not None:
            dropped.add(groups[row])
        scores.append(options.error_score if action is Action.PENALISE else outcome.score)
    if groups is None or not dropped:
        return scores
    return [None if group in dropped else score for score, group in zip(scores, groups, strict=True)]

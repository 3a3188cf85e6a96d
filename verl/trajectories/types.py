"""Ragged records of what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """One training row: what the model was shown, and what it wrote next.

    Attributes:
        prompt_ids: tokens before the response.
        response_ids: tokens after them, those of tools and environments included.
        response_mask: 1 where the model sampled the token, else 0; None: it sampled all.
        log_probs: log-probability of each sampled token, 0.0 elsewhere; None where none was sampled.
        token_versions: weights that sampled each token, -1 elsewhere; None: the oldest of ``policy_versions``.
        policy_versions: oldest and newest weights that sampled it; None: unknown.
        overlong: it was cut off at a limit of length; None: if the response is as long as it may be.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int] | None = None
    log_probs: Sequence[float] | None = None
    token_versions: Sequence[int] | None = None
    policy_versions: tuple[int, int] | None = None
    overlong: bool | None = None

    @property
    def sampled(self) -> Sequence[int]:
        """1 for each token that the model sampled, else 0."""
        return [1] * len(self.response_ids) if self.response_mask is None else self.response_mask


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All that one player wrote in one sample.

    Attributes:
        segments: in the order of time; the last one has the score.
        score: of the whole; None leaves it to the reward function.
        turn_scores: one for each turn of the model, over all segments; None: there are none.
        num_turns: turns of both sides, the prompt's last message included.
        columns: further columns of the batch.
        images: images that came behind the prompt's (``pixel_values``, ``image_grid_thw``), and ``image_starts`` of all
            images of the last segment; None without any.
    """

    segments: Sequence[Segment]
    score: float | None = None
    turn_scores: Sequence[float] | None = None
    num_turns: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] | None = None

    @property
    def last(self) -> Segment:
        """The newest segment."""
        return self.segments[-1]

    def version_range(self) -> tuple[int, int]:
        """Oldest and newest weights that sampled any segment; -1 where unknown."""
        ranges = [one.policy_versions for one in self.segments if one.policy_versions is not None]
        known = [version for pair in ranges for version in pair if version >= 0]
        return (min(known), max(known)) if known else (-1, -1)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one row of a request has become.

    Attributes:
        trajectories: one, or one for each player of an episode.
        info: numbers for metrics, see :meth:`verl.agent_loop.trace.Trace.summary`.
        aborted: why there is no result; None if there is one.
        unfinished: of a sample that was stopped, the completions so far in plain form; else None.
    """

    trajectories: Sequence[Trajectory]
    info: dict[str, Any] = field(default_factory=dict)
    aborted: str | None = None
    unfinished: Sequence[Mapping[str, Any]] | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The first player's."""
        return self.trajectories[0]

    def to_plain(self) -> dict[str, Any]:
        """The form that is sent and saved: dicts and lists of what :attr:`Trajectory.columns` and numbers hold."""
        trajectories = [
            {**_fields(one), "segments": [_fields(segment) for segment in one.segments]} for one in self.trajectories
        ]
        return {**_fields(self), "trajectories": trajectories}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Sample:
        """The sample that :meth:`to_plain` described."""
        trajectories = [
            Trajectory(**{**one, "segments": [_segment(segment) for segment in one["segments"]]})
            for one in values["trajectories"]
        ]
        return cls(trajectories, values["info"], values["aborted"], values["unfinished"])


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _segment(values: Mapping[str, Any]) -> Segment:
    versions = values["policy_versions"]
    return Segment(**{**values, "policy_versions": None if versions is None else tuple(versions)})


def turn_ends(mask: Sequence[int]) -> list[int]:
    """The columns in which the model's turns end (runs of 1 in a response mask)."""
    return [column for column, (a, b) in enumerate(pairwise([*mask, 0])) if a and not b]

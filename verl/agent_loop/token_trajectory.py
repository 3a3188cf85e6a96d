"""The tokens of a trajectory: what was sampled is what is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from verl.errors import DataError
from verl.models.vision import PromptImages
from verl.workers.rollout.types import Completion

ASSISTANT = "assistant"


@dataclass
class TokenTrajectory:
    """Prompt and response of one trajectory, token by token; only ever appended to.

    The lists about the response have one entry per response token. The words of the model enter with
    :meth:`append_sampled`, exactly as sampled; the words of tools, users and environments with :meth:`append_given`.

    Attributes:
        prompt_ids: the prompt.
        ids: response tokens.
        mask: 1 where the model sampled the token, else 0.
        log_probs: log-probability of a sampled token, 0.0 for a given one.
        turns: number of the turn that a token belongs to, from 0; the model's and the others' turns are counted alike.
        roles: who said it: ``assistant``, or the role of the message (``tool``, ``user``, ...).
        versions: policy version that sampled the token; -1 for a given one.
        images: of prompt and response, with their places; None without any.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    images: PromptImages | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> list[int]:
        """Everything so far: what the model reads next."""
        return self.prompt_ids + self.ids

    @property
    def num_turns(self) -> int:
        """Turns after the prompt."""
        return self.turns[-1] + 1 if self.turns else 0

    def append_sampled(self, completion: Completion) -> None:
        """Add a turn of the model, or go on with the one that it is in.

        Raises:
            DataError: a token without a log-probability.
        """
        count = len(completion.token_ids)
        if len(completion.log_probs) != count:
            raise DataError(f"{count} sampled tokens came with {len(completion.log_probs)} log-probabilities")
        if not count:
            return
        self._extend(completion.token_ids, 1, completion.log_probs, ASSISTANT, completion.token_versions)

    def append_given(self, token_ids: Sequence[int], role: str) -> None:
        """Add a turn that the model did not write."""
        if role == ASSISTANT:
            raise DataError("a turn of the assistant is sampled; add it with append_sampled")
        count = len(token_ids)
        if count:
            self._extend(token_ids, 0, [0.0] * count, role, [-1] * count)

    def _extend(
        self, ids: Sequence[int], mask: int, log_probs: Sequence[float], role: str, versions: Sequence[int]
    ) -> None:
        turn = self.num_turns if not self.roles or self.roles[-1] != role else self.turns[-1]
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))
        self.log_probs.extend(log_probs)
        self.turns.extend([turn] * len(ids))
        self.roles.extend([role] * len(ids))
        self.versions.extend(versions)
        self.check()

    def check(self) -> None:
        """Raise :class:`DataError` unless every list has one entry per response token."""
        lengths = {
            name: len(getattr(self, name)) for name in ("ids", "mask", "log_probs", "turns", "roles", "versions")
        }
        if len(set(lengths.values())) > 1:
            raise DataError(f"the lists of a trajectory must be equally long, they are {lengths}")

    def state_hashes(self) -> list[str]:
        """For each turn of the model a name of what it answered: the others' words since its turn before.

        Steps of different trajectories that answered the same words have the same name (GiGPO's groups of steps).
        """
        starts = [0, *(column for column, (a, b) in enumerate(pairwise(self.mask), start=1) if a != b), len(self.ids)]
        shown: list[int | str] = [*self.prompt_ids, *self._image_keys(0, len(self.prompt_ids))]
        names = []
        for start, end in pairwise(starts):
            if start < end and self.mask[start]:
                names.append(_digest(shown))
                shown = []
            else:
                first = len(self.prompt_ids)
                shown = [*self.ids[start:end], *self._image_keys(first + start, first + end)]
        return names

    def _image_keys(self, begin: int, end: int) -> list[str]:
        """Keys of the images in a stretch of the tokens."""
        if self.images is None:
            return []
        assert self.images.starts is not None
        return [key for key, at in zip(self.images.keys, self.images.starts, strict=True) if begin <= at < end]

    def version_range(self) -> tuple[int, int]:
        """Oldest and newest policy version; (-1, -1) without a sampled token."""
        sampled = [version for version, mask in zip(self.versions, self.mask, strict=True) if mask]
        return (min(sampled), max(sampled)) if sampled else (-1, -1)


def _digest(ids: Sequence[int | str]) -> str:
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).hexdigest()

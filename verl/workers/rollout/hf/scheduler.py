"""Which requests run next. Pure bookkeeping: no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.models.vision import PromptImages
from verl.workers.rollout.base import Completion, GenerationRequest

#: equal for sequences that one prefill serves
_GroupKey = tuple[tuple[int, ...], Any]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way.

    Attributes:
        request: what was asked.
        deliver: called once with the completion.
        first_column: cache column of the first token that is sampled now, once it runs.
        context_ids: what that token follows: the prompt, and the tokens of a partial completion.
    """

    request: GenerationRequest
    deliver: Callable[[Completion], None]
    first_column: int = -1
    context_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.context_ids = self.request.context_ids

    @property
    def budget(self) -> int:
        """Most tokens to sample now."""
        return self.request.remaining

    @property
    def penalised_ids(self) -> list[int] | None:
        """Tokens whose repetition is penalised; None without a penalty."""
        return self.context_ids if self.request.sampling.repetition_penalty != 1.0 else None

    @property
    def group_key(self) -> _GroupKey:
        """Equal for sequences with the same context and images."""
        images = self.request.images
        return tuple(self.context_ids), None if images is None else images.identity

    @property
    def context_length(self) -> int:
        return len(self.context_ids)

    @property
    def total_length(self) -> int:
        return len(self.context_ids) + self.request.remaining


@dataclass(slots=True, eq=False)
class PromptGroup:
    """Waiting sequences with the same context, mostly a prompt, and images: one prefill serves all of them.

    Attributes:
        context_ids: the context.
        burst: number of the call that brought the first of them.
        members: the sequences.
    """

    context_ids: list[int]
    burst: int
    members: list[Sequence] = field(default_factory=list)

    @property
    def images(self) -> PromptImages | None:
        """The images of the prompt."""
        return self.members[0].request.images


class Scheduler:
    """Admits waiting requests to the running batch.

    Requests of one call run from the longest prompt to the shortest, so that neighbours in the batch have similar
    lengths; requests of an earlier call go first. A group enters as a whole, unless it alone exceeds the batch.

    Args:
        max_rows: most sequences that run together.
        max_cached_tokens: most (rows × columns) of cache; None for no limit.
    """

    def __init__(self, max_rows: int, max_cached_tokens: int | None = None) -> None:
        self.max_rows = max_rows
        self.max_cached_tokens = max_cached_tokens
        self._groups: dict[_GroupKey, PromptGroup] = {}
        self._order: list[PromptGroup] = []
        self._sorted = True
        self._bursts = 0
        self.waiting = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of one call."""
        self._bursts += 1
        for sequence in sequences:
            key = sequence.group_key
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = PromptGroup(sequence.context_ids, self._bursts)
                self._order.append(group)
                self._sorted = False
            group.members.append(sequence)
            self.waiting += 1

    def admit(self, running: int, columns: int) -> list[PromptGroup]:
        """Take the groups that enter now.

        Args:
            running: sequences in the batch.
            columns: columns that the batch's cache has to span for them; 0 for none.

        Returns:
            Groups, longest prompt first within a call; empty when nothing should enter yet.
        """
        if not self.waiting:
            return []
        free = self.max_rows - running
        if running and free < self.max_rows // 4 and free < self.waiting:
            return []  # let more rows get free: a prefill has a fixed cost
        if not self._sorted:
            self._order.sort(key=lambda group: (group.burst, -len(group.context_ids)))
            self._sorted = True
        taken: list[PromptGroup] = []
        for group in list(self._order):
            width = max(columns, max(member.total_length for member in group.members))
            room = free
            if self.max_cached_tokens is not None:
                room = min(room, self.max_cached_tokens // width - running)
            if room < len(group.members):
                if running:
                    break
                # an empty batch always makes progress, even when one group is larger than the batch
                part = PromptGroup(group.context_ids, group.burst, group.members[: max(room, 1)])
                del group.members[: len(part.members)]
                taken.append(part)
                self.waiting -= len(part.members)
                break
            taken.append(group)
            self._order.remove(group)
            del self._groups[group.members[0].group_key]
            self.waiting -= len(group.members)
            running += len(group.members)
            free -= len(group.members)
            columns = width
        return taken

    def remove(self, unwanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out the waiting sequences for which ``unwanted`` is true."""
        removed: list[Sequence] = []
        for group in list(self._order):
            out = [member for member in group.members if unwanted(member)]
            if not out:
                continue
            removed += out
            group.members = [member for member in group.members if not unwanted(member)]
            if not group.members:
                self._order.remove(group)
                del self._groups[out[0].group_key]
        self.waiting -= len(removed)
        return removed

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences."""
        for group in self._order:
            yield from group.members


def split_for_prefill(groups: list[PromptGroup], max_tokens: int, forward_cost: float) -> list[list[PromptGroup]]:
    """Cut groups, longest prompt first, into forwards.

    A forward pads its prompts to the longest one; a new one starts when the padding would cost more than another
    forward, or when the padded tokens exceed ``max_tokens``.

    Args:
        groups: what is to be prefilled.
        max_tokens: most padded tokens of a forward (one prompt always fits).
        forward_cost: fixed cost of a forward, in tokens.
    """
    pieces: list[list[PromptGroup]] = []
    width = waste = 0
    for group in sorted(groups, key=lambda item: -len(item.context_ids)):
        length = len(group.context_ids)
        waste += width - length
        if not pieces or waste > forward_cost or (len(pieces[-1]) + 1) * width > max_tokens:
            pieces.append([])
            width, waste = length, 0
        pieces[-1].append(group)
    return pieces

"""Which requests run next. Pure bookkeeping: no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.models.vision import PromptImages
from verl.workers.rollout.hf.kv_budget import CacheBudget, Progress
from verl.workers.rollout.types import Completion, FinishReason, GenerationRequest

#: equal for sequences whose prompt one prefill serves
GroupKey = tuple[tuple[int, ...], Any]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way.

    Attributes:
        request: what was asked.
        deliver: called once with the completion.
        first_column: cache column of the first token that is sampled now, once it runs.
        ticket: place in the order in which requests were first admitted; infinite before.
        preempted: how often it has left the batch unfinished.
        token_ids, log_probs: what it sampled before it was preempted.
        context_ids: what the next token follows, once it runs: the prompt, the tokens of a partial completion and those
            sampled before it was preempted.
        seed: of its random numbers.
        key: equal for sequences with the same prompt and images.
    """

    request: GenerationRequest
    deliver: Callable[[Completion], None]
    first_column: int = -1
    ticket: float = math.inf
    preempted: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    context_ids: list[int] = field(init=False)
    seed: int = field(init=False)
    key: GroupKey = field(init=False)

    def __post_init__(self) -> None:
        request, images = self.request, self.request.images
        self.context_ids = request.context_ids
        seed = request.sampling.seed
        self.seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) if seed is None else seed % 2**64
        self.key = tuple(request.prompt_ids), None if images is None else images.identity

    @property
    def sampled(self) -> int:
        """Tokens of the completion that the context has."""
        return self.request.sampled + len(self.token_ids)

    @property
    def limit(self) -> int:
        """Most tokens of the whole completion."""
        return self.request.sampling.max_tokens

    @property
    def budget(self) -> int:
        """Most tokens to sample now."""
        return self.request.remaining - len(self.token_ids)

    @property
    def tail_length(self) -> int:
        """Tokens of the context behind the prompt."""
        return len(self.context_ids) - len(self.request.prompt_ids)

    @property
    def penalised_ids(self) -> list[int] | None:
        """Tokens whose repetition is penalised; None without a penalty."""
        return self.context_ids if self.request.sampling.repetition_penalty != 1.0 else None

    @property
    def context_length(self) -> int:
        return len(self.context_ids)

    @property
    def total_length(self) -> int:
        return len(self.context_ids) + self.budget

    def progress(self, new: int = 0) -> Progress:
        """How far it is, with ``new`` tokens behind the context."""
        return Progress(len(self.context_ids) + new, self.sampled + new, self.limit)

    def put_back(self, token_ids: list[int], log_probs: list[float]) -> None:
        """Keep what was sampled, to go on behind it later."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.context_ids = self.context_ids + token_ids
        self.preempted += 1

    def completion(self, token_ids: list[int], log_probs: list[float], reason: FinishReason) -> Completion:
        """All tokens sampled since the request came, of which these are the last."""
        return Completion(self.token_ids + token_ids, self.log_probs + log_probs, reason)


@dataclass(slots=True, eq=False)
class PromptGroup:
    """Waiting sequences with the same prompt and images, which is computed once for all of them.

    Attributes:
        prompt_ids: the prompt.
        burst: number of the call that brought the first of them.
        members: the sequences; those that were admitted before come first.
    """

    prompt_ids: list[int]
    burst: int
    members: list[Sequence] = field(default_factory=list)

    @property
    def images(self) -> PromptImages | None:
        """The images of the prompt."""
        return self.members[0].request.images

    @property
    def order(self) -> tuple[float, int, int]:
        """Groups enter from the smallest on."""
        return self.members[0].ticket, self.burst, -max(member.context_length for member in self.members)


class Scheduler:
    """Admits waiting requests to the running batch.

    Those that were preempted go first, in the order in which they were first admitted; then requests of an earlier
    call. Requests of one call run from the longest context to the shortest, so that neighbours in the batch have
    similar lengths. How many enter is up to the number of rows and the cache.

    Args:
        max_rows: most sequences that run together.
        budget: of the cache; without a limit by default.
    """

    def __init__(self, max_rows: int, budget: CacheBudget | None = None) -> None:
        self.max_rows = max_rows
        self.cache_budget = CacheBudget() if budget is None else budget
        self._groups: dict[GroupKey, PromptGroup] = {}
        self._order: list[PromptGroup] = []
        self._sorted = True
        self._bursts = 0
        self._tickets = 0
        self.waiting = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of one call."""
        self._bursts += 1
        for sequence in sequences:
            self._queue(sequence)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences again that were preempted, before those that never ran."""
        for sequence in sequences:
            group = self._queue(sequence)
            group.members.sort(key=lambda member: member.ticket)

    def _queue(self, sequence: Sequence) -> PromptGroup:
        group = self._groups.get(sequence.key)
        if group is None:
            group = self._groups[sequence.key] = PromptGroup(sequence.request.prompt_ids, self._bursts)
            self._order.append(group)
        group.members.append(sequence)
        self._sorted = False
        self.waiting += 1
        return group

    def admit(self, running: Seq[Progress]) -> list[PromptGroup]:
        """Take the sequences that enter now.

        Args:
            running: the sequences in the batch.

        Returns:
            Groups with the members that enter; empty when nothing should enter yet.
        """
        if not self.waiting:
            return []
        if not self._sorted:
            self._order.sort(key=lambda group: group.order)
            self._sorted = True
        chosen = self._choose(running)
        count = sum(number for _, number in chosen)
        if running and count < self.waiting and count < (len(running) + count) // 4:
            return []  # let more rows get free: a prefill has a fixed cost
        return [self._take(group, number) for group, number in chosen]

    def _choose(self, running: Seq[Progress]) -> list[tuple[PromptGroup, int]]:
        """Groups from the front of the queue, and how many members of each enter."""
        free = self.max_rows - len(running)
        horizon = max(member.budget for member in self)
        forecast = self.cache_budget.forecast(running, horizon)
        chosen: list[tuple[PromptGroup, int]] = []
        for group in self._order:
            number = 0
            while number < min(len(group.members), free):
                progress = group.members[number].progress()
                wanted = min(_leading(group.members[number:], progress), free - number)
                entering = forecast.room(progress, wanted)
                if not entering:
                    if running or chosen or number:
                        break
                    entering = 1  # one sequence always fits
                forecast.add(progress, entering)
                number += entering
            if number:
                chosen.append((group, number))
                free -= number
            if number < len(group.members):
                break
        return chosen

    def _take(self, group: PromptGroup, number: int) -> PromptGroup:
        """The first members of a group, which leave the queue."""
        entering = PromptGroup(group.prompt_ids, group.burst, group.members[:number])
        del group.members[:number]
        if not group.members:
            self._order.remove(group)
            del self._groups[entering.members[0].key]
        for member in entering.members:
            if member.ticket == math.inf:
                member.ticket = self._tickets
                self._tickets += 1
        self.waiting -= number
        return entering

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
                del self._groups[out[0].key]
        self.waiting -= len(removed)
        return removed

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences."""
        for group in self._order:
            yield from group.members


def _leading(members: Seq[Sequence], progress: Progress) -> int:
    """How many of the first members are equally far."""
    for number, member in enumerate(members):
        if member.progress() != progress:
            return number
    return len(members)

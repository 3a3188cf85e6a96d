"""What is computed when sequences enter the batch, and which of it serves several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch

from verl.models.vision import PromptImages
from verl.workers.rollout.hf.kv_cache import Write
from verl.workers.rollout.hf.scheduler import GroupKey, PromptGroup, Sequence

T = TypeVar("T")


@dataclass(slots=True)
class Beginning:
    """Tokens that are computed from the first one on, once for all rows that begin with them.

    Attributes:
        ids: the tokens.
        images: what placeholders among them stand for.
        members: sequences that have no other tokens.
        continued: sequences that have more behind them.
    """

    ids: list[int]
    images: PromptImages | None
    members: list[Sequence]
    continued: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class PrefillPlan:
    """How the sequences that enter get their keys and values.

    Attributes:
        beginnings: computed first.
        copies: (row of the batch, sequence): the row has the beginning of the sequence's prompt.
        continued: (sequence, tokens): the last tokens of these are computed behind a beginning or a copy; from the most
            tokens to the fewest.
        recomputed: tokens that are computed again because sequences were preempted.
    """

    beginnings: list[Beginning] = field(default_factory=list)
    copies: list[tuple[int, Sequence]] = field(default_factory=list)
    continued: list[tuple[Sequence, int]] = field(default_factory=list)
    recomputed: int = 0


def plan_prefill(groups: Iterable[PromptGroup], rows: Mapping[GroupKey, int], forward_cost: float) -> PrefillPlan:
    """Decide what is computed.

    The prompt of sequences that go on behind sampled tokens is taken from a row that has it, or computed once for all
    of them, where this saves more than the further forward costs. With images it always is: the tokens behind them
    are text, whatever they are.

    Args:
        groups: what enters.
        rows: a row of the running batch for each prompt that one has.
        forward_cost: fixed cost of a forward, in tokens.
    """
    groups = list(groups)
    worth = sum(max(0, _saved(group, group.members[0].key in rows)) for group in groups) > forward_cost
    plan = PrefillPlan()
    for group in groups:
        _plan_group(plan, group, rows.get(group.members[0].key), worth)
    plan.continued.sort(key=lambda item: -item[1])
    for beginning in plan.beginnings:
        if all(member.preempted for member in [*beginning.members, *beginning.continued]):
            plan.recomputed += len(beginning.ids)
    plan.recomputed += sum(count for member, count in plan.continued if member.preempted)
    return plan


def _saved(group: PromptGroup, running: bool) -> int:
    """Tokens that need not be computed when the prompt is shared."""
    fresh = sum(not member.tail_length for member in group.members)
    prompt, going = len(group.prompt_ids), len(group.members) - fresh
    if running:
        return prompt * (going + (fresh > 0)) - fresh
    return prompt * (going + (fresh > 0) - 1)


def _plan_group(plan: PrefillPlan, group: PromptGroup, row: int | None, worth: bool) -> None:
    fresh = [member for member in group.members if not member.tail_length]
    going = [member for member in group.members if member.tail_length]
    images = group.images
    if images is None and not (worth and _saved(group, row is not None) > 0):
        plan.beginnings += [Beginning(group.prompt_ids, None, fresh)] if fresh else []
        plan.beginnings += [Beginning(member.context_ids, None, [member]) for member in going]
        return
    if row is None:
        plan.beginnings.append(Beginning(group.prompt_ids, images, fresh, going))
    else:
        # the last token of the prompt is computed again, for what follows it
        if fresh and (images is not None or len(group.prompt_ids) == 1):
            plan.beginnings.append(Beginning(group.prompt_ids, images, fresh))
        else:
            going = fresh + going
        plan.copies += [(row, member) for member in going]
    plan.continued += [(member, max(member.tail_length, 1)) for member in going]


def split_for_prefill(
    items: Iterable[T], length: Callable[[T], int], max_tokens: int, forward_cost: float
) -> list[list[T]]:
    """Cut what is to be computed into forwards, longest first.

    A forward pads its rows to the longest one; a new one starts when the padding would cost more than another
    forward, or when the padded tokens exceed ``max_tokens``.

    Args:
        items: rows of the forwards.
        length: tokens of one.
        max_tokens: most padded tokens of a forward (one row always fits).
        forward_cost: fixed cost of a forward, in tokens.
    """
    pieces: list[list[T]] = []
    width = waste = 0
    for item in sorted(items, key=lambda item: -length(item)):
        waste += width - length(item)
        if not pieces or waste > forward_cost or (len(pieces[-1]) + 1) * width > max_tokens:
            pieces.append([])
            width, waste = length(item), 0
        pieces[-1].append(item)
    return pieces


def rows_by_prompt(rows: Seq[Sequence | None]) -> dict[GroupKey, int]:
    """A row for each prompt that one has."""
    return {member.key: row for row, member in enumerate(rows) if member is not None}


def prefill_writes(
    beginnings: Seq[Beginning], place: Mapping[int, int], source: torch.Tensor, column: int
) -> list[Write]:
    """Where the keys and values of a forward over beginnings go.

    Args:
        beginnings: rows of the forward.
        place: row of the cache of each sequence, by its ``id``; those of members follow each other.
        source: (members,) row of the forward that each of these has.
        column: contexts end just before it.
    """
    writes: list[Write] = []
    row = first = min((place[id(item.members[0])] for item in beginnings if item.members), default=0)
    for length, run in groupby(enumerate(beginnings), key=lambda pair: len(pair[1].ids)):
        indices: list[int] = []
        count = 0
        for index, item in run:
            for member in item.continued:
                own = place[id(member)]
                end = column - member.context_length + length
                writes.append(Write(slice(own, own + 1), end, length, slice(index, index + 1)))
            if item.members:
                indices.append(index)
                count += len(item.members)
        if not count:
            continue
        whole = slice(indices[0], indices[-1] + 1)
        plain = len(indices) == 1 or count == len(indices) == whole.stop - whole.start
        which = whole if plain else source[row - first : row - first + count]
        writes.append(Write(slice(row, row + count), column, length, which))
        row += count
    return writes


def extension_writes(counts: Seq[int], row: int, column: int) -> list[Write]:
    """Where the keys and values of the last ``counts`` tokens of rows from ``row`` on go; equal counts are together."""
    writes: list[Write] = []
    for count, run in groupby(enumerate(counts), key=lambda pair: pair[1]):
        found = [index for index, _ in run]
        which = slice(found[0], found[-1] + 1)
        writes.append(Write(slice(row + which.start, row + which.stop), column, count, which))
    return writes

"""What a layout change does: which slice goes from which rank to which, in which bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.workers.sharding_manager.reshard.layout import Layout


@dataclass(frozen=True)
class Transfer:
    """One slice of one tensor on its way.

    Attributes:
        name: of the tensor.
        sender, receiver: global ranks.
        start, stop: the box in the whole tensor.
    """

    name: str
    sender: int
    receiver: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


@dataclass(frozen=True)
class BucketItem:
    """Part ``part`` of ``parts`` of the slices of one tensor; every slice is cut along its longest dimension."""

    tensor: int
    part: int
    parts: int


@dataclass(frozen=True)
class SliceMove:
    """A slice from the view of one rank.

    Attributes:
        peer: the other rank; the rank itself for a local copy.
        source: index into the local source tensor; None on the receiving side.
        target: index into the local target tensor; None on the sending side.
        shape: of the slice.
    """

    peer: int
    source: tuple[slice, ...] | None
    target: tuple[slice, ...] | None
    shape: tuple[int, ...]


@dataclass(eq=False)
class _Rows:
    """Slices as arrays: box in the whole tensor and where it is in the receiver's tensor."""

    receiver: np.ndarray  # (N,) index into the plan's ranks
    start: np.ndarray  # (N, D)
    size: np.ndarray  # (N, D)
    target: np.ndarray  # (N, D) first index in the local target tensor

    @property
    def volume(self) -> np.ndarray:
        result: np.ndarray = self.size.prod(axis=1)
        return result

    def take(self, index: np.ndarray) -> _Rows:
        return _Rows(self.receiver[index], self.start[index], self.size[index], self.target[index])


@dataclass(eq=False)
class _Group:
    """Tensors with the same placements on both sides.

    A *cell* is a part of the tensor that each source rank holds whole or not at all. Slices that travel are ordered
    by cell and receiver. ``shares`` says how many of a cell's (slice, tensor) pairs each holder sends; see
    :meth:`senders`.
    """

    tensors: list[int]
    itemsize: int
    travelling: _Rows
    cell: np.ndarray  # (N,) of the travelling slices
    holder_begin: np.ndarray  # (cells + 1,) into the next two
    holder: np.ndarray  # (H,) index into the plan's ranks
    delta: np.ndarray  # (H, D) index in the holder's local tensor minus index in the whole
    local: _Rows
    local_source: np.ndarray  # (L, D) first index in the local source tensor
    unchanged: frozenset[int]  # ranks (indices) whose local tensor is the same before and after
    shares: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (H,)
    _unit: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,) first pair of each slice
    _last: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (H,) running sum of shares

    def assign(self, loads: np.ndarray) -> None:
        """Choose how many pairs each holder sends so that the largest load stays small; adds to ``loads`` (bytes)."""
        times = len(self.tensors)
        self.shares = np.zeros(len(self.holder), dtype=np.int64)
        self._unit = np.arange(len(self.cell), dtype=np.int64) * times
        if len(self.cell):
            used, first, count = np.unique(self.cell, return_index=True, return_counts=True)
            nbytes = np.add.reduceat(self.travelling.volume, first) * self.itemsize
            begin, end = self.holder_begin[used], self.holder_begin[used + 1]
            single = end - begin == 1
            self.shares[begin[single]] = count[single] * times
            np.add.at(loads, self.holder[begin[single]], nbytes[single] * times)
            for index in np.flatnonzero(~single):
                own = slice(int(begin[index]), int(end[index]))
                unit = float(nbytes[index]) / int(count[index])
                holders = self.holder[own]
                share = _level(loads[holders], unit, int(count[index]) * times)
                self.shares[own] = share
                loads[holders] += share * unit
        self._last = np.cumsum(self.shares)

    def senders(self, number: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Positions in ``holder`` of the senders of the group's ``number``-th tensor, for all or some slices.

        A cell's pairs are counted slice by slice and, within a slice, tensor by tensor; holders take them in turn, each
        its share. So a receiver stays with one or two senders, and at any tensor all holders have work.
        """
        unit = self._unit if rows is None else self._unit[rows]
        return np.searchsorted(self._last, unit + number, side="right")

    def staging(self, parts: int, ranks: int) -> np.ndarray:
        """(ranks,) upper bound of the bytes that each rank sends and receives for one part of one tensor."""
        if not len(self.cell):
            return np.zeros(ranks, dtype=np.int64)
        longest = self.travelling.size.max(axis=1, initial=1)
        nbytes = -(-longest // parts) * (self.travelling.volume // longest) * self.itemsize
        received = np.bincount(self.travelling.receiver, weights=nbytes, minlength=ranks)
        used, first = np.unique(self.cell, return_index=True)
        largest = np.zeros(len(self.holder_begin) - 1, dtype=np.int64)
        largest[used] = np.maximum.reduceat(nbytes, first)
        per_holder = np.repeat(largest, np.diff(self.holder_begin))
        times = -(-self.shares // len(self.tensors))
        sent = np.bincount(self.holder, weights=per_holder * times, minlength=ranks)
        return (received + sent).astype(np.int64)

    def sent_bytes(self, ranks: int) -> np.ndarray:
        """(ranks,) bytes that each rank sends for all tensors of the group."""
        if not len(self.cell):
            return np.zeros(ranks, dtype=np.int64)
        times = len(self.tensors)
        volume = self.travelling.volume
        running = np.concatenate([[0], np.cumsum(volume * times)])
        volume = np.append(volume, 0)

        def up_to(pairs: np.ndarray) -> np.ndarray:
            slices, rest = np.divmod(pairs, times)
            result: np.ndarray = running[slices] + volume[slices] * rest
            return result

        return _sum_at(self.holder, up_to(self._last) - up_to(self._last - self.shares), ranks) * self.itemsize

    def most_parts(self) -> int:
        """The number of parts beyond which cutting finer changes nothing."""
        return int(self.travelling.size.max(initial=1))


@dataclass(frozen=True, eq=False)
class Plan:
    """Slice transfers from a source layout to a target layout.

    Attributes:
        source, target: the layouts.
        ranks: all ranks of both, ascending; arrays below have one number for each.
        wire: dtype in which each tensor travels: the narrower one of both sides.
        buckets: what is transferred together, in order; the same for every rank.
        bucket_bytes: no rank sends and receives more than this in one bucket.
        received, sent: (ranks,) int64 bytes that cross between ranks.
        copied: (ranks,) int64 bytes of the target that are copied within the rank.
        unchanged: (ranks,) int64 bytes of the target that are the source's own tensors.
        redundant: (ranks,) int64 bytes of the source that the rank's target does not contain.
        staged: (ranks,) int64 upper bound of the bytes of any bucket.
    """

    source: Layout
    target: Layout
    ranks: np.ndarray
    wire: tuple[torch.dtype, ...]
    buckets: tuple[tuple[BucketItem, ...], ...] = field(repr=False)
    bucket_bytes: int
    received: np.ndarray = field(repr=False)
    sent: np.ndarray = field(repr=False)
    copied: np.ndarray = field(repr=False)
    unchanged: np.ndarray = field(repr=False)
    redundant: np.ndarray = field(repr=False)
    staged: np.ndarray = field(repr=False)
    _groups: tuple[_Group, ...] = field(repr=False)
    _group_of: tuple[tuple[int, int], ...] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in weight sync order."""
        return tuple(self.target.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes that cross between ranks, all together: the least that any plan can move without relays."""
        return int(self.received.sum())

    def peak_bytes(self) -> np.ndarray:
        """(ranks,) upper bound of shards, one bucket and the generation shard together."""
        peak = self.staged.copy()
        for layout in (self.source, self.target):
            held = layout.local_bytes()
            peak += np.array([held.get(int(rank), 0) for rank in self.ranks])
        result: np.ndarray = peak - self.unchanged
        return result

    def transfers(self, name: str | None = None) -> Iterator[Transfer]:
        """Every transfer (of one tensor) spelled out; for inspection, not for a thousand ranks."""
        for index, tensor in enumerate(self.names):
            if name is not None and tensor != name:
                continue
            group_index, number = self._group_of[index]
            group = self._groups[group_index]
            rows = group.travelling
            senders = group.holder[group.senders(number)]
            for row, sender in enumerate(senders):
                start = rows.start[row]
                yield Transfer(
                    tensor,
                    int(self.ranks[sender]),
                    int(self.ranks[rows.receiver[row]]),
                    tuple(int(value) for value in start),
                    tuple(int(value) for value in start + rows.size[row]),
                )

    def for_rank(self, rank: int) -> RankPlan:
        """The plan as one rank runs it."""
        return RankPlan(self, rank)


class RankPlan:
    """The slices of one rank, spelled out when asked for.

    Args:
        plan: of all ranks.
        rank: a global rank; one that the plan does not name has nothing to do.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        found = np.searchsorted(plan.ranks, rank)
        self.index = int(found) if found < len(plan.ranks) and plan.ranks[found] == rank else -1
        self._receives: dict[int, np.ndarray] = {}
        self._sends: dict[int, tuple[np.ndarray, _Rows]] = {}
        self._copies: dict[int, np.ndarray] = {}

    def unchanged(self, tensor: int) -> bool:
        """Whether the rank's target tensor is its source tensor."""
        return self.index in self.plan._groups[self.plan._group_of[tensor][0]].unchanged

    def receives(self, item: BucketItem) -> list[SliceMove]:
        """Slices that arrive, ordered as the sender orders them."""
        group_index, number = self.plan._group_of[item.tensor]
        group = self.plan._groups[group_index]
        if group_index not in self._receives:
            self._receives[group_index] = np.flatnonzero(group.travelling.receiver == self.index)
        rows = self._receives[group_index]
        moves = []
        senders = group.holder[group.senders(number, rows)]
        for row, sender in zip(rows, senders, strict=True):
            cut = _cut(group.travelling.size[row], item)
            if cut is not None:
                skip, size = cut
                moves.append(
                    SliceMove(int(self.plan.ranks[sender]), None, _box(group.travelling.target[row] + skip, size), size)
                )
        return moves

    def sends(self, item: BucketItem) -> list[SliceMove]:
        """Slices that leave, in the order in which their receivers expect them."""
        group_index, number = self.plan._group_of[item.tensor]
        group = self.plan._groups[group_index]
        if group_index not in self._sends:
            held = np.flatnonzero(group.holder == self.index)
            cells = np.searchsorted(group.holder_begin, held, side="right") - 1
            rows = np.flatnonzero(np.isin(group.cell, cells))
            self._sends[group_index] = (rows, group.travelling.take(rows))
        rows, slices = self._sends[group_index]
        positions = group.senders(number, rows)
        moves = []
        for row in np.flatnonzero(group.holder[positions] == self.index):
            cut = _cut(slices.size[row], item)
            if cut is not None:
                skip, size = cut
                begin = slices.start[row] + group.delta[positions[row]] + skip
                moves.append(SliceMove(int(self.plan.ranks[slices.receiver[row]]), _box(begin, size), None, size))
        return moves

    def copies(self, tensor: int) -> list[SliceMove]:
        """Slices that the rank holds already."""
        group_index, _ = self.plan._group_of[tensor]
        group = self.plan._groups[group_index]
        if group_index not in self._copies:
            self._copies[group_index] = np.flatnonzero(group.local.receiver == self.index)
        moves = []
        for row in self._copies[group_index]:
            size = tuple(int(value) for value in group.local.size[row])
            moves.append(
                SliceMove(self.rank, _box(group.local_source[row], size), _box(group.local.target[row], size), size)
            )
        return moves


def _level(loads: np.ndarray, unit: float, count: int) -> np.ndarray:
    """Divide ``count`` units of work over holders with these loads so that the largest load is smallest.

    Returns:
        (H,) int64; holders with equal loads get equal numbers up to one, earlier ones the more.
    """
    order = np.argsort(loads, kind="stable")
    ordered = loads[order]
    levels = (count * unit + np.cumsum(ordered)) / np.arange(1, len(loads) + 1)
    used = int(np.flatnonzero(levels > ordered)[-1]) + 1 if count else 0
    share = np.zeros(len(loads), dtype=np.int64)
    if used:
        share[order[:used]] = np.maximum(np.floor((levels[used - 1] - ordered[:used]) / unit + 1e-9), 0)
    while (missing := count - int(share.sum())) > 0:
        least = np.argsort(loads + share * unit, kind="stable")[:missing]
        share[least] += 1
    while (excess := int(share.sum()) - count) > 0:  # rounding up by the epsilon above
        fullest = np.argsort(-(loads + share * unit), kind="stable")
        share[fullest[share[fullest] > 0][:excess]] -= 1
    return share


def _sum_at(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total


def _cut(size: np.ndarray, item: BucketItem) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """(skipped indices, size) of the item's part of a slice; None when the part is empty."""
    skip = np.zeros_like(size)
    if item.parts == 1:
        return skip, tuple(int(value) for value in size)
    longest = int(np.argmax(size))
    low = int(size[longest]) * item.part // item.parts
    high = int(size[longest]) * (item.part + 1) // item.parts
    if high == low:
        return None
    skip[longest] = low
    part = size.copy()
    part[longest] = high - low
    return skip, tuple(int(value) for value in part)


def _box(begin: np.ndarray, size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(int(first), int(first) + length) for first, length in zip(begin, size, strict=True))

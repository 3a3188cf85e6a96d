"""Planning a layout change: which slices travel from which rank to which, with the fewest bytes.

The plan is a pure function of two layouts, so every rank works it out for itself and all agree. A rank receives exactly
the elements that its target needs and its source lacks, each of them once: no plan moves less. Where several ranks hold
a slice, the senders are chosen so that all send alike, and neighbours are served by neighbours.

Tensors that are cut and owned alike form one group whose geometry is worked out once, in arrays; the slices of a single
rank are spelled out only when that rank runs. A thousand ranks of a 70B model take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from verl.errors import WeightSyncError
from verl.workers.sharding_manager.reshard.layout import Layout, Placement, TensorInfo
from verl.workers.sharding_manager.reshard.plan import BucketItem, Plan, _Group, _Rows, _sum_at


def plan(source: Layout, target: Layout, *, bucket_bytes: int = 512 << 20) -> Plan:
    """Plan the change from one layout to another.

    Args:
        source: where the weights are.
        target: where they must be; same names and shapes, any dtype.
        bucket_bytes: most bytes that a rank may stage (sent and received) at a time.

    Returns:
        The plan; equal inputs give equal plans in every process.

    Raises:
        WeightSyncError: names or shapes differ, the source lacks a part that the target needs, or ``bucket_bytes`` is
            smaller than what one slice of the finest cut needs.
    """
    if bucket_bytes < 1:
        raise WeightSyncError(f"bucket_bytes={bucket_bytes}: a bucket needs a positive size")
    _check_same_model(source.tensors, target.tensors)
    ranks = np.array(sorted({*source.ranks, *target.ranks}), dtype=np.int64)
    wire = tuple(_wire_dtype(source.tensors[name].dtype, info.dtype) for name, info in target.tensors.items())
    groups: dict[tuple[object, ...], _Group] = {}
    numbers: list[tuple[int, int]] = []
    order: dict[int, int] = {}
    for index, (name, info) in enumerate(target.tensors.items()):
        before, after = source.placements[name], target.placements[name]
        same_dtype = source.tensors[name].dtype == info.dtype
        key = (info.shape, before.key, after.key, wire[index].itemsize, same_dtype)
        group = groups.get(key)
        if group is None:
            group = groups[key] = _make_group(name, before, after, ranks, wire[index].itemsize, same_dtype)
            order[id(group)] = len(order)
        numbers.append((order[id(group)], len(group.tensors)))
        group.tensors.append(index)
    loads = np.zeros(len(ranks))
    for group in groups.values():
        group.assign(loads)

    members = tuple(groups.values())
    names = tuple(target.tensors)
    received, sent, copied, unchanged, redundant = np.zeros((5, len(ranks)), dtype=np.int64)
    for group in members:
        before_bytes = sum(source.tensors[names[tensor]].dtype.itemsize for tensor in group.tensors)
        after_bytes = sum(target.tensors[names[tensor]].dtype.itemsize for tensor in group.tensors)
        received += _sum_at(group.travelling.receiver, group.travelling.volume, len(ranks)) * (
            group.itemsize * len(group.tensors)
        )
        sent += group.sent_bytes(len(ranks))
        held = _sum_at(group.local.receiver, group.local.volume, len(ranks))
        same = np.zeros(len(ranks), dtype=bool)
        same[list(group.unchanged)] = True
        copied += np.where(same, 0, held) * after_bytes
        unchanged += np.where(same, held, 0) * after_bytes
        name = names[group.tensors[0]]
        before = source.placements[name]
        mine = _sum_at(np.searchsorted(ranks, before.ranks), (before.stop - before.start).prod(axis=1), len(ranks))
        shareable = source.tensors[name].dtype == target.tensors[name].dtype
        redundant += (mine - held if shareable else mine) * before_bytes

    buckets, staged = _fill_buckets(members, numbers, names, len(ranks), bucket_bytes)
    return Plan(
        source,
        target,
        ranks,
        wire,
        buckets,
        bucket_bytes,
        received=received,
        sent=sent,
        copied=copied,
        unchanged=unchanged,
        redundant=redundant,
        staged=staged,
        _groups=members,
        _group_of=tuple(numbers),
    )


def _check_same_model(source: Mapping[str, TensorInfo], target: Mapping[str, TensorInfo]) -> None:
    odd = sorted(source.keys() ^ target.keys())
    if odd:
        raise WeightSyncError(
            f"{len(odd)} tensors are on one side of the layout change only: {', '.join(odd[:5])}; both layouts must "
            "describe the same model under the same names"
        )
    for name, info in target.items():
        if source[name].shape != info.shape:
            raise WeightSyncError(
                f"{name!r} has shape {source[name].shape} in the source layout and {info.shape} in the target layout"
            )


def _wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Casting to the narrower type before sending gives the same values for fewer bytes."""
    return source if source.itemsize < target.itemsize else target


def _fill_buckets(
    groups: tuple[_Group, ...], numbers: list[tuple[int, int]], names: tuple[str, ...], ranks: int, limit: int
) -> tuple[tuple[tuple[BucketItem, ...], ...], np.ndarray]:
    """Tensors in order, as many to a bucket as fit on the fullest rank; too large ones in parts."""
    cuts = [_parts(group, ranks, limit, names[group.tensors[0]]) for group in groups]
    buckets: list[tuple[BucketItem, ...]] = []
    current: list[BucketItem] = []
    load = np.zeros(ranks, dtype=np.int64)
    staged = np.zeros(ranks, dtype=np.int64)
    for tensor, (group_index, _) in enumerate(numbers):
        parts, need = cuts[group_index]
        for part in range(parts):
            if current and int((load + need).max()) > limit:
                staged = np.maximum(staged, load)
                buckets.append(tuple(current))
                current, load = [], np.zeros(ranks, dtype=np.int64)
            current.append(BucketItem(tensor, part, parts))
            load = load + need
    if current:
        staged = np.maximum(staged, load)
        buckets.append(tuple(current))
    return tuple(buckets), staged


def _parts(group: _Group, ranks: int, limit: int, name: str) -> tuple[int, np.ndarray]:
    parts, most = 1, group.most_parts()
    while True:
        need = group.staging(parts, ranks)
        largest = int(need.max(initial=0))
        if largest <= limit:
            return parts, need
        if parts >= most:
            raise WeightSyncError(
                f"bucket_bytes={limit} is too small: the smallest pieces of {name!r} need {largest} bytes on one rank"
            )
        parts = min(most, max(parts + 1, parts * largest // limit))


def _make_group(
    name: str, before: Placement, after: Placement, ranks: np.ndarray, itemsize: int, same_dtype: bool
) -> _Group:
    """The geometry of one tensor; the same for all tensors with these placements."""
    cell_start, cell_stop, holder_begin, holder, delta = _cells(before, ranks)
    start, stop, entry_of = _distinct_boxes(after)
    receivers = np.searchsorted(ranks, after.ranks)
    by_box = np.argsort(entry_of, kind="stable")
    per_box = np.bincount(entry_of, minlength=len(start))
    first = np.concatenate([[0], np.cumsum(per_box)])

    low = np.maximum(start[:, None, :], cell_start[None, :, :])
    size = np.minimum(stop[:, None, :], cell_stop[None, :, :]) - low
    found = (size > 0).all(axis=2)
    covered = np.where(found, size.prod(axis=2), 0).sum(axis=1)
    gaps = np.flatnonzero(covered != (stop - start).prod(axis=1))
    if len(gaps):
        gap = int(gaps[0])
        where = ", ".join(f"{int(a)}:{int(b)}" for a, b in zip(start[gap], stop[gap], strict=True))
        receiver = int(after.ranks[by_box[first[gap]]])
        raise WeightSyncError(
            f"rank {receiver} needs {name!r}[{where}], of which no rank of the source layout holds some part; check "
            "that stages, experts and slices of the source cover the whole tensor"
        )
    box, cell = np.nonzero(found)
    # every intersection once for each rank that needs it
    times = per_box[box]
    pair = np.repeat(np.arange(len(box)), times)
    entry = by_box[np.repeat(first[box], times) + np.arange(len(pair)) - np.repeat(np.cumsum(times) - times, times)]
    begin = low[box, cell][pair]
    rows = _Rows(
        receiver=receivers[entry],
        start=begin,
        size=size[box, cell][pair],
        target=begin - after.start[entry] + after.offset[entry],
    )
    cell = cell[pair]
    # what a rank holds itself does not travel
    holding = np.repeat(np.arange(len(holder_begin) - 1), np.diff(holder_begin)) * len(ranks) + holder
    wanted = cell * len(ranks) + rows.receiver
    position = np.minimum(np.searchsorted(holding, wanted), max(len(holding) - 1, 0))
    is_local = holding[position] == wanted if len(holding) else np.zeros(len(wanted), dtype=bool)
    local = np.flatnonzero(is_local)
    travelling = np.flatnonzero(~is_local)
    travelling = travelling[np.lexsort((rows.receiver[travelling], cell[travelling]))]
    kept = rows.take(local)
    return _Group(
        tensors=[],
        itemsize=itemsize,
        travelling=rows.take(travelling),
        cell=cell[travelling],
        holder_begin=holder_begin,
        holder=holder,
        delta=delta,
        local=kept,
        local_source=kept.start + delta[position[local]],
        unchanged=_unchanged(before, after, ranks) if same_dtype else frozenset(),
    )


def _distinct_boxes(placement: Placement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(starts, stops, box of each entry)."""
    dims = placement.start.shape[1]
    if not dims:  # scalars: one box without dimensions
        count = min(1, len(placement.ranks))
        return (*np.zeros((2, count, 0), dtype=np.int64), np.zeros(len(placement.ranks), dtype=np.int64))
    table = np.concatenate([placement.start, placement.stop], axis=1)
    boxes, entry_of = np.unique(table, axis=0, return_inverse=True)
    return boxes[:, :dims], boxes[:, dims:], entry_of.reshape(-1)


def _cells(
    placement: Placement, ranks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Disjoint boxes that make up what the source holds, with the holders of each in order of rank.

    Normally these are the distinct boxes themselves. Where boxes overlap in part, as when replicas are cut differently,
    they are cut along each other's edges.

    Returns:
        starts (C, D), stops (C, D), first holder of each cell (C+1,), holders (H,), index shift of each holder (H, D).
    """
    start, stop, entry_of = _distinct_boxes(placement)
    shift = placement.offset - placement.start
    owner = np.searchsorted(ranks, placement.ranks)
    if _overlap(start, stop):
        edges = [np.unique(np.concatenate([start[:, dim], stop[:, dim]])) for dim in range(start.shape[1])]
        grid = np.stack(np.meshgrid(*[np.arange(len(edge) - 1) for edge in edges], indexing="ij"), -1)
        grid = grid.reshape(-1, len(edges))
        low = np.stack([edge[grid[:, dim]] for dim, edge in enumerate(edges)], -1)
        high = np.stack([edge[grid[:, dim] + 1] for dim, edge in enumerate(edges)], -1)
        inside = ((low[None] >= start[:, None]) & (high[None] <= stop[:, None])).all(axis=2)
        used = inside.any(axis=0)
        start, stop, inside = low[used], high[used], inside[:, used]
        per_box = inside.sum(axis=1)
        entry = np.repeat(np.arange(len(entry_of)), per_box[entry_of])
        cell = np.concatenate([np.flatnonzero(inside[box]) for box in entry_of])
    else:
        entry, cell = np.arange(len(entry_of)), entry_of
    order = np.lexsort((owner[entry], cell))
    entry, cell = entry[order], cell[order]
    again = np.zeros(len(cell), dtype=bool)  # a rank that holds a cell twice
    again[1:] = (cell[1:] == cell[:-1]) & (owner[entry][1:] == owner[entry][:-1])
    entry, cell = entry[~again], cell[~again]
    begin = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=len(start)))])
    return start, stop, begin, owner[entry], shift[entry]


def _overlap(start: np.ndarray, stop: np.ndarray, chunk: int = 256) -> bool:
    for first in range(0, len(start), chunk):
        part = slice(first, first + chunk)
        meets = (np.maximum(start[part, None], start[None]) < np.minimum(stop[part, None], stop[None])).all(axis=2)
        if int(meets.sum()) > len(start[part]):  # more than each with itself
            return True
    return False


def _unchanged(before: Placement, after: Placement, ranks: np.ndarray) -> frozenset[int]:
    """Indices of the ranks whose local tensors have the same shape and contents on both sides."""
    if before.key == after.key:
        same = set(after.local_shapes)
    else:
        mine, theirs = _by_rank(before), _by_rank(after)
        same = {
            rank
            for rank, shape in after.local_shapes.items()
            if before.local_shapes.get(rank) == shape and mine.get(rank) == theirs.get(rank)
        }
    return frozenset(int(index) for index in np.searchsorted(ranks, sorted(same)))


def _by_rank(placement: Placement) -> dict[int, bytes]:
    table = np.concatenate([placement.start, placement.stop, placement.offset], axis=1)
    found, first = np.unique(placement.ranks, return_index=True)
    ends = [*first[1:], len(placement.ranks)]
    return {int(rank): table[lo:hi].tobytes() for rank, lo, hi in zip(found, first, ends, strict=True)}

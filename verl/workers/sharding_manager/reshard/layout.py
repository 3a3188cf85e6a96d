"""Which slices of which tensors each rank holds: the description that resharding is planned from.

A layout is built for all ranks at once from a :class:`~verl.workers.sharding_manager.reshard.grid.RankGrid` and a few
rules, or read from sharded tensors. Tensors of the same shape under the same rules share one :class:`Placement`. That
makes planning for a thousand ranks fast.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from verl.errors import WeightSyncError
from verl.workers.sharding_manager.reshard.grid import RankGrid

#: (first index, end, first index in the local tensor) along one dimension
Interval = tuple[int, int, int]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """The infos of whole (or distributed, then global) tensors."""
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class Placement:
    """The boxes of one tensor that ranks hold; a rank may hold several, as with fused projections.

    Attributes:
        ranks: (N,) int64, ascending; one entry per box.
        start, stop: (N, D) int64, the box in the whole tensor.
        offset: (N, D) int64, where the box begins in the rank's local tensor.
        local_shapes: rank -> shape of its local tensor, padding included.
    """

    ranks: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    offset: np.ndarray
    local_shapes: Mapping[int, tuple[int, ...]]

    @cached_property
    def key(self) -> bytes:
        """Equal for equal contents."""
        shapes = repr(sorted(self.local_shapes.items())).encode()
        return b"".join(part.tobytes() for part in (self.ranks, self.start, self.stop, self.offset)) + shapes

    @classmethod
    def build(cls, dims: int, held: Iterable[tuple[int, Sequence[tuple[Interval, ...]], tuple[int, ...]]]) -> Placement:
        """From (rank, boxes as one interval per dimension, local shape) in any order; empty boxes are dropped."""
        entries: list[tuple[int, tuple[Interval, ...]]] = []
        shapes: dict[int, tuple[int, ...]] = {}
        for rank, boxes, local_shape in sorted(held, key=lambda item: item[0]):
            shapes[rank] = local_shape
            entries += [(rank, box) for box in boxes if all(stop > start for start, stop, _ in box)]
        table = np.array([box for _, box in entries], dtype=np.int64).reshape(len(entries), dims, 3)
        ranks = np.array([rank for rank, _ in entries], dtype=np.int64)
        start, stop, offset = (np.ascontiguousarray(table[:, :, part]) for part in range(3))
        return cls(ranks, start, stop, offset, shapes)

    def boxes_of(self, rank: int) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """(slices of the whole tensor, slices of the local tensor) of each box of a rank."""
        lo, hi = np.searchsorted(self.ranks, [rank, rank + 1])
        found = []
        for start, stop, offset in zip(self.start[lo:hi], self.stop[lo:hi], self.offset[lo:hi], strict=True):
            whole = tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))
            local = tuple(slice(int(o), int(o + b - a)) for a, b, o in zip(start, stop, offset, strict=True))
            found.append((whole, local))
        return found


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the parts of a model are.

    Attributes:
        tensors: name -> shape and dtype of the whole tensor, in weight sync order.
        placements: name -> who holds what of it.
        stored_in: name -> what its local tensors are called, for names that share theirs (fused projections).
    """

    tensors: Mapping[str, TensorInfo]
    placements: Mapping[str, Placement] = field(repr=False)
    stored_in: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that the layout names, ascending."""
        distinct = {id(placement): placement for placement in self.placements.values()}
        return tuple(sorted({rank for placement in distinct.values() for rank in placement.local_shapes}))

    def local_shape(self, name: str, rank: int) -> tuple[int, ...] | None:
        """Shape of the rank's local tensor, None when it has none of this tensor."""
        return self.placements[name].local_shapes.get(rank)

    def local_bytes(self) -> dict[int, int]:
        """Bytes of all local tensors of each rank, padding included."""
        total = dict.fromkeys(self.ranks, 0)
        times: dict[int, int] = {}
        distinct: dict[int, Placement] = {}
        counted: set[str] = set()
        for name, placement in self.placements.items():
            store = self.stored_in.get(name, name)
            if store in counted:
                continue
            counted.add(store)
            distinct[id(placement)] = placement
            times[id(placement)] = times.get(id(placement), 0) + self.tensors[name].dtype.itemsize
        for identity, placement in distinct.items():
            for rank, shape in placement.local_shapes.items():
                total[rank] += math.prod(shape) * times[identity]
        return total

    def shard(self, whole: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """The local tensors of a rank, copied out of whole ones; padding is zero."""
        local = {}
        for name, placement in self.placements.items():
            shape = placement.local_shapes.get(rank)
            if shape is None:
                continue
            local[name] = torch.zeros(shape, dtype=self.tensors[name].dtype, device=whole[name].device)
            for source, target in placement.boxes_of(rank):
                local[name][target] = whole[name][source]
        return local


@dataclass(frozen=True)
class Split:
    """A rule: the tensors that match are cut along a dimension, one part per coordinate of an axis.

    Attributes:
        pattern: regular expression, searched in the name.
        dim: dimension to cut; negative counts from the end.
        axis: axis of the grid.
        sections: sizes of tensors fused along ``dim``, each of which is cut by itself (query, key and value, or gate
            and up projection); a rank's local tensor has its parts one after the other. Empty: one section.
        units: indivisible units per section, such as key-value heads; with fewer units than ranks, neighbouring ranks
            hold the same part. One number holds for every section; 0 means any.
        multiple_of: sections are padded at their end to a multiple of this before they are cut (vocabularies).
    """

    pattern: str
    dim: int
    axis: str = "tp"
    sections: tuple[int, ...] = ()
    units: int | tuple[int, ...] = 0
    multiple_of: int = 1

    def intervals(self, name: str, size: int, part: int, parts: int) -> tuple[list[Interval], int]:
        """The intervals of one part of a dimension of this size, and the size of the local dimension."""
        sections = self.sections or (size,)
        if sum(sections) != size:
            raise WeightSyncError(f"{name!r}: fused sections {sections} do not add up to its {size} rows")
        units = self.units if isinstance(self.units, tuple) else (self.units,) * len(sections)
        if len(units) != len(sections):
            raise WeightSyncError(f"{name!r}: {len(units)} unit counts for {len(sections)} fused sections")
        found: list[Interval] = []
        begin = local = 0
        for length, count in zip(sections, units, strict=True):
            cuts = min(parts, count) if count else parts
            padded = -(-length // self.multiple_of) * self.multiple_of
            if parts % cuts or padded % cuts or (count and count % cuts):
                raise WeightSyncError(
                    f"{name!r}: {length} rows" + (f" in {count} units" if count else "") + f" cannot be cut into "
                    f"{parts} equal parts; choose a parallel size that divides, or pad (multiple_of)"
                )
            chunk = padded // cuts
            index = part * cuts // parts
            low, high = min(index * chunk, length), min((index + 1) * chunk, length)
            found.append((begin + low, begin + high, local))
            begin, local = begin + length, local + chunk
        return found, local


def dense_splits(
    *,
    kv_heads: int = 0,
    vocab_multiple_of: int = 1,
    fused_qkv: tuple[int, int, int] | None = None,
    fused_gate_up: tuple[int, int] | None = None,
) -> tuple[Split, ...]:
    """Tensor-parallel rules under the names of Llama-like Hugging Face models.

    Projections into heads and into the hidden layer are cut by output (rows of the weight), those back into the
    residual stream by input (columns), the vocabulary by token. What matches no rule is whole on every rank.

    Args:
        kv_heads: number of key-value heads, so that more ranks than heads share them; 0 cuts evenly.
        vocab_multiple_of: the vocabulary is padded to a multiple of this.
        fused_qkv: rows of query, key and value where the model has one ``qkv_proj``.
        fused_gate_up: rows of gate and up where the model has one ``gate_up_proj``.
    """
    rules = []
    if fused_qkv is not None:
        rules.append(Split(r"\.qkv_proj\.(weight|bias)$", 0, sections=fused_qkv, units=(0, kv_heads, kv_heads)))
    if fused_gate_up is not None:
        rules.append(Split(r"\.gate_up_proj\.(weight|bias)$", 0, sections=fused_gate_up))
    return (
        *rules,
        Split(r"\.(k_proj|v_proj)\.(weight|bias)$", 0, units=kv_heads),
        Split(r"\.(q_proj|gate_proj|up_proj|w1|w3)\.(weight|bias)$", 0),
        Split(r"\.(o_proj|down_proj|w2)\.weight$", 1),
        Split(r"(embed_tokens|lm_head)\.weight$", 0, multiple_of=vocab_multiple_of),
    )


@dataclass(frozen=True)
class Experts:
    """Ownership of experts that are separate tensors; stacked ones are a :class:`Split` along ``ep``.

    Attributes:
        count: number of experts.
        pattern: regular expression whose first group is the expert's number.
        axes: axes that ownership is divided over, the first one slowest.
    """

    count: int
    pattern: str = r"\.experts\.(\d+)\."
    axes: tuple[str, ...] = ("ep",)


def pipeline_stages(
    names: Iterable[str],
    stages: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
    layer: str = r"\blayers\.(\d+)\.",
    first: str = r"embed",
    on_first_and_last: str | None = None,
) -> dict[str, tuple[int, ...]]:
    """The pipeline stages that own each tensor: decoder layers in order, embeddings first, what is left last.

    Args:
        names: of all tensors.
        stages: number of stages.
        layers_per_stage: layers of each stage; None divides them evenly.
        layer: regular expression whose first group is the layer's number.
        first: tensors of the first stage.
        on_first_and_last: tensors that both end stages hold, such as a tied embedding.

    Raises:
        WeightSyncError: layers and stages do not fit.
    """
    names = list(names)
    numbers = {name: int(found[1]) for name in names if (found := re.search(layer, name))}
    count = max(numbers.values(), default=-1) + 1
    if layers_per_stage is None:
        if count % stages:
            raise WeightSyncError(f"{count} layers do not divide over {stages} stages; give layers_per_stage")
        layers_per_stage = [count // stages] * stages
    if len(layers_per_stage) != stages or sum(layers_per_stage) != count:
        raise WeightSyncError(f"layers_per_stage={list(layers_per_stage)} must name {stages} stages of {count} layers")
    ends = list(itertools.accumulate(layers_per_stage))
    owners: dict[str, tuple[int, ...]] = {}
    for name in names:
        if name in numbers:
            owners[name] = (next(stage for stage, end in enumerate(ends) if numbers[name] < end),)
        elif on_first_and_last is not None and re.search(on_first_and_last, name):
            owners[name] = tuple(sorted({0, stages - 1}))
        else:
            owners[name] = (0,) if re.search(first, name) else (stages - 1,)
    return owners


def parallel_layout(
    tensors: Mapping[str, TensorInfo],
    grid: RankGrid,
    *,
    splits: Sequence[Split] = (),
    stages: Mapping[str, tuple[int, ...]] | None = None,
    experts: Experts | None = None,
    shard_dim: Callable[[str], int] | int = 0,
    pad_shards: bool = False,
) -> Layout:
    """The layout of a model on a grid.

    Args:
        tensors: the whole tensors.
        grid: ranks and their coordinates.
        splits: rules; of those that match a tensor, the first one per axis is applied.
        stages: tensor -> pipeline stages that own it (:func:`pipeline_stages`); None: every rank.
        experts: ownership of experts along ``ep``.
        shard_dim: dimension that the ``fsdp`` axis cuts, after the tensor-parallel cut. Parts are as
            ``torch.chunk`` makes them: all of ceil(size / parts) but the last ones, which may be smaller or empty.
        pad_shards: local tensors keep the full size of a part, with padding at the end, as flat-parameter storage does.

    Raises:
        WeightSyncError: a size does not divide.
    """
    cache: dict[tuple[object, ...], Placement] = {}
    placements = {}
    pp, fsdp = grid.axis("pp"), grid.axis("fsdp")
    expert_index, expert_parts = _mixed_radix(grid, experts.axes) if experts is not None else (pp, 1)
    for name, info in tensors.items():
        rules: dict[str, Split] = {}
        for split in splits:
            if split.axis not in rules and re.search(split.pattern, name):
                rules[split.axis] = split
        owners = None if stages is None else stages[name]
        expert = None
        if experts is not None and (found := re.search(experts.pattern, name)):
            if experts.count % expert_parts:
                raise WeightSyncError(f"{experts.count} experts do not divide over {expert_parts} expert ranks")
            expert = int(found[1]) // (experts.count // expert_parts)
        cut = shard_dim(name) if callable(shard_dim) else shard_dim
        key = (info.shape, tuple(rules.values()), owners, expert, cut)
        placement = cache.get(key)
        if placement is None:
            member = np.ones(len(grid), dtype=bool) if owners is None else np.isin(pp, owners)
            if expert is not None:
                member &= expert_index == expert
            placement = cache[key] = _place(name, info.shape, grid, fsdp, member, list(rules.values()), cut, pad_shards)
        placements[name] = placement
    return Layout(dict(tensors), placements)


def _mixed_radix(grid: RankGrid, axes: Sequence[str]) -> tuple[np.ndarray, int]:
    index, size = np.zeros(len(grid), dtype=np.int64), 1
    for axis in axes:
        index, size = index * grid.size(axis) + grid.axis(axis), size * grid.size(axis)
    return index, size


def _place(
    name: str,
    shape: tuple[int, ...],
    grid: RankGrid,
    fsdp: np.ndarray,
    member: np.ndarray,
    rules: list[Split],
    cut: int,
    pad_shards: bool,
) -> Placement:
    """One tensor on the ranks of ``member``; every distinct combination of coordinates is worked out once."""
    axes = [rule.axis for rule in rules]
    known: dict[tuple[int, ...], tuple[list[tuple[Interval, ...]], tuple[int, ...]]] = {}
    held = []
    columns = [grid.axis(axis) for axis in axes]
    for position in np.flatnonzero(member):
        where = (*(int(column[position]) for column in columns), int(fsdp[position]))
        if where not in known:
            known[where] = _boxes(name, shape, grid, rules, where, cut, pad_shards)
        held.append((int(grid.ranks[position]), *known[where]))
    return Placement.build(len(shape), held)


def _boxes(
    name: str,
    shape: tuple[int, ...],
    grid: RankGrid,
    rules: list[Split],
    where: tuple[int, ...],
    cut: int,
    pad_shards: bool,
) -> tuple[list[tuple[Interval, ...]], tuple[int, ...]]:
    per_dim: list[list[Interval]] = [[(0, size, 0)] for size in shape]
    local = list(shape)
    taken: dict[int, str] = {}
    for rule, part in zip(rules, where, strict=False):
        dim = rule.dim % len(shape)
        if dim in taken:
            raise WeightSyncError(f"{name!r}: axes {taken[dim]} and {rule.axis} both cut dimension {dim}")
        taken[dim] = rule.axis
        per_dim[dim], local[dim] = rule.intervals(name, shape[dim], part, grid.size(rule.axis))
    if grid.size("fsdp") > 1 and shape:
        dim = cut % len(shape)
        per_dim[dim], local[dim] = chunk_intervals(
            per_dim[dim], local[dim], where[-1], grid.size("fsdp"), padded=pad_shards
        )
    return [tuple(box) for box in itertools.product(*per_dim)], tuple(local)


def chunk_intervals(
    intervals: Sequence[Interval], size: int, part: int, parts: int, *, padded: bool = False
) -> tuple[list[Interval], int]:
    """Cut a local dimension as ``torch.chunk`` does and keep one part.

    Args:
        intervals: what the dimension holds.
        size: its size.
        part, parts: which part of how many.
        padded: keep the full size of a part.
    """
    chunk = -(-size // parts)
    low, high = min(part * chunk, size), min((part + 1) * chunk, size)
    kept = []
    for start, stop, offset in intervals:
        begin, end = max(offset, low), min(offset + stop - start, high)
        if end > begin:
            kept.append((start + begin - offset, start + end - offset, begin - low))
    return kept, chunk if padded else high - low


def replicated_layout(tensors: Mapping[str, TensorInfo], ranks: Iterable[int]) -> Layout:
    """Whole tensors on every one of ``ranks``."""
    cache: dict[tuple[int, ...], Placement] = {}
    ranks = list(ranks)
    for info in tensors.values():
        if info.shape not in cache:
            box = tuple((0, size, 0) for size in info.shape)
            cache[info.shape] = Placement.build(len(info.shape), [(rank, [box], info.shape) for rank in ranks])
    return Layout(dict(tensors), {name: cache[info.shape] for name, info in tensors.items()})


def layout_of(tensors: Mapping[str, Tensor], ranks: Iterable[int]) -> Layout:
    """The layout that sharded tensors have now, for all ranks, read on any one of them without communication.

    Args:
        tensors: name -> ``DTensor`` placed by ``Shard`` and ``Replicate``, or a plain tensor that all ranks hold whole.
        ranks: global ranks of the model, for plain tensors.

    Raises:
        WeightSyncError: a placement of another kind, such as a pending sum.
    """
    from torch.distributed.tensor import DTensor

    ranks = list(ranks)
    infos = describe(tensors)
    cache: dict[tuple[object, ...], Placement] = {}
    placements = {}
    for name, tensor in tensors.items():
        shape = infos[name].shape
        if not isinstance(tensor, DTensor):
            key: tuple[object, ...] = (shape,)
            if key not in cache:
                box = tuple((0, size, 0) for size in shape)
                cache[key] = Placement.build(len(shape), [(rank, [box], shape) for rank in ranks])
        else:
            key = (shape, tensor.placements, tensor.device_mesh)
            if key not in cache:
                cache[key] = _place_dtensor(name, tensor)
        placements[name] = cache[key]
    return Layout(infos, placements)


def _place_dtensor(name: str, tensor: Tensor) -> Placement:
    mesh = np.asarray(tensor.device_mesh.mesh.cpu().numpy())  # type: ignore[attr-defined]
    cuts: list[tuple[bool, int, int]] = []
    for axis, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_replicate():
            continue
        # FSDP over an already tensor-parallel dimension says "strided": it cuts what the other axes left.
        strided = type(placement).__name__ == "_StridedShard"
        if not (strided or placement.is_shard()):
            raise WeightSyncError(f"{name!r} is placed as {placement}; only sharded and replicated tensors have slices")
        cuts.append((strided, axis, placement.dim))
    cuts.sort(key=lambda item: item[0])
    held = []
    for where in np.ndindex(mesh.shape):
        per_dim: list[list[Interval]] = [[(0, size, 0)] for size in tensor.shape]
        local = list(tensor.shape)
        for _, axis, dim in cuts:
            per_dim[dim], local[dim] = chunk_intervals(per_dim[dim], local[dim], where[axis], mesh.shape[axis])
        held.append((int(mesh[where]), [tuple(box) for box in itertools.product(*per_dim)], tuple(local)))
    return Placement.build(tensor.dim(), held)


def aligned_shard_dim(splits: Sequence[Split], axis: str = "tp") -> Callable[[str], int]:
    """Per tensor the dimension that generation cuts, for FSDP to cut it too; 0 where generation does not cut.

    A shard along another dimension than the generation's slice overlaps it only in part: both the traffic and the
    memory of the weight sync grow.
    """

    def dim(name: str) -> int:
        return next((split.dim for split in splits if split.axis == axis and re.search(split.pattern, name)), 0)

    return dim


def shard_placement_fn(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], shards: int, splits: Sequence[Split]
) -> Callable[[torch.nn.Parameter], object]:
    """The argument of that name of FSDP2's ``fully_shard``: :func:`aligned_shard_dim` where the shards come out even.

    Args:
        parameters: of the module, by the names that ``splits`` match.
        shards: ranks that a parameter is sharded over; FSDP2 cuts dimensions other than 0 only evenly.
        splits: the tensor-parallel rules of generation.
    """
    from torch.distributed.tensor import Shard

    dim_of = aligned_shard_dim(splits)
    dims: dict[int, int] = {}
    for name, parameter in parameters:
        dim = dim_of(name) % max(parameter.dim(), 1)
        if dim and parameter.shape[dim] % shards == 0:
            dims[id(parameter)] = dim

    def place(parameter: torch.nn.Parameter) -> object:
        return Shard(dims[id(parameter)]) if id(parameter) in dims else None

    return place

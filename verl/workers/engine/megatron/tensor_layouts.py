"""How a Hugging Face tensor lies in Megatron-core's tensor-parallel ranks: pure functions, both ways.

Each form says how the tensors of one Megatron weight are cut for a rank, and how the ranks' parts are joined again.
:func:`slices_of` reads from that which slices of the tensors a rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from verl.workers.engine.base import Box


class Form(ABC):
    """A rule between the Hugging Face tensors of one weight and the parts that tensor-parallel ranks hold.

    A form moves values and never changes them.
    """

    #: every rank holds all of it
    replicated = False

    @property
    def cuts(self) -> int:
        """The dimension along which values move; the others stay whole and in order."""
        return 0

    @abstractmethod
    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        """The part of one rank."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors from the parts of all ranks in order."""


@dataclass(frozen=True)
class Whole(Form):
    """Every rank holds all of it."""

    replicated = True

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        return tensors[0]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]]


@dataclass(frozen=True)
class Cut(Form):
    """Cut into equal parts along a dimension: 0 for products that make heads or hidden units, 1 for those back."""

    dim: int

    @property
    def cuts(self) -> int:
        return self.dim

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        return tensors[0].chunk(ranks, self.dim)[rank]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts), self.dim) if len(parts) > 1 else parts[0]]


@dataclass(frozen=True)
class Vocabulary(Form):
    """Rows by token, with rows of zeros at the end so that the parts are equal."""

    tokens: int
    multiple_of: int

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        unit = ranks * self.multiple_of
        part = -(-self.tokens // unit) * unit // ranks
        rows = tensors[0][rank * part : (rank + 1) * part]
        if rows.shape[0] == part:
            return rows
        return torch.cat([rows, rows.new_zeros(part - rows.shape[0], *rows.shape[1:])])

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts))[: self.tokens] if len(parts) > 1 else parts[0][: self.tokens]]


@dataclass(frozen=True)
class FusedQKV(Form):
    """Query, key and value in one product, ordered by key-value head: its queries, its key, its value.

    Attributes:
        heads, kv_heads: of the whole model.
        head_dim: rows of one head.
    """

    heads: int
    kv_heads: int
    head_dim: int

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        query, key, value = (x.reshape(self.kv_heads, -1, *x.shape[1:]) for x in tensors)
        fused = torch.cat([query, key, value], 1).flatten(0, 1)
        return fused.chunk(ranks)[rank]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        fused = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        queries = self.heads // self.kv_heads
        grouped = fused.reshape(self.kv_heads, (queries + 2) * self.head_dim, *fused.shape[1:])
        sizes = [queries * self.head_dim, self.head_dim, self.head_dim]
        return [x.flatten(0, 1) for x in grouped.split(sizes, 1)]


@dataclass(frozen=True)
class GateUp(Form):
    """PauseController and up projection in one product; each rank has its part of the one, then its part of the other.

    Hugging Face has them as two tensors, or, with ``stacked``, as one with the gate first.
    """

    stacked: bool = False

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        gate, up = tensors[0].chunk(2) if self.stacked else tensors
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        gate, up = (torch.cat([half[index] for half in halves]) for index in (0, 1))
        return [torch.cat([gate, up])] if self.stacked else [gate, up]


@dataclass(frozen=True)
class Stacked(Form):
    """Tensors of equal shape, one below the other; every rank holds all of it."""

    count: int
    replicated = True

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        return torch.cat(list(tensors))

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts[0].chunk(self.count))


@dataclass(frozen=True)
class SomeRows(Form):
    """Some of the tensors that another form puts into one weight, each row where that form has it.

    Attributes:
        form: of the whole weight.
        rows: of each of its tensors.
        chosen: which of the tensors there are.
    """

    form: Form
    rows: tuple[int, ...]
    chosen: tuple[int, ...]

    def owners(self, rank: int, ranks: int) -> Tensor:
        """(local rows of the whole weight,) from which of its tensors each row comes."""
        return self.form.shard([torch.full((rows,), i) for i, rows in enumerate(self.rows)], rank, ranks)

    def mine(self, rank: int, ranks: int) -> Tensor:
        """(local rows of the whole weight,) which of them there are."""
        return torch.isin(self.owners(rank, ranks), torch.tensor(self.chosen))

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        everything = [tensors[0].new_zeros(rows, *tensors[0].shape[1:]) for rows in self.rows]
        for index, tensor in zip(self.chosen, tensors, strict=True):
            everything[index] = tensor
        whole = self.form.shard(everything, rank, ranks)
        return whole[self.mine(rank, ranks).to(whole.device)]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        wholes = []
        for rank, part in enumerate(parts):
            mine = self.mine(rank, len(parts)).to(part.device)
            whole = part.new_zeros(len(mine), *part.shape[1:])
            whole[mine] = part
            wholes.append(whole)
        joined = self.form.join(wholes)
        return [joined[index] for index in self.chosen]


@lru_cache(maxsize=1024)
def slices_of(form: Form, shapes: tuple[tuple[int, ...], ...], rank: int, ranks: int) -> tuple[tuple[Box, ...], ...]:
    """Which slices of the Hugging Face tensors are in the part of one rank, and where in it.

    Args:
        form: of the weight.
        shapes: of its Hugging Face tensors.
        rank, ranks: of the ranks that divide it.

    Returns:
        For each tensor its boxes in the part, in order. What no box fills is padding.
    """
    dim = form.cuts
    # shard the values' positions instead of the values: what lies where follows from where the positions went
    begins: list[int] = []
    positions: list[Tensor] = []
    end = 0
    for shape in shapes:
        begin = end + 2  # 0 is padding, and a gap ends the run at a tensor's end
        end = begin + shape[dim]
        begins.append(begin)
        positions.append(torch.arange(begin, end).view([-1 if d == dim else 1 for d in range(len(shape))]))
    part = form.shard(positions, rank, ranks).flatten()
    edges = (torch.nonzero(part.diff() != 1)[:, 0] + 1).tolist()
    found: list[list[Box]] = [[] for _ in shapes]
    for low, high in zip([0, *edges], [*edges, len(part)], strict=True):
        position = int(part[low])
        if position:
            which = bisect_right(begins, position) - 1
            start = position - begins[which]
            run = (start, start + high - low, low)
            found[which].append(tuple(run if d == dim else (0, size, 0) for d, size in enumerate(shapes[which])))
    return tuple(tuple(boxes) for boxes in found)

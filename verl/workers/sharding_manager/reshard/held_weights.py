"""The weights that the ranks of a training engine hold, as pieces that each lie in one tensor of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.sliced import local_part
from verl.workers.engine.base import Box, SlicedWeight
from verl.workers.rollout.types import WeightPart
from verl.workers.sharding_manager.reshard.layout import Layout, Placement, TensorInfo, layout_of

#: shape of a rank's tensor, and the slices of a piece that lie in it
Holding = tuple[tuple[int, ...], tuple[Box, ...]]


@dataclass(frozen=True)
class Piece:
    """A weight, or an entry along its first dimension where the training engine keeps each by itself (an expert).

    Attributes:
        weight: its Hugging Face name.
        entry: of the first dimension; None for the whole weight.
    """

    weight: str
    entry: int | None = None

    @property
    def key(self) -> str:
        """Name of the piece in layouts."""
        return self.weight if self.entry is None else f"{self.weight}[{self.entry}]"

    def within(self, parts: Iterable[WeightPart]) -> list[WeightPart]:
        """What parts of the weight have of the piece."""
        if self.entry is None:
            return list(parts)
        return [
            WeightPart(part.start[1:], part.stop[1:], part.tensor[self.entry - part.start[0]])
            for part in parts
            if part.start[0] <= self.entry < part.stop[0]
        ]


class HeldWeights:
    """What this rank holds of all weights.

    Args:
        shards: from :meth:`TrainEngine.shards`, for the same weights in the same order on every rank.
    """

    def __init__(self, shards: Mapping[str, Tensor | SlicedWeight]) -> None:
        self.shards = shards
        self.pieces: list[Piece] = []
        for name, shard in shards.items():
            if isinstance(shard, SlicedWeight) and shard.stacked:
                self.pieces += [Piece(name, entry) for entry in range(shard.shape[0])]
            else:
                self.pieces.append(Piece(name))

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors by piece; pieces that are fused with others share theirs."""
        found = {}
        for piece in self.pieces:
            shard = self.shards[piece.weight]
            if not isinstance(shard, SlicedWeight):
                found[piece.key] = local_part(shard.detach())
            elif (held := shard.held.get(piece.entry or 0)) is not None:
                found[piece.key] = held.tensor
        return found

    def slices(self) -> Iterator[tuple[str, Tensor]]:
        """Weight names and views of what this rank holds of them; every name comes, if only with an empty tensor."""
        devices = [tensor.device for tensor in self.tensors().values()]
        for name, shard in self.shards.items():
            if not isinstance(shard, SlicedWeight):
                yield name, local_part(shard.detach())
                continue
            yield name, torch.empty(0, dtype=shard.dtype, device=devices[0] if devices else None)
            for held in shard.held.values():
                for box in held.boxes:
                    yield name, held.tensor[tuple(slice(at, at + stop - start) for start, stop, at in box)]

    def holdings(self) -> dict[str, Holding]:
        """What other ranks have to know of this one: nothing of weights that are ``DTensor``."""
        found = {}
        for piece in self.pieces:
            shard = self.shards[piece.weight]
            if isinstance(shard, SlicedWeight) and (held := shard.held.get(piece.entry or 0)) is not None:
                found[piece.key] = (tuple(held.tensor.shape), held.boxes)
        return found

    def layout(self, everyone: Sequence[Mapping[str, Holding]]) -> Layout:
        """Which slices of which pieces each rank holds.

        Args:
            everyone: :meth:`holdings` of all ranks.
        """
        ranks = range(len(everyone))
        distributed = {name: shard for name, shard in self.shards.items() if not isinstance(shard, SlicedWeight)}
        known = layout_of(distributed, ranks)
        cache: dict[tuple[object, ...], Placement] = {}
        tensors: dict[str, TensorInfo] = {}
        placements: dict[str, Placement] = {}
        stored_in: dict[str, str] = {}
        for piece in self.pieces:
            key, shard = piece.key, self.shards[piece.weight]
            if not isinstance(shard, SlicedWeight):
                tensors[key], placements[key] = known.tensors[key], known.placements[key]
                continue
            shape = shard.shape[1:] if shard.stacked else shard.shape
            tensors[key] = TensorInfo(shape, shard.dtype)
            stored_in[key] = Piece(shard.stored_in, piece.entry).key
            held = tuple((rank, *holdings[key]) for rank, holdings in enumerate(everyone) if key in holdings)
            same = (len(shape), held)
            if same not in cache:  # layers are alike
                cache[same] = Placement.build(len(shape), [(rank, boxes, local) for rank, local, boxes in held])
            placements[key] = cache[same]
        return Layout(tensors, placements, stored_in)

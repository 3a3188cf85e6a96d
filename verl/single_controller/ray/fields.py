"""Fields of batches in Ray's object store: put once, then passed by reference.

A training step sends the same rows to the same workers several times: for log-probabilities, values and updates. A
method that is registered with ``reuse_fields`` takes what was sent before from the object store, and what a worker
returned from where the worker put it. A reference is kept as long as the controller keeps the tensor.

Recognised is a stretch of rows of the very same memory. A change of the tensor through torch is noticed and sends it
anew; one behind torch's back, through a NumPy view, is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from verl.protocol import PADDING_ROWS_KEY, DataProto
from verl.utils.transport import compact, nbytes


@dataclass
class Traffic:
    """What went from the controller into the object store for methods with ``reuse_fields``.

    Attributes:
        objects: objects put.
        sent_bytes: bytes of the fields in them, as they travel.
        fields: fields put, each stretch of rows counted.
        reused_bytes: bytes, as tensors, of fields that were not put again.
    """

    objects: int = 0
    sent_bytes: int = 0
    fields: int = 0
    reused_bytes: int = 0


@dataclass(frozen=True)
class Place:
    """Where a field lies: an object, which is a batch or a dict of tensors, and its name there."""

    reference: Any
    name: str


@dataclass(frozen=True)
class Shard:
    """A batch on its way: the places of its tensors, and everything else.

    Attributes:
        places: by field.
        rest: the batch without its tensors.
        rows: their number.
    """

    places: dict[str, Place]
    rest: DataProto
    rows: int

    def for_call(self, leaves: list[Any]) -> Pieces:
        """What to send besides ``leaves``, the objects of the call, to which this shard's are added."""
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        parts = {}
        for name, place in self.places.items():
            if id(place.reference) not in numbers:
                numbers[id(place.reference)] = len(leaves)
                leaves.append(place.reference)
            parts[name] = (numbers[id(place.reference)], place.name)
        return Pieces(parts, self.rest, self.rows)


@dataclass(frozen=True)
class Pieces:
    """A :class:`Shard` as a worker gets it: ``parts`` are numbers of objects and names in them."""

    parts: dict[str, tuple[int, str]]
    rest: DataProto
    rows: int

    def join(self, leaves: Sequence[Any]) -> DataProto:
        """The batch, from the objects of the call."""
        tensors = {name: _field_of(leaves[number], key) for name, (number, key) in self.parts.items()}
        return DataProto(
            TensorDict(tensors, batch_size=[self.rows]), self.rest.non_tensor_batch, dict(self.rest.meta_info)
        )


def _field_of(leaf: Any, name: str) -> Tensor:
    fields: Any = leaf.batch if isinstance(leaf, DataProto) else leaf
    tensor: Tensor = fields[name]
    return tensor


class FieldStore:
    """Places of the fields that the workers of a group can read."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        # memory -> stretch of it -> its version when it was sent, and the place
        self._places: Any = WeakTensorKeyDictionary()

    def place(self, batch: DataProto) -> Shard:
        """Put what is not there yet, as one object."""
        tensors: Mapping[str, Tensor] = {} if batch.batch is None else dict(batch.batch.items())
        places: dict[str, Place] = {}
        missing: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            known = self._find(tensor)
            if known is None:
                missing[name] = tensor
            else:
                places[name] = known
                self.traffic.reused_bytes += tensor.numel() * tensor.element_size()
        if missing:
            packed = {name: compact(tensor) for name, tensor in missing.items()}
            reference = ray.put(packed)
            self.traffic.objects += 1
            self.traffic.fields += len(packed)
            self.traffic.sent_bytes += sum(map(nbytes, packed.values()))
            for name, tensor in missing.items():
                places[name] = Place(reference, name)
                self._remember(tensor, places[name])
        rest = batch.select(batch_keys=[])
        return Shard(places, rest, len(batch))

    def remember_results(self, result: DataProto, shards: Sequence[DataProto], references: Sequence[Any]) -> None:
        """Note where the rows of a joined result lie.

        Args:
            result: what the controller got.
            shards: the workers' parts of it, in order.
            references: of these parts.
        """
        if any(PADDING_ROWS_KEY in shard.meta_info for shard in shards) or result.batch is None:
            return
        for name, tensor in result.batch.items():
            start = 0
            for shard, reference in zip(shards, references, strict=True):
                self._remember(tensor[start : start + len(shard)], Place(reference, name))
                start += len(shard)

    def _find(self, tensor: Tensor) -> Place | None:
        base = _base(tensor)
        version, place = self._places.get(base, {}).get(_stretch(tensor), (None, None))
        return place if version == base._version else None

    def _remember(self, tensor: Tensor, place: Place) -> None:
        base = _base(tensor)
        self._places.setdefault(base, {})[_stretch(tensor)] = (base._version, place)


def _base(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory; all views of it share its version."""
    return tensor if tensor._base is None else tensor._base


def _stretch(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

"""Fields of batches in Ray's object store: put once, then passed by reference.

A training step sends the same rows to the same workers several times: for log-probabilities, values and updates. A
method that is registered with ``reuse_fields`` takes what was sent before from the object store, and what a worker
returned from where the worker put it. A reference is kept as long as the controller keeps the tensor.

Large tensors inside columns, the patches of images for example, are put one by one, by whatever method they are read
first: rows with the same one may be anywhere in a batch, and it stays the same when rows change places.

Recognised is a stretch of rows of the very same memory. A change of the tensor through torch is noticed and sends it
anew; one behind torch's back, through a NumPy view, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from verl.protocol import PADDING_ROWS_KEY, DataProto
from verl.utils.transport import compact, nbytes

#: bytes from which a tensor inside a column travels by reference
LARGE = 1 << 14


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
        inside: places of the tensors that a :class:`Hole` in a column of ``rest`` stands for.
    """

    places: dict[str, Place]
    rest: DataProto
    rows: int
    inside: tuple[Place, ...] = ()

    def for_call(self, leaves: list[Any]) -> Pieces:
        """What to send besides ``leaves``, the objects of the call, to which this shard's are added."""
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}

        def leaf_of(place: Place) -> tuple[int, str]:
            if id(place.reference) not in numbers:
                numbers[id(place.reference)] = len(leaves)
                leaves.append(place.reference)
            return numbers[id(place.reference)], place.name

        parts = {name: leaf_of(place) for name, place in self.places.items()}
        return Pieces(parts, self.rest, self.rows, [leaf_of(place) for place in self.inside])


@dataclass(frozen=True)
class Pieces:
    """A :class:`Shard` as a worker gets it: ``parts`` and ``inside`` are numbers of objects and names in them."""

    parts: dict[str, tuple[int, str]]
    rest: DataProto
    rows: int
    inside: list[tuple[int, str]]

    def join(self, leaves: Sequence[Any]) -> DataProto:
        """The batch, from the objects of the call."""
        tensors = {} if self.rest.batch is None else dict(self.rest.batch.items())
        tensors |= {name: _field_of(leaves[number], key) for name, (number, key) in self.parts.items()}
        columns = self.rest.non_tensor_batch
        if self.inside:
            found = [_field_of(leaves[number], key) for number, key in self.inside]
            columns = _changed(columns, lambda value: found[value.number] if isinstance(value, Hole) else value)
        return DataProto(TensorDict(tensors, batch_size=[self.rows]), columns, dict(self.rest.meta_info))


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor of a dict in a column: the ``number``-th of those that the shard has elsewhere."""

    number: int


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
        """Put what is not there yet: the fields as one object, each large tensor inside a column as one of its own."""
        shard = self.place_inside(batch)
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
            places |= self._put(missing)
        return Shard(places, shard.rest.select(batch_keys=[]), shard.rows, shard.inside)

    def place_inside(self, batch: DataProto) -> Shard:
        """The same for large tensors inside columns alone; the fields stay with the rest."""
        inside: list[Place] = []
        holes: dict[int, Hole] = {}

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.numel() * value.element_size() < LARGE:
                return value
            if id(value) not in holes:
                holes[id(value)] = Hole(len(inside))
                known = self._find(value)
                if known is None:
                    known = self._put({"tensor": value})["tensor"]
                else:
                    self.traffic.reused_bytes += value.numel() * value.element_size()
                inside.append(known)
            return holes[id(value)]

        columns = _changed(batch.non_tensor_batch, placed)
        if not inside:
            return Shard({}, batch, len(batch))
        return Shard({}, DataProto(batch.batch, columns, batch.meta_info), len(batch), tuple(inside))

    def _put(self, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        """Put tensors as one object."""
        packed = {name: compact(tensor) for name, tensor in tensors.items()}
        reference = ray.put(packed)
        self.traffic.objects += 1
        self.traffic.fields += len(packed)
        self.traffic.sent_bytes += sum(map(nbytes, packed.values()))
        places = {name: Place(reference, name) for name in tensors}
        for name, tensor in tensors.items():
            self._remember(tensor, places[name])
        return places

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


def _changed(columns: Mapping[str, np.ndarray], change: Callable[[Any], Any]) -> dict[str, np.ndarray]:
    """Columns in which ``change`` was made to the values of dicts, and of lists in them; shared dicts stay shared."""
    dicts: dict[int, Any] = {}

    def value_of(value: Any) -> Any:
        return [change(one) for one in value] if type(value) is list else change(value)

    def item_of(item: Any) -> Any:
        if type(item) is not dict or not any(isinstance(value, Tensor | Hole | list) for value in item.values()):
            return item
        if id(item) not in dicts:
            dicts[id(item)] = {name: value_of(value) for name, value in item.items()}
        return dicts[id(item)]

    return {
        name: _column([item_of(item) for item in column]) if column.dtype == object and column.ndim == 1 else column
        for name, column in columns.items()
    }


def _column(items: Sequence[Any]) -> np.ndarray:
    """A column of any objects."""
    column = np.empty(len(items), dtype=object)
    for number, item in enumerate(items):
        column[number] = item
    return column


def _base(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory; all views of it share its version."""
    return tensor if tensor._base is None else tensor._base


def _stretch(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

"""``DataProto``: the batch that travels between the controller and the workers, and its future.

A batch holds tensors (``batch``), one Python object per row (``non_tensor_batch``) and facts about the batch as a
whole (``meta_info``). Rows of all fields correspond. A stage adds fields and never rewrites one.

Tensors cross process borders as NumPy views of exactly their rows (see :mod:`verl.utils.transport`): a slice does not
drag its parent along, Ray keeps the buffers in shared memory, and what arrives may be written to.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from verl import envs
from verl.errors import DataError, SchemaError, WorkerError
from verl.utils import plain_file
from verl.utils.fs import atomic_open
from verl.utils.metrics import Metric, MetricSet
from verl.utils.transport import array_of, pack, tensor_of

logger = logging.getLogger(__name__)

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "deserialize_tensordict",
    "fetch_references",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_tensordict",
    "split_with_padding",
    "strip_padding",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

#: meta_info key: how many trailing rows of this shard are copies that dispatch added; collect removes them
PADDING_ROWS_KEY = "_padding_rows"
#: meta_info keys whose values belong to a shard, not to the batch: concat keeps one entry per shard
PER_SHARD_META = ("metrics", "timing")

RowIndex = int | np.integer | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


class _AutoPadding:
    """Class-level switch: an assigned value wins over the environment variable ``VERL_AUTO_PADDING``."""

    def __init__(self) -> None:
        self.value: bool | None = None


class _DataProtoConfigMeta(type):
    _state = _AutoPadding()

    @property
    def auto_padding(cls) -> bool:
        """Whether dispatch pads a batch that does not divide over the ranks."""
        value = cls._state.value
        return bool(envs.get("VERL_AUTO_PADDING")) if value is None else value

    @auto_padding.setter
    def auto_padding(cls, value: bool | None) -> None:
        cls._state.value = None if value is None else bool(value)


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Process-wide settings.

    ``DataProtoConfig.auto_padding``: dispatch pads a batch whose rows do not divide over the ranks and collect
    removes what was added. Taken from the environment variable ``VERL_AUTO_PADDING`` unless assigned; assign
    ``None`` to return to the variable. One batch can differ: ``DataProto.from_dict(..., auto_padding=True)``.
    """

    #: meta_info key under which one batch overrides the setting
    auto_padding_key: ClassVar[str] = "_auto_padding"


# ---- the batch -------------------------------------------------------------------------------------------------


@dataclass
class DataProtoItem:
    """One row: tensors without the batch dimension, the row's objects, and the batch's ``meta_info``."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch of rows.

    Args:
        batch: tensors of shape (B, ...), or None.
        non_tensor_batch: arrays of length B; usually of dtype object, one Python object per row. Lists become
            object arrays, string arrays too.
        meta_info: anything about the batch as a whole.

    Raises:
        SchemaError: fields differ in their number of rows; the message lists each.
    """

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.batch = batch
        self.non_tensor_batch: dict[str, np.ndarray] = {
            name: _as_array(name, values) for name, values in (non_tensor_batch or {}).items()
        }
        self.meta_info: dict[str, Any] = {} if meta_info is None else meta_info
        self.check_consistency()

    # ---- making one ----------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool | None = None,
    ) -> DataProto:
        """Build a batch from dicts.

        Args:
            tensors: (B, ...) each.
            non_tensors: arrays or lists of length B.
            meta_info: facts about the whole batch.
            num_batch_dims: leading dimensions that all tensors share; more than 1 only without ``non_tensors``.
            auto_padding: override :class:`DataProtoConfig` for this batch.

        Raises:
            SchemaError: fields differ in length, or a tensor is not one.
        """
        tensors = dict(tensors or {})
        if num_batch_dims < 1:
            raise DataError(f"num_batch_dims={num_batch_dims}: a batch has at least one batch dimension")
        if num_batch_dims > 1 and non_tensors:
            raise DataError("num_batch_dims > 1 needs non_tensors to be empty: arrays have one entry per row")
        wrong = {name: type(value).__name__ for name, value in tensors.items() if not isinstance(value, torch.Tensor)}
        if wrong:
            raise SchemaError(f"not tensors: {_listing(wrong)}; give other values as non_tensors")
        short = {name: tuple(t.shape) for name, t in tensors.items() if t.dim() < num_batch_dims}
        if short:
            raise SchemaError(f"tensors without {num_batch_dims} batch dimension(s): {_listing(short)}")
        leading = {name: tuple(tensor.shape[:num_batch_dims]) for name, tensor in tensors.items()}
        if len(set(leading.values())) > 1:
            raise SchemaError(f"tensors differ in their batch size: {_listing(leading)}")
        batch = None
        if tensors:
            batch = TensorDict(tensors, batch_size=next(iter(leading.values())))
        meta = dict(meta_info or {})
        if auto_padding is not None:
            meta[DataProtoConfig.auto_padding_key] = auto_padding
        return cls(batch, non_tensors, meta)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool | None = None
    ) -> DataProto:
        """Build a batch from one dict that mixes tensors with arrays and lists, as a collate function makes it."""
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in data.items() if name not in tensors}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDictBase, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Build a batch from a TensorDict; the inverse of :meth:`to_tensordict`.

        Per-row objects (``NonTensorStack``) become ``non_tensor_batch``, shared ones (``NonTensorData``)
        ``meta_info``; an explicit ``meta_info`` adds to those and wins.
        """
        tensors: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for name in tensor_dict.keys():  # noqa: SIM118 - iterating a TensorDict yields rows
            value = tensor_dict._get_str(name, None) if hasattr(tensor_dict, "_get_str") else tensor_dict.get(name)
            if isinstance(value, NonTensorStack):
                rows[name] = value.tolist()
            elif isinstance(value, NonTensorData):
                shared[name] = value.data
            else:
                tensors[name] = value
        batch = None
        if tensors:
            batch = TensorDict(tensors, batch_size=tensor_dict.batch_size[:num_batch_dims])
        return cls(batch, rows, shared | dict(meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """All fields as one TensorDict: rows' objects as ``NonTensorStack``, ``meta_info`` as ``NonTensorData``."""
        out = TensorDict({}, batch_size=[len(self)]) if self.batch is None else self.batch.copy()
        taken = set(out.keys())
        clash = taken & (self.non_tensor_batch.keys() | self.meta_info.keys()) | (
            self.non_tensor_batch.keys() & self.meta_info.keys()
        )
        if clash:
            raise SchemaError(f"names used twice: {', '.join(sorted(clash))}; rename one before to_tensordict()")
        for name, values in self.non_tensor_batch.items():
            out[name] = NonTensorStack(*[NonTensorData(value) for value in values])
        for name, value in self.meta_info.items():
            out[name] = NonTensorData(value, batch_size=out.batch_size)
        return out

    # ---- looking at it -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for values in self.non_tensor_batch.values():
            return len(values)
        return 0

    def check_consistency(self) -> None:
        """Check that all fields have the same number of rows.

        Raises:
            SchemaError: they do not, or ``batch`` is not a TensorDict with a batch dimension, or a name is used twice.
        """
        if self.batch is not None and not isinstance(self.batch, TensorDictBase):
            raise SchemaError(
                f"batch is a {type(self.batch).__name__}, expected a TensorDict; DataProto.from_dict takes a dict"
            )
        if self.batch is not None and len(self.batch.batch_size) < 1:
            raise SchemaError("batch has no batch dimension; give batch_size=[B] to its TensorDict")
        tensor_names = set() if self.batch is None else set(self.batch.keys())
        if twice := tensor_names & self.non_tensor_batch.keys():
            raise SchemaError(f"fields both in batch and in non_tensor_batch: {', '.join(sorted(twice))}")
        rows = {name: len(values) for name, values in self.non_tensor_batch.items()}
        if self.batch is not None:
            rows = {"batch": int(self.batch.batch_size[0]), **rows}
            if rows.keys() - {"batch"} and len(self.batch.batch_size) != 1:
                raise SchemaError(
                    f"batch has batch size {tuple(self.batch.batch_size)}; "
                    "non_tensor_batch needs a single batch dimension"
                )
        if len(set(rows.values())) > 1:
            raise SchemaError(f"fields differ in their number of rows: {_listing(rows)}")

    def get_data_info(self) -> str:
        """One line per field: name, shape, dtype, device."""
        lines = []
        if self.batch is not None:
            for name, tensor in self.batch.items():
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                lines.append(f"batch.{name}: {tuple(tensor.shape)} {kind} {tensor.device}")
        for name, values in self.non_tensor_batch.items():
            lines.append(f"non_tensor_batch.{name}: {values.shape} {values.dtype}")
        lines += [f"meta_info.{name}: {type(value).__name__}" for name, value in self.meta_info.items()]
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> str:
        """Log, and return, the size of the tensors and of the arrays' own memory in GiB."""
        tensor_bytes = 0
        if self.batch is not None:
            leaves = self.batch.values(include_nested=True, leaves_only=True)
            tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in leaves)
        array_bytes = sum(values.nbytes for values in self.non_tensor_batch.values())
        message = (
            f"size of batch: {tensor_bytes / 2**30:.6f} GiB, size of non_tensor_batch: {array_bytes / 2**30:.6f} GiB"
        )
        if prefix:
            message = f"{prefix}, {message}"
        logger.info(message)
        return message

    def __repr__(self) -> str:
        info = self.get_data_info().replace("\n", "\n  ")
        return f"DataProto({len(self)} rows)" if not info else f"DataProto({len(self)} rows)\n  {info}"

    # ---- rows ----------------------------------------------------------------------------------------------

    def __getitem__(self, item: RowIndex) -> Any:
        """A row (:class:`DataProtoItem`) for an int; a batch for a slice, an index list or array, or a mask."""
        if isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool_):
            rows = len(self)
            if not -rows <= item < rows:
                raise IndexError(f"row {item} of a batch of {rows} rows")
            tensors = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(tensors, {k: v[item] for k, v in self.non_tensor_batch.items()}, self.meta_info)
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | tuple | range | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(f"cannot index a DataProto with {type(item).__name__}; use an int, a slice, a list or a mask")

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[i] for i in range(len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step``; tensors and arrays are views."""
        if step is not None and step < 1:
            raise DataError(f"slice step {step}: rows are taken in order; use reorder() to reverse a batch")
        rows = slice(start, end, step)
        return self._derive(
            None if self.batch is None else self.batch[rows],
            {name: values[rows] for name, values in self.non_tensor_batch.items()},
        )

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> DataProto:
        """Rows at ``idxs`` in that order, or where a boolean mask of length B is true; a copy."""
        return self._take(self._row_numbers(idxs))

    def reorder(self, indices: torch.Tensor | np.ndarray | Sequence[int]) -> None:
        """Put the rows into the order of ``indices``, in place; every row must occur exactly once."""
        index = self._row_numbers(indices)
        if not np.array_equal(np.sort(index), np.arange(len(self))):
            raise DataError(
                f"reorder: {len(index)} indices are not a permutation of {len(self)} rows; "
                "select_idxs() picks or repeats rows"
            )
        ordered = self._take(index)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: a row's copies next to each other, or the whole batch again and again."""
        if repeat_times < 0:
            raise DataError(f"repeat_times={repeat_times} is negative")
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row ``i`` ``repeat_times[i]`` times, copies next to each other."""
        counts = np.asarray(repeat_times)
        if counts.shape != (len(self),):
            raise DataError(f"repeat_times has shape {counts.shape}, expected one count for each of {len(self)} rows")
        if counts.dtype.kind not in "iu" and len(counts):
            raise DataError(f"repeat_times has dtype {counts.dtype}, expected integers")
        if len(counts) and counts.min() < 0:
            raise DataError(f"repeat_times holds a negative count ({counts.min()})")
        return self._take(np.repeat(np.arange(len(self)), counts.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Turn column blocks into rows: (B, n·c, ...) fields in ``split_keys`` become (B·n, c, ...).

        Row ``i`` becomes rows ``i·n`` to ``i·n+n-1``; fields not listed are repeated for them.
        """
        if n_split < 1:
            raise DataError(f"n_split={n_split} must be at least 1")
        keys = list(split_keys or ())
        known = self._field_names()
        if missing := [key for key in keys if key not in known]:
            raise SchemaError(_missing_text(missing, known))
        out = self.repeat(n_split, interleave=True)
        for key in keys:
            values = self.batch[key] if self.batch is not None and key in self.batch else self.non_tensor_batch[key]
            if values.ndim < 2 or values.shape[1] % n_split:
                raise SchemaError(f"field {key!r} of shape {tuple(values.shape)} has no columns to split by {n_split}")
            unfolded = values.reshape(values.shape[0] * n_split, values.shape[1] // n_split, *values.shape[2:])
            if isinstance(unfolded, torch.Tensor):
                assert out.batch is not None
                out.batch[key] = unfolded
            else:
                out.non_tensor_batch[key] = unfolded
        return out

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of a row, in place.

        Args:
            padding_size: how many rows to add.
            padding_candidate: ``"first"`` copies the first row; ``"last"`` or ``""`` the last one.
        """
        if padding_size < 0:
            raise DataError(f"padding_size={padding_size} is negative")
        if padding_candidate not in ("", "first", "last"):
            raise DataError(f"padding_candidate={padding_candidate!r}; use 'first' or 'last'")
        if padding_size == 0:
            return
        rows = len(self)
        if rows == 0:
            raise DataError("cannot pad a batch without rows: there is no row to copy")
        source = 0 if padding_candidate == "first" else rows - 1
        padded = self._take(np.concatenate([np.arange(rows), np.full(padding_size, source)]))
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    # ---- fields --------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A batch of some fields. ``None`` selects all of a kind, an empty list none of it.

        ``meta_info`` of the result is its own dict. With ``deepcopy`` nothing is shared with this batch.

        Raises:
            SchemaError: a name does not exist.
        """
        tensors = self.batch
        if batch_keys is not None:
            names = list(batch_keys)
            self._require(names, self._tensor_names(), "batch")
            tensors = self.batch.select(*names) if self.batch is not None and names else None
        arrays = _pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta = _pick(self.meta_info, meta_info_keys, "meta_info")
        out = self._derive(tensors, arrays, meta)
        return copy.deepcopy(out) if deepcopy else out

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Move fields out of this batch into a new one.

        Raises:
            SchemaError: a name does not exist; nothing is moved then.
        """
        wanted = list(batch_keys or ()), list(non_tensor_batch_keys or ()), list(meta_info_keys or ())
        out = self.select(*wanted)
        for name in wanted[0]:
            assert self.batch is not None
            self.batch.pop(name)
        for name in wanted[1]:
            self.non_tensor_batch.pop(name)
        for name in wanted[2]:
            self.meta_info.pop(name)
        return out

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Rename tensors in place and return self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new):
            raise DataError(f"rename: {len(old)} old names {old} but {len(new)} new names {new}")
        self._require(old, self._tensor_names(), "batch")
        if len(set(new)) != len(new):
            raise SchemaError(f"rename: a new name occurs twice in {new}")
        if clash := [name for name in new if name in self._field_names() and name not in old]:
            raise SchemaError(f"rename: fields {', '.join(clash)} exist already")
        if self.batch is not None and old:
            moved = [self.batch.pop(name) for name in old]
            for name, tensor in zip(new, moved, strict=True):
                self.batch[name] = tensor
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the fields of ``other`` in place and return self.

        Raises:
            SchemaError: a field exists in both with different values (NaN equals NaN), or the rows differ in number.
        """
        both_have_rows = self._field_names() and other._field_names()
        if both_have_rows and len(self) != len(other):
            raise SchemaError(f"union: {len(self)} rows and {len(other)} rows; both batches need the same rows")
        tensors = self.batch
        if other.batch is not None:
            tensors = other.batch.copy() if tensors is None else union_tensor_dict(tensors.copy(), other.batch)
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        meta = _union_meta(self.meta_info, other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = tensors, arrays, meta
        self.check_consistency()
        return self

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors to ``device`` in place and return self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- splitting and joining -----------------------------------------------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of the batch, ``epochs`` times over.

        Uses and changes no global random state: the order comes from ``seed`` alone, a new permutation each epoch.

        Args:
            mini_batch_size: rows per mini-batch; divides the number of rows unless ``drop_last`` is given.
            epochs: passes over the batch.
            seed: seed of the shuffle; 0 when not given.
            dataloader_kwargs: ``shuffle`` (default False) and ``drop_last`` (drop the incomplete mini-batch).

        Raises:
            DataError: sizes do not divide, or an unknown option.
        """
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", False))
        drop_last = options.pop("drop_last", None)
        if options:
            raise DataError(f"make_iterator: unknown options {sorted(options)}; known are shuffle and drop_last")
        if mini_batch_size < 1:
            raise DataError(f"mini_batch_size={mini_batch_size} must be at least 1")
        rows = len(self)
        if rows % mini_batch_size and drop_last is None:
            raise DataError(
                f"{rows} rows do not divide into mini-batches of {mini_batch_size}; "
                "choose a divisor, or say what to do with the rest through drop_last"
            )
        return self._mini_batches(mini_batch_size, epochs, seed or 0, shuffle, bool(drop_last))

    def _mini_batches(self, size: int, epochs: int, seed: int, shuffle: bool, drop_last: bool) -> Iterator[DataProto]:
        rows = len(self)
        end = rows - rows % size if drop_last else rows
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(rows, generator=generator).numpy() if shuffle else None
            for start in range(0, end, size):
                if order is None:
                    yield self.slice(start, min(start + size, end))
                else:
                    yield self._take(order[start : min(start + size, end)])

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` equal parts; views.

        Raises:
            DataError: the rows do not divide. Dispatch pads (see :func:`split_with_padding`), this does not.
        """
        if chunks < 1:
            raise DataError(f"chunks={chunks} must be at least 1")
        rows = len(self)
        if rows % chunks:
            raise DataError(
                f"{rows} rows do not divide into {chunks} chunks; pad with pad_dataproto_to_divisor(data, {chunks}), "
                "or use split(size), whose last part may be smaller"
            )
        size = rows // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of ``split_size`` rows; views; the last part may be smaller."""
        if split_size < 1:
            raise DataError(f"split_size={split_size} must be at least 1")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of all parts in order.

        ``meta_info``: values that are equal in every part are kept once. ``metrics`` and ``timing`` belong to
        their part: mergeable metrics (:class:`~verl.utils.metrics.MetricSet`) are merged, plain values become
        lists with one entry per part (``[{"loss": 1.0}, {"loss": 2.0}]`` gives ``{"loss": [1.0, 2.0]}``, lists
        are joined).

        Raises:
            SchemaError: parts have different fields, dtypes or row shapes.
            DataError: no parts, or different values of one ``meta_info`` key.
        """
        parts = list(data)
        if not parts:
            raise DataError("concat of no parts: the fields of the result would be unknown")
        meta = _merge_meta([part.meta_info for part in parts])
        with_fields = [part for part in parts if part._field_names()] or parts[:1]
        if any(len(part) for part in parts if not part._field_names()):
            raise SchemaError("concat: a part has rows but no fields")
        first = with_fields[0]
        for number, part in enumerate(with_fields[1:], start=1):
            difference = (part._tensor_names() ^ first._tensor_names()) | (
                part.non_tensor_batch.keys() ^ first.non_tensor_batch.keys()
            )
            if difference:
                raise SchemaError(
                    f"concat: parts 0 and {number} do not have the same fields; they differ in "
                    f"{', '.join(sorted(difference))}"
                )
        batch = None
        if first.batch is not None:
            tensor_dicts = [part.batch for part in with_fields if part.batch is not None]
            batch = TensorDict(
                {name: _cat_field(name, [tensors[name] for tensors in tensor_dicts]) for name in first.batch.keys()},  # noqa: SIM118
                batch_size=[sum(len(part) for part in with_fields), *first.batch.batch_size[1:]],
            )
        arrays = {
            name: _cat_arrays(name, [part.non_tensor_batch[name] for part in with_fields])
            for name in first.non_tensor_batch
        }
        return DataProto(batch, arrays, meta)

    # ---- files and pickles ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return pack({"batch": self.batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> DataProto:
        return self._derive(None if self.batch is None else self.batch.copy(), dict(self.non_tensor_batch))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        out = DataProto.__new__(DataProto)
        memo[id(self)] = out
        out.batch = None if self.batch is None else self.batch.clone()
        out.non_tensor_batch = copy.deepcopy(self.non_tensor_batch, memo)
        out.meta_info = copy.deepcopy(self.meta_info, memo)
        return out

    def save_to_disk(self, filepath: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Write the batch to a file of tensors, arrays and plain Python values; it appears only when complete.

        Args:
            filepath: of the file.
            allow_pickle: write a pickle, which may hold any object and is read only with the same argument.

        Raises:
            DataError: without ``allow_pickle``, a field holds something else than plain values; names it.
        """
        if allow_pickle:
            with atomic_open(filepath, "wb") as file:
                pickle.dump(self, file, protocol=5)
            return
        content: dict[str, Any] = {"batch": self._encoded("batch", self.batch)}
        for part in ("non_tensor_batch", "meta_info"):
            fields = getattr(self, part)
            content[part] = {name: self._encoded(f"{part}[{name!r}]", value) for name, value in fields.items()}
        plain_file.save(Path(filepath), DataProto.__name__, content)

    @staticmethod
    def _encoded(name: str, value: Any) -> Any:
        try:
            return plain_file.encode(value)
        except TypeError as error:
            raise DataError(
                f"{name} has a {error}, which a file of plain values cannot hold; leave it out, or give save_to_disk "
                "and load_from_disk allow_pickle=True"
            ) from None

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str], *, allow_pickle: bool = False) -> DataProto:
        """Read a file that :meth:`save_to_disk` wrote; tensors arrive on the CPU.

        Args:
            filepath: of the file.
            allow_pickle: read pickles too, which run whatever their writer wanted: only for files of your own.

        Raises:
            DataError: the file holds something else, or is a pickle that is not allowed.
        """
        path = Path(filepath)
        if plain_file.is_plain_file(path):
            content = plain_file.load(path, DataProto.__name__)
            arrays, meta = (
                {name: plain_file.decode(value) for name, value in content.get(part, {}).items()}
                for part in ("non_tensor_batch", "meta_info")
            )
            return DataProto(plain_file.decode(content.get("batch")), arrays, meta)
        if not allow_pickle:
            raise DataError(
                f"{path} is no file of plain values. If it is a pickle, as save_to_disk writes with allow_pickle=True "
                "and earlier versions always did, reading it may run code: give load_from_disk allow_pickle=True if "
                "you trust whoever wrote it, and save the batch again"
            )
        with open(path, "rb") as file:
            data = pickle.load(file)
        if not isinstance(data, DataProto):
            raise DataError(f"{path} holds a {type(data).__name__}, expected a DataProto")
        return data

    # ---- helpers -------------------------------------------------------------------------------------------

    def _derive(
        self, batch: TensorDict | None, arrays: dict[str, np.ndarray], meta: dict[str, Any] | None = None
    ) -> DataProto:
        """A batch with these fields and its own ``meta_info`` dict."""
        return DataProto(batch, arrays, dict(self.meta_info if meta is None else meta))

    def _take(self, index: np.ndarray) -> DataProto:
        tensors = None
        if self.batch is not None:
            tensors = self.batch[torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)).to(self.batch.device)]
        return self._derive(tensors, {name: values[index] for name, values in self.non_tensor_batch.items()})

    def _row_numbers(self, idxs: Any) -> np.ndarray:
        """Row numbers from 0 for indices or a mask."""
        index = idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else np.asarray(idxs)
        rows = len(self)
        if index.ndim != 1:
            raise DataError(f"rows are selected by one dimension of indices, got shape {index.shape}")
        if index.dtype == bool:
            if len(index) != rows:
                raise IndexError(f"a mask of {len(index)} entries for a batch of {rows} rows")
            return np.flatnonzero(index)
        if len(index) == 0:
            return np.zeros(0, dtype=np.int64)
        if index.dtype.kind not in "iu":
            raise DataError(f"rows are selected by integers or booleans, got {index.dtype}")
        index = index.astype(np.int64)
        if index.min() < -rows or index.max() >= rows:
            raise IndexError(f"rows {index.min()} to {index.max()} of a batch of {rows} rows")
        return np.where(index < 0, index + rows, index)

    def _tensor_names(self) -> set[str]:
        return set() if self.batch is None else set(self.batch.keys())

    def _field_names(self) -> set[str]:
        return self._tensor_names() | self.non_tensor_batch.keys()

    @staticmethod
    def _require(names: Iterable[str], known: Iterable[str], kind: str) -> None:
        known = set(known)
        if missing := [name for name in names if name not in known]:
            raise SchemaError(f"{kind}: {_missing_text(missing, known)}")


# ---- padding ---------------------------------------------------------------------------------------------------


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of rows from the start until ``size_divisor`` divides the number of rows.

    Padding rows are copies of real rows, so whatever a worker does with a row it can do with them.

    Returns:
        The padded batch (the same one when nothing is missing) and the number of rows added.
    """
    if size_divisor < 1:
        raise DataError(f"size_divisor={size_divisor} must be at least 1")
    rows = len(data)
    missing = -rows % size_divisor
    if missing == 0:
        return data, 0
    return data._take(np.arange(rows + missing) % rows), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"pad_size={pad_size} of a batch of {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def split_with_padding(data: DataProto, chunks: int, auto_padding: bool | None = None) -> list[DataProto]:
    """Split a batch for ``chunks`` ranks, padding it where that is allowed.

    Shards that hold padding say so in ``meta_info[PADDING_ROWS_KEY]``: the number of their trailing rows that are
    copies. :func:`strip_padding` undoes it. A method that averages over rows must leave these rows out.

    Args:
        data: the batch.
        chunks: how many shards.
        auto_padding: pad or refuse; None asks the batch itself, then :class:`DataProtoConfig`.

    Raises:
        DataError: the rows do not divide and padding is off.
    """
    rows = len(data)
    if auto_padding is None:
        auto_padding = data.meta_info.get(DataProtoConfig.auto_padding_key, DataProtoConfig.auto_padding)
    if rows % chunks == 0 or rows == 0:
        return data.chunk(chunks)
    if not auto_padding:
        raise DataError(
            f"{rows} rows do not divide over {chunks} ranks and padding is off here, because copies of rows would "
            "change the result; choose a batch size that divides"
        )
    padded, _ = pad_dataproto_to_divisor(data, chunks)
    shards = padded.chunk(chunks)
    size = len(padded) // chunks
    for number, shard in enumerate(shards):
        copies = min(size, max(0, (number + 1) * size - rows))
        if copies:
            shard.meta_info[PADDING_ROWS_KEY] = copies
    return shards


def strip_padding(shard: DataProto) -> DataProto:
    """A shard without the rows that :func:`split_with_padding` added to it."""
    copies = shard.meta_info.get(PADDING_ROWS_KEY)
    if copies is None:
        return shard
    stripped = unpad_dataproto(shard, copies) if len(shard) else shard._derive(shard.batch, shard.non_tensor_batch)
    stripped.meta_info = {name: value for name, value in shard.meta_info.items() if name != PADDING_ROWS_KEY}
    return stripped


# ---- joining fields --------------------------------------------------------------------------------------------


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the fields of the second to the first, in place.

    Raises:
        SchemaError: batch sizes differ, or a field exists in both with different values (NaN equals NaN).
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise SchemaError(
            f"union: batch sizes differ: {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        )
    known = set(tensor_dict1.keys())
    different = [name for name, value in tensor_dict2.items() if name in known and not _same(tensor_dict1[name], value)]
    if different:
        raise SchemaError(_conflict_text(different))
    for name, value in tensor_dict2.items():
        if name not in known:
            tensor_dict1[name] = value
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place.

    Raises:
        SchemaError: an array exists in both with different values (NaN equals NaN).
    """
    different = [
        name for name in tensor_dict2 if name in tensor_dict1 and not _same(tensor_dict1[name], tensor_dict2[name])
    ]
    if different:
        raise SchemaError(_conflict_text(different))
    for name, values in tensor_dict2.items():
        tensor_dict1.setdefault(name, values)
    return tensor_dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """``[{"a": 1}, {"a": 2}]`` -> ``{"a": [1, 2]}``.

    Raises:
        DataError: the dicts have different keys.
    """
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, row in enumerate(list_of_dict):
        if row.keys() != keys:
            raise DataError(f"dict {number} has keys {sorted(row)}, the first one {sorted(keys)}")
    return {key: [row[key] for row in list_of_dict] for key in keys}


def _merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in metas:
        for name, value in meta.items():
            if name in PER_SHARD_META:
                continue
            if name in merged and not _same(merged[name], value):
                raise DataError(
                    f"concat: meta_info[{name!r}] differs between the parts: {merged[name]!r} and {value!r}; "
                    "numbers of one part belong in meta_info['metrics']"
                )
            merged.setdefault(name, value)
    for name in PER_SHARD_META:
        values = [meta[name] for meta in metas if name in meta]
        if values:
            merged[name] = _merge_per_shard(values)
    return merged


def _merge_per_shard(values: Sequence[Any]) -> Any:
    """Metrics of all shards: exact where they say how they combine, lists of plain values otherwise."""
    pieces = [piece for value in values for piece in (value if isinstance(value, list) else [value])]
    if not all(isinstance(piece, Mapping) for piece in pieces):
        return pieces
    if all(isinstance(metric, Metric) for piece in pieces for metric in piece.values()) and any(pieces):
        return MetricSet.merged(pieces)
    out: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, value in piece.items():
            out.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return out


def _union_meta(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    different = [name for name in theirs if name in ours and not _same(ours[name], theirs[name])]
    if different:
        text = ", ".join(f"{name!r} ({ours[name]!r} and {theirs[name]!r})" for name in different)
        raise SchemaError(f"union: meta_info differs in {text}; pop() what belongs to one batch only")
    return {**ours, **theirs}


def _cat_field(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, TensorDictBase):
        return torch.cat(list(values))
    for number, value in enumerate(values[1:], start=1):
        if value.dtype != first.dtype or value.shape[1:] != first.shape[1:]:
            raise SchemaError(
                f"concat: field {name!r} is {tuple(first.shape)} {first.dtype} in part 0 but "
                f"{tuple(value.shape)} {value.dtype} in part {number}"
            )
    return torch.cat(list(values))


def _cat_arrays(name: str, values: Sequence[np.ndarray]) -> np.ndarray:
    rows = {value.shape[1:] for value in values}
    if len(rows) > 1:
        raise SchemaError(f"concat: field {name!r} has rows of different shapes {sorted(rows)}")
    return np.concatenate(list(values))


def _as_array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise SchemaError(f"non_tensor field {name!r} is a scalar array; it needs one entry per row")
        # fixed-width strings would be cut when a longer one is assigned
        return values.astype(object) if values.dtype.kind in "US" else values
    if isinstance(values, torch.Tensor):
        raise SchemaError(f"non_tensor field {name!r} is a tensor; put it into batch")
    if not isinstance(values, list | tuple):
        raise SchemaError(f"non_tensor field {name!r} is a {type(values).__name__}; give an array or a list of rows")
    out = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # assigning the list would turn nested lists into columns
        out[index] = value
    return out


def _same(left: Any, right: Any) -> bool:
    """Equality that looks into containers and tensors, and in which NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _same_tensors(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _same_arrays(left, right)
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        return set(left.keys()) == set(right.keys()) and all(_same(left[name], right[name]) for name in left.keys())  # noqa: SIM118
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (left != left and right != right)
    return bool(left == right)


def _same_tensors(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    if left.is_floating_point() or left.is_complex():
        return bool(torch.logical_or(left == right, torch.isnan(left) & torch.isnan(right)).all())
    return bool(torch.equal(left, right))


def _same_arrays(left: Any, right: Any) -> bool:
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)) or left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(_same(a, b) for a, b in zip(left.reshape(-1), right.reshape(-1), strict=True))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc" and right.dtype.kind in "fc"))


def _pick(items: Mapping[str, Any], names: Iterable[str] | None, kind: str) -> dict[str, Any]:
    if names is None:
        return dict(items)
    wanted = list(names)
    DataProto._require(wanted, items, kind)
    return {name: items[name] for name in wanted}


def _listing(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _missing_text(missing: Iterable[str], known: Iterable[str]) -> str:
    return f"no field {', '.join(map(repr, missing))}; there are {', '.join(sorted(known)) or 'none'}"


def _conflict_text(names: Iterable[str]) -> str:
    return (
        f"union: {', '.join(map(repr, names))} exist in both batches with different values; "
        "a stage adds fields and never rewrites one"
    )


# ---- tensors as plain bytes, and collectives ------------------------------------------------------------------

#: batch size and, for each name, (NumPy array of the bits, torch dtype name where NumPy lacks the dtype)
SerializedTensorDict = tuple[tuple[int, ...], dict[str, tuple[np.ndarray, str | None]]]


def serialize_tensordict(batch: TensorDict) -> SerializedTensorDict:
    """A flat TensorDict as arrays that any transport can carry; without copies for contiguous CPU tensors."""
    return tuple(batch.batch_size), {name: array_of(tensor) for name, tensor in batch.items()}


def deserialize_tensordict(data: SerializedTensorDict) -> TensorDict:
    """The inverse of :func:`serialize_tensordict`; read-only arrays are copied."""
    batch_size, fields = data
    return TensorDict({name: tensor_of(array, kind) for name, (array, kind) in fields.items()}, batch_size=batch_size)


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace the batch on every rank by the rows of all ranks, in rank order. Collective; in place.

    Ranks may hold different numbers of rows; fields must be the same. ``meta_info`` stays the rank's own.

    Args:
        data: this rank's rows; tensors are moved to where the group's backend works and back.
        process_group: a ``torch.distributed`` group.

    Raises:
        SchemaError: the ranks' fields, dtypes or row shapes differ (raised on every rank).
    """
    import torch.distributed as dist

    size = dist.get_world_size(process_group)
    if size == 1:
        return
    tensors = {} if data.batch is None else dict(data.batch.items())
    mine = {
        "rows": len(data),
        "fields": {name: (tuple(tensor.shape[1:]), str(tensor.dtype)) for name, tensor in tensors.items()},
        "arrays": pack(data.non_tensor_batch),
    }
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs["fields"] != mine["fields"] or theirs["arrays"].keys() != data.non_tensor_batch.keys():
            raise SchemaError(
                f"all_gather: rank {rank} holds {theirs['fields']} and {sorted(theirs['arrays'])}, this rank "
                f"{mine['fields']} and {sorted(data.non_tensor_batch)}; all ranks need the same fields"
            )
    rows = [theirs["rows"] for theirs in everyone]
    cuda_only = dist.get_backend(process_group) == "nccl"
    gathered = {}
    for name, tensor in tensors.items():
        local = tensor.cuda() if cuda_only else tensor.cpu()
        padded = local.new_zeros((max(rows), *local.shape[1:]))
        padded[: len(local)] = local
        pieces = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(pieces, padded, group=process_group)
        whole = torch.cat([piece[:count] for piece, count in zip(pieces, rows, strict=True)])
        gathered[name] = whole.to(tensor.device)
    data.batch = TensorDict(gathered, batch_size=[sum(rows)]) if gathered else None
    data.non_tensor_batch = {
        name: _cat_arrays(name, [theirs["arrays"][name] for theirs in everyone]) for name in data.non_tensor_batch
    }


# ---- futures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completed:
    """A result that is there already, in the place of an object reference."""

    value: Any


class DataProtoFuture:
    """The result of a non-blocking call: the shards are still being computed, or lie where they were computed.

    Pass it to a method of another worker group and the shards go from worker to worker; the controller only
    hands on references. :meth:`get` brings the whole batch to the caller.

    Args:
        collect_fn: joins the shards' values.
        futures: one reference per shard, in order: Ray object references or :class:`Completed`.
        dispatch_fn: picks what the receiver wants of the joined value; None takes all.
        fetch: turns references into values; by default waits for Ray. Lets the owner of the call name the failing
            worker; not pickled.
    """

    def __init__(
        self,
        collect_fn: Callable[[list[Any]], Any],
        futures: Sequence[Any],
        dispatch_fn: Callable[[Any], Any] | None = None,
        fetch: Callable[[Sequence[Any]], list[Any]] | None = None,
    ) -> None:
        self.collect_fn = collect_fn
        self.futures = list(futures)
        self.dispatch_fn = dispatch_fn
        self._fetch = fetch

    @staticmethod
    def concat(data: Sequence[Any], fetch: Callable[[Sequence[Any]], list[Any]] | None = None) -> DataProtoFuture:
        """The future of all shards' rows together."""
        return DataProtoFuture(collect_shards, data, fetch=fetch)

    def chunk(self, chunks: int, auto_padding: bool | None = None) -> list[DataProtoFuture]:
        """Futures of the parts that ``chunks`` receivers get.

        With as many receivers as shards each gets one shard, as it is. Otherwise each receiver joins all shards
        and takes its part.
        """
        if self.dispatch_fn is None and self.collect_fn is collect_shards and len(self.futures) == chunks:
            return [DataProtoFuture(_only, [future]) for future in self.futures]
        return [
            DataProtoFuture(
                partial(_joined, self.collect_fn, self.dispatch_fn),
                self.futures,
                partial(_part_of, index=index, chunks=chunks, auto_padding=auto_padding),
            )
            for index in range(chunks)
        ]

    @property
    def single_reference(self) -> Any | None:
        """The one reference that *is* this future's value, or None when something must be computed from several."""
        return self.futures[0] if self.collect_fn is _only and self.dispatch_fn is None else None

    def get(self) -> Any:
        """Wait for the value.

        Raises:
            WorkerError: a worker failed.
        """
        values = (self._fetch or fetch_references)(self.futures)
        joined = self.collect_fn(values)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)

    def fetch_with(self, fetch: Callable[[Sequence[Any]], list[Any]]) -> None:
        """Let ``fetch`` turn references into values in this process, unless something does already."""
        self._fetch = self._fetch or fetch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetch": None}

    def __repr__(self) -> str:
        return f"DataProtoFuture({len(self.futures)} shards)"


def collect_shards(shards: Sequence[DataProto]) -> DataProto:
    """Join shards and remove the padding that dispatch added."""
    return DataProto.concat([strip_padding(shard) for shard in shards])


def _only(values: Sequence[Any]) -> Any:
    return values[0]


def _joined(collect_fn: Callable[[list[Any]], Any], dispatch_fn: Callable[[Any], Any] | None, values: list[Any]) -> Any:
    joined = collect_fn(values)
    return joined if dispatch_fn is None else dispatch_fn(joined)


def _part_of(data: DataProto, index: int, chunks: int, auto_padding: bool | None) -> DataProto:
    return split_with_padding(data, chunks, auto_padding)[index]


def fetch_references(references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Values of references of any kind, in any process.

    Args:
        references: Ray object references and :class:`Completed` values.
        timeout_s: how long to wait for Ray.

    Raises:
        WorkerError: the worker that should have made a value failed; the first in the list is reported.
    """
    pending = [reference for reference in references if not isinstance(reference, Completed)]
    values: Iterator[Any] = iter(())
    if pending:
        import ray

        try:
            values = iter(ray.get(pending, timeout=timeout_s))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from None
            raise
    return [reference.value if isinstance(reference, Completed) else next(values) for reference in references]

"""Batches that sources keep between steps: joined, and as plain values for checkpoints that run no code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.data.collate import object_array
from verl.errors import CheckpointError
from verl.protocol import DataProto


def join(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate; columns that a part lacks are None there, and ``meta_info`` is left out.

    Data sets and reward functions need not give the same columns every time.
    """
    names = {name for part in parts for name in part.non_tensor_batch}
    for part in parts:
        for name in names - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), None, dtype=object)
        part.meta_info = {}
    return DataProto.concat(parts)


def to_plain(batch: DataProto, *, what: str, instead: str) -> dict[str, Any]:
    """A batch as nested dicts and lists of tensors, strings and numbers; ``meta_info`` is left out.

    Args:
        batch: to describe.
        what: is kept, for the error message.
        instead: what else the user can do where a column cannot be saved.

    Raises:
        CheckpointError: a column holds something else.
    """
    # clones, because a saved view would carry the whole batch that it was cut from
    tensors = {name: value.clone() for name, value in batch.batch.items()}
    columns = {
        name: [plain_value(value, what=what, instead=instead, column=name) for value in values]
        for name, values in batch.non_tensor_batch.items()
    }
    return {"tensors": tensors, "columns": columns}


def plain_value(value: Any, *, what: str, instead: str, column: str | None = None) -> Any:
    """Something that a batch or a sample holds, as dicts, lists, tensors, strings and numbers.

    Args:
        value: to describe.
        what: is kept, for the error message.
        instead: what else the user can do if it cannot be saved.
        column: that holds it; None: an extra field of an agent loop.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return _plain(value)
    except TypeError as error:
        where = "an extra field of an agent loop" if column is None else f"column {column!r}"
        remedy = "return no such field" if column is None else "leave the column out of the data set"
        raise CheckpointError(
            f"{what} have a {error} in {where}, which a checkpoint cannot hold; {remedy}, or {instead}"
        ) from None


def from_plain(state: dict[str, Any]) -> DataProto:
    """The batch that :func:`to_plain` described."""
    columns = {name: object_array(values) for name, values in state["columns"].items()}
    return DataProto.from_dict(dict(state["tensors"]), columns)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float | torch.Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(inner) for inner in value]
    raise TypeError(type(value).__name__)

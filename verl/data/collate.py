"""From a list of items to one batch dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import DataError
from verl.utils.arrays import object_array


def collate_fn(items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Stack tensors along a new first dimension, put everything else into object arrays.

    A key that some items lack is filled with ``None``, unless it holds tensors.

    Args:
        items: B mappings, as a dataset yields them.

    Returns:
        Tensors (B, ...) and object arrays (B,), ready for ``DataProto.from_single_dict``.

    Raises:
        DataError: no items, or tensors of one key that differ in shape or are missing in some items.
    """
    if not items:
        raise DataError("cannot make a batch of no items")
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for key in dict.fromkeys(key for item in items for key in item):
        values = [item.get(key) for item in items]
        if any(isinstance(value, torch.Tensor) for value in values):
            shapes = {tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in values}
            if len(shapes) > 1:
                raise DataError(
                    f"items of a batch differ in {key!r}: shapes {sorted(shapes, key=str)} (None: not a tensor)"
                )
            batch[key] = torch.stack([value for value in values if isinstance(value, torch.Tensor)])
        else:
            batch[key] = object_array(values)
    return batch

"""Keeping what the backward pass needs in host memory between the passes.

With gradient checkpointing that is the hidden state at the start of each layer; without it everything that autograd
saves. Parameters stay where they are: they are not freed by a copy, and sharded ones are gathered again anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

#: a smaller tensor costs more to move than to keep
MIN_NUMBERS = 1024


class _OnHost:
    """A tensor in host memory and the device it came from."""

    __slots__ = ("device", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        pinned = tensor.device.type == "cuda"
        self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self.tensor.copy_(tensor, non_blocking=pinned)

    def back(self) -> Tensor:
        return self.tensor.to(self.device, non_blocking=True, copy=True)


@contextmanager
def offload_activations(device: torch.device, min_numbers: int = MIN_NUMBERS) -> Iterator[dict[str, int]]:
    """Within the context, tensors on ``device`` that autograd saves go to host memory and come back when needed.

    Copies are queued behind the computation that makes the tensors and before the one that reads them, on the same
    stream, so nothing waits on the host.

    Args:
        device: where the model computes.
        min_numbers: tensors with fewer numbers stay.

    Yields:
        ``{"tensors": ..., "bytes": ...}`` moved so far.
    """
    moved = {"tensors": 0, "bytes": 0}

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        if tensor.device.type != device.type or tensor.numel() < min_numbers:
            return tensor.detach()  # the tensor itself may be the output of the node that keeps it: a cycle
        moved["tensors"] += 1
        moved["bytes"] += tensor.nbytes
        return _OnHost(tensor)

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor = packed.back() if isinstance(packed, _OnHost) else packed
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield moved


__all__ = ["offload_activations"]

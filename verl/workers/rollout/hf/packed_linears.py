"""Copies of the weights of linear layers in the order in which the CPU's kernels read them.

oneDNN multiplies with blocked matrices. A plain matrix is brought into that order in every call, which for the few
rows of a decode step costs as much as the product itself. Packing once for a generation phase saves that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from verl.models.lora import LoraLinear

#: smaller matrices gain nothing: the call costs more than the order of their numbers
PACKED_FROM = 1 << 16


def packing_supported(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for packed weights of this type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinears:
    """Packs the linear layers of a module on request; without packed weights they work as before.

    Args:
        module: its ``nn.Linear`` layers of sufficient size are served, with or without an adapter, which is not packed;
            other subclasses, which may compute something else, are left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        found = [layer for layer in linears if type(layer) in (nn.Linear, LoraLinear)]
        self.layers = [layer for layer in found if layer.weight.numel() >= PACKED_FROM]
        self.nbytes = 0
        for layer in self.layers:
            layer.packed = None  # type: ignore[assignment]
            layer.forward = _Forward(layer)  # type: ignore[method-assign, assignment]

    @torch.inference_mode()
    def pack(self) -> None:
        """Copy the weights as they are now; does nothing while there are copies."""
        if self.nbytes:
            return
        for layer in self.layers:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
            self.nbytes += layer.weight.nbytes

    def drop(self) -> None:
        """Give the copies back; the layers read their plain weights again."""
        for layer in self.layers:
            layer.packed = None  # type: ignore[assignment]
        self.nbytes = 0


class _Forward:
    """``forward`` of one linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer: Any = layer
        self.has_adapter = isinstance(layer, LoraLinear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        if layer.packed is None:
            out = linear(x, layer.weight, layer.bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")
        return layer.adapted(x, out) if self.has_adapter else out

"""The policy's low-rank adapter in an SGLang scheduler, written in place at every update.

SGLang keeps adapters in a pool beside its layers and fills it from files or from whole sets of tensors, which it also
keeps. Here the policy's adapter is registered once, without matrices; they arrive bucket by bucket with the weights and
are written straight into the pool. Where a part of a fused or divided layer lies is known from the layer's own weight,
which came before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from verl.workers.rollout.policy_weights import Named, Place, digest

#: how names of the policy's adapters begin on a server, one for each run that used it
ADAPTER = "verl-policy-"
#: layers that SGLang has places for, by the last part of their name
ADAPTED_LAYERS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}
)
#: adapters side by side: the policy's, and "none", which SGLang counts as one
SLOTS = 2


class AdapterPool:
    """SGLang's pool of adapters as the place of the policy's.

    Args:
        manager: SGLang's manager of adapters.
        places: where the model's own weights were loaded to, by name; grows with the first update.
    """

    def __init__(self, manager: Any, places: Mapping[str, tuple[Place, ...] | None]) -> None:
        self.manager = manager
        self.places = places
        self._shapes: dict[str, torch.Size] = {}  # of the matrices that arrived

    @torch.no_grad()
    def load(self, weights: Iterable[Named]) -> None:
        """Write matrices.

        Raises:
            ValueError: there is no place for one.
        """
        for name, tensor in weights:
            into, part = self._part(name, tensor.shape)
            into.copy_(tensor[part])
            self._shapes[name] = tensor.shape

    def _part(self, name: str, shape: torch.Size) -> tuple[torch.Tensor, tuple[slice, slice]]:
        """The memory of this device's part of a matrix, and which part it is."""
        layer, _, half = name.rpartition(".")
        places = self.places.get(f"{layer}.weight")
        if not places or len(places) != 1:
            raise ValueError(
                f"there is no place for {name!r}: its layer's weight did not come before it, or SGLang changes it"
            )
        (place,) = places
        module = self.manager.base_model.get_submodule(place.owner.rpartition(".")[0])
        a, b = _buffers(module)
        if a is None or b is None:
            raise ValueError(f"SGLang has no place for an adapter on {layer}")
        slot = self.manager.memory_pool.get_buffer_id(self._registered())
        rows, columns = (
            slice(start, start + size)
            for start, size in zip(divmod(place.source_offset, place.source_stride[0]), place.size, strict=True)
        )
        first, left = divmod(place.offset, place.stride[0])
        if half == "lora_A":
            rank, number = shape[0], self._number(place, first)
            # SGLang may have made the layer wider than the model's
            return a[slot, number * rank : (number + 1) * rank, left : left + place.size[1]], (slice(None), columns)
        return b[slot, first : first + place.size[0], : shape[1]], (rows, slice(None))

    def _number(self, place: Place, first: int) -> int:
        """Which part of a fused layer begins at row ``first``."""
        starts = {
            other.offset // other.stride[0]
            for others in self.places.values()
            for other in others or ()
            if other.owner == place.owner
        }
        return sorted(starts).index(first)

    def _registered(self) -> str:
        """SGLang's number of the policy's adapter, which has a place in the pool."""
        found = [ref.lora_id for ref in self.manager.lora_refs.values() if ref.lora_name.startswith(ADAPTER)]
        if not found:
            raise ValueError("no adapter of a policy is registered")
        self.manager.fetch_new_loras({None, found[-1]})
        return str(found[-1])

    def digests(self, dtype: torch.dtype) -> dict[str, str]:
        """Per matrix, as :meth:`LoadedWeights.digests` has it for weights."""
        found = {}
        for name, shape in self._shapes.items():
            memory, (rows, columns) = self._part(name, shape)
            part = None
            if memory.shape != shape:
                stride = (shape[1], 1)
                part = [(tuple(memory.shape), stride, (rows.start or 0) * shape[1] + (columns.start or 0))]
            found[name] = json.dumps({"digest": digest([memory], dtype), "parts": part})
        return found


def _buffers(module: Any) -> tuple[Any, Any]:
    """The matrices A and B of all adapters of a layer; None where it has no place for them."""
    for suffix in ("", "_qkv"):
        if hasattr(module, f"A_buffer{suffix}"):
            return getattr(module, f"A_buffer{suffix}"), getattr(module, f"B_buffer{suffix}")
    return None, None


def pool_tensors(runner: Any) -> Iterator[torch.Tensor]:
    """The memory of a model runner's pool of adapters."""
    manager = getattr(runner, "lora_manager", None)
    if manager is not None:
        for buffers in (manager.memory_pool.A_buffer, manager.memory_pool.B_buffer):
            for tensors in buffers.values():
                yield from tensors

"""The policy's low-rank adapter inside a vLLM worker, written in place at every update.

vLLM keeps a fixed place for the matrices of an adapter beside each layer that may have one, and fills it from files
when a request names the adapter. Here there is one adapter, the policy's, which is registered once without matrices;
they are written from the training engine's tensors into these places, so that no second copy of them exists. vLLM's own
code says what goes where: fused projections, parts of tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.workers.rollout.policy_weights import CopyRecorder, Named, Place, digest

if TYPE_CHECKING:
    from verl.workers.rollout.vllm.weights import ModelWeights

#: ranks that vLLM has room for
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: number of the policy's adapter
ADAPTER_ID = 1


def adapter_request() -> Any:
    """What a request says to be served with the policy's adapter; nothing is read from the path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="policy")


@contextlib.contextmanager
def base_layers(model: nn.Module) -> Iterator[None]:
    """Within the context the model consists of its own layers, under their names, without those that add adapters."""
    from vllm.lora.layers import BaseLayerWithLoRA

    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in found:
        parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in found:
            parent._modules[name] = child


class AdapterSlots:
    """Where generation reads the policy's adapter from.

    To be made within :func:`base_layers`.

    Args:
        model: vLLM's module.
        manager: vLLM's manager of adapters, which has put its layers into the model.
        weights: of the same model; it knows where the weights of a layer go.
        shapes: whole adapter matrices by name.
        scaling: of the adapter's output.
        dtype: of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        manager: Any,
        weights: ModelWeights,
        *,
        shapes: Mapping[str, torch.Size],
        scaling: float,
        dtype: torch.dtype,
    ) -> None:
        self.manager = manager
        self.rank = next(shape[0] for name, shape in shapes.items() if name.endswith("lora_A"))
        self.scaling = scaling
        self.dtype = dtype
        self._layers = list(manager.modules.values())
        #: places of a matrix, each within a tensor of vLLM's
        self._places: dict[str, list[tuple[Place, torch.Tensor]]] = {}
        self._storages = [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in self._memory()]
        #: why the adapter cannot be served; None when it can
        self.problem = self._find_places(model, weights, shapes)
        if self.problem is None:
            self._register()

    def _memory(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            yield from layer.lora_a_stacked
            yield from layer.lora_b_stacked

    def _find_places(self, model: nn.Module, weights: ModelWeights, shapes: Mapping[str, torch.Size]) -> str | None:
        adapted = {id(layer.base_layer): layer for layer in self._layers}
        for name, shape in shapes.items():
            layer_name, _, half = name.rpartition(".")
            owner = weights.owner_of(f"{layer_name}.weight")
            target = None if owner is None else adapted.get(id(model.get_submodule(owner.rpartition(".")[0])))
            if target is None or owner is None:
                return f"its {type(model).__name__} has no place for an adapter on {layer_name}"
            runtime = owner.split(".")[-2]
            parts = self.manager.packed_modules_mapping.get(runtime, [])
            own = layer_name.rpartition(".")[2]
            if len(parts) > 1 and own not in parts:
                return f"its layer {runtime} has no part {own}"
            number = parts.index(own) if len(parts) > 1 else None
            places = _places_in(target, half, shape, number, len(parts), self.rank, self.dtype)
            if places is None:
                return f"it rearranges the adapter on {layer_name}"
            self._places[name] = places
        return None

    def _register(self) -> None:
        """Make vLLM know the adapter, with nothing in it, and multiply with the only one there is (CPU)."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        # what adds one otherwise packs its matrices, and expects some
        self.manager._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, self.rank, {})
        self.manager.activate_adapter(ADAPTER_ID)
        for wrapper in self.manager.punica_wrapper_mapping.values():
            if type(wrapper) is PunicaWrapperCPU:
                wrapper.__class__ = _single_adapter_class()
                wrapper.adapter_rank = self.rank

    # -- update

    @torch.no_grad()
    def begin(self) -> None:
        """Make room for new matrices."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
        for memory in self._memory():  # vLLM's rank may be larger than the adapter's
            memory.zero_()

    @torch.no_grad()
    def load(self, bucket: Iterable[Named]) -> None:
        """Write some of the matrices. The adapter's scale becomes part of B, as vLLM has it."""
        for name, tensor in bucket:
            for part, (place, memory) in zip(self._parts(name, tensor), self._places[name], strict=True):
                _view(memory, place).copy_(part)

    def _parts(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What goes to each place of a matrix."""
        whole = tensor.detach().contiguous()
        start = whole.storage_offset()
        parts = [
            whole.as_strided(place.size, place.source_stride, start + place.source_offset)
            for place, _ in self._places[name]
        ]
        return parts if name.endswith("lora_A") else [part.float() * self.scaling for part in parts]

    # -- comparison and memory

    @torch.no_grad()
    def digests(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per matrix of what generation uses on this rank, or of the same part of ``source``."""
        if source is not None:
            return {name: digest(self._parts(name, tensor), self.dtype) for name, tensor in source.items()}
        return {
            name: digest([_view(memory, place) for place, memory in places], self.dtype)
            for name, places in self._places.items()
        }

    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def release(self) -> None:
        """Give the memory back, without its values (CPU)."""
        for storage, _ in self._storages:
            storage.resize_(0)


def _view(memory: torch.Tensor, place: Place) -> torch.Tensor:
    return memory.as_strided(place.size, place.stride, memory.storage_offset() + place.offset)


def _places_in(
    layer: Any, half: str, shape: torch.Size, number: int | None, parts: int, rank: int, dtype: torch.dtype
) -> list[tuple[Place, torch.Tensor]] | None:
    """Where vLLM puts one matrix of a layer's adapter; None when it changes it on the way.

    Args:
        layer: vLLM's layer with a place for adapters.
        half: ``lora_A`` or ``lora_B``.
        shape: of the whole matrix.
        number: which of the ``parts`` of a fused layer has the adapter; None: the layer is not fused.
        rank: of the adapter.
        dtype: of the weights.
    """
    is_a = half == "lora_A"
    source = torch.empty(shape, dtype=dtype)
    other = torch.zeros((0, rank) if is_a else (rank, 0), dtype=dtype)
    a, b = (source, other) if is_a else (other, source)
    stacks = layer.lora_a_stacked if is_a else layer.lora_b_stacked
    owners = {t.untyped_storage()._cdata: (str(i), t.storage_offset()) for i, t in enumerate(stacks)}
    given: list[Any] = [a, b]
    if number is not None:
        given = [[matrix if i == number else None for i in range(parts)] for matrix in (a, b)]
    layer.reset_lora = lambda index: None  # nothing is to be written
    try:
        with CopyRecorder(owners, source, write=False) as recorder:
            layer.set_lora(0, *given)
    finally:
        del layer.reset_lora
    if not recorder.plain or not recorder.places:
        return None
    return [(place, stacks[int(place.owner)]) for place in recorder.places]


@cache
def _single_adapter_class() -> type:
    """vLLM's products with adapters on CPUs, for one adapter.

    vLLM gathers the matrices once for every token, which takes tokens × outputs × rank numbers. All tokens share the
    policy's adapter here, so two plain products do it.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class SingleAdapter(PunicaWrapperCPU):
        adapter_rank: int
        adapter_used = False

        def update_metadata(self, mapping: Any, *arguments: Any, **options: Any) -> None:
            self.adapter_used = any(mapping.prompt_mapping)

        def add_lora_linear(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a_stacked: tuple[torch.Tensor, ...],
            lora_b_stacked: tuple[torch.Tensor, ...],
            scale: float,
            output_slices: tuple[int, ...],
            **options: Any,
        ) -> None:
            if not self.adapter_used:
                return
            inputs, outputs = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            left = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                small = inputs @ a[0, 0, : self.adapter_rank].t()
                outputs[:, left : left + width].addmm_(small, b[0, 0, :, : self.adapter_rank].t(), alpha=scale)
                left += width

    return SingleAdapter

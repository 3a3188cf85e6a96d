"""New weights for a vLLM model, in place and one bucket at a time.

vLLM fuses projections (q, k and v become one matrix) and splits them over tensor-parallel ranks; its own weight loaders
know how, so every tensor goes through them. Two things are added here:

- *In-place or reloaded.* Where vLLM keeps a layer's weights as they were loaded, the loaders write straight into the
  memory that generation reads. Models with layers whose weights vLLM converts after loading (experts, latent attention,
  quantisation) go through vLLM's layer-by-layer reload instead, which converts again.
- *Packed matrices.* On CPUs vLLM multiplies with a packed copy of each matrix, which a loader does not reach: new
  weights would be ignored without any sign, the output head of a tied model being the last to be noticed. Matrices are
  therefore packed again after each update, the head like all others, and the plain copy is given back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from verl.errors import WeightSyncError
from verl.workers.rollout.policy_weights import CopyRecorder, Named, Place, WeightManifest, box_of, digest
from verl.workers.rollout.types import WeightPart

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------- vLLM's model


class ModelWeights:
    """The weights inside one vLLM worker.

    On CPUs the model must have been built under :func:`deferred_packing`.

    Args:
        model: vLLM's module.
        model_config: vLLM's ``ModelConfig``, which the reload asks for.
        manifest: the weights that an update consists of.
        dtype: of the weights.
        pack: multiply with packed matrices where vLLM would; False under compilation, which keeps what it traced.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        *,
        manifest: WeightManifest,
        dtype: torch.dtype,
        pack: bool,
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.manifest = manifest
        self.names_of = manifest.names_of
        self.dtype = dtype
        self.in_place = not any(_is_converted(module) for module in model.modules())
        #: matrices that generation multiplies with; an embedding that is only looked up is none
        self._matrices: list[nn.Module] = []
        #: those of them whose plain form nothing reads
        self._packed_only: set[nn.Module] = set()
        if pack:
            heads = {id(getattr(module, "lm_head", None)) for module in model.modules()}
            looked_up = {id(module.weight) for module in model.modules() if _is_embedding(module)}
            for module in model.modules():
                if hasattr(module, _MATRIX) and (not _is_embedding(module) or id(module) in heads):
                    self._matrices.append(module)
                    if id(module.weight) not in looked_up:
                        self._packed_only.add(module)
        self._ties_apart = _has_own_head(model)
        self._places: dict[str, tuple[Place, ...] | None] = {}
        storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._packed_bytes = 0
        if not self.in_place:
            logger.info("%s: weights are converted after loading; updates reload layer by layer", type(model).__name__)
            for module in model.modules() if pack else ():
                if hasattr(module, _MATRIX):
                    _pack(module, remove_weight=getattr(module, _MATRIX))

    # -- update

    def begin(self) -> None:
        """Make room for new weights."""
        if self.in_place:
            self._allocate()
            return
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def load(self, bucket: Iterable[Named]) -> None:
        """Write some of the new weights.

        Raises:
            WeightSyncError: vLLM has no place for one of them.
        """
        known: list[Named] = []
        for name, tensor in bucket:
            if self.in_place and self.names_of(name)[0] not in self._places:
                self._note(name, tensor, write=True)
            else:
                known += self._for_vllm(name, tensor)
        if known:
            self.model.load_weights(known)
        if not self.in_place:
            self._keep_pending()

    @torch.no_grad()
    def parts(self, names: Iterable[str]) -> dict[str, list[WeightPart]] | None:
        """Between :meth:`begin` and :meth:`end`: the memory of this rank's part of each weight.

        vLLM's own loaders say what goes where. Memory that no part fills, such as the padding of a vocabulary, is 0.

        Returns:
            Parts by name; None where a weight is converted, or changed on its way.
        """
        if not self.in_place:
            return None
        tensors = self._tensors()
        found: dict[str, list[WeightPart]] = {}
        filled = dict.fromkeys(tensors, 0)
        for name in names:
            key = self.names_of(name)[0]
            if key not in self._places:
                self._note_shape(name)
            places = self._places[key]
            boxes = [box_of(place, self.manifest.shape_of(name)) for place in places or ()]
            if places is None or None in boxes:
                return None
            found[name] = []
            for place, box in zip(places, boxes, strict=True):
                assert box is not None
                owner = tensors[place.owner].detach()
                memory = owner.as_strided(place.size, place.stride, owner.storage_offset() + place.offset)
                found[name].append(WeightPart(*box, memory))
                filled[place.owner] += memory.numel()
        for owner_name, tensor in tensors.items():
            if 0 < filled[owner_name] < tensor.numel():
                tensor.detach().zero_()
        return found

    def owner_of(self, name: str) -> str | None:
        """vLLM's name of the parameter that a weight is a part of; None where it is changed on its way."""
        key = self.names_of(name)[0]
        if key not in self._places:
            self._note_shape(name)
        places = self._places[key]
        return places[0].owner if places else None

    @torch.no_grad()
    def end(self) -> None:
        """Make the new weights those that generation uses."""
        if self.in_place:
            for module in self._matrices:
                if not _pack(module, remove_weight=False):
                    continue
                self._packed_bytes += _weight(module).nbytes
                if module in self._packed_only:
                    _weight(module).untyped_storage().resize_(0)
            return
        self._finish_reload()
        for module in self._matrices:
            # a head that shares the embedding's matrix brings no weight of its own, and the reload passes it by
            if module not in self._packed_only:
                _pack(module, remove_weight=False)

    def cancel(self) -> None:
        """Leave a failed update; the weights are unusable until the next complete one."""
        if not self.in_place:
            self._finish_reload()

    def _finish_reload(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def _note_shape(self, name: str) -> None:
        """Find out where one weight goes; the loaders look at shapes only while nothing is written."""
        self._note(name, torch.empty(self.manifest.shape_of(name), dtype=self.dtype), write=False)

    def _note(self, name: str, tensor: torch.Tensor, *, write: bool) -> None:
        """Find out where one weight goes, and load it there if it is to be written."""
        source = tensor.contiguous()
        owners: dict[int, tuple[str, Any]] = {}
        for owner, item in self._tensors().items():
            owners.setdefault(item.untyped_storage()._cdata, (owner, item.storage_offset()))
        loaded: set[str] = set()
        with CopyRecorder(owners, source, write=write) as recorder:
            for piece in self._for_vllm(name, source):
                loaded |= set(self.model.load_weights([piece]) or ())
        if not recorder.places and not loaded:
            raise WeightSyncError(
                f"vLLM's {type(self.model).__name__} has no place for weight {name!r}; it serves the model in another "
                "form than Transformers trains it"
            )
        self._places[self.names_of(name)[0]] = tuple(recorder.places) if recorder.plain else None

    def _for_vllm(self, name: str, tensor: torch.Tensor) -> list[Named]:
        """A weight for every place that vLLM has for it; one place even for tied weights, unless it keeps two."""
        names = self.names_of(name) if self._ties_apart else (name,)
        return [item for other in names for item in self.manifest.as_in_checkpoint(other, tensor)]

    def _keep_pending(self) -> None:
        """Copy what vLLM holds back until a layer is complete: the source may reuse its memory after the call."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self.model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta and not hasattr(value, _KEPT):
                        bound.arguments[key] = kept = value.clone()
                        setattr(kept, _KEPT, True)

    # -- comparison

    @torch.no_grad()
    def digests(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per weight of what generation uses on this rank, or of the same part of ``source``.

        Packed matrices are read back by multiplying them with the identity. Weights that vLLM changes on their way
        are left out.

        Raises:
            WeightSyncError: the model's weights are converted after loading, so there is nothing to compare.
        """
        if not self.in_place:
            raise WeightSyncError(
                f"{type(self.model).__name__} converts its weights after loading; its checksums cannot be compared "
                "with the trainer's: unset VERL_SYNC_CHECK"
            )
        found: dict[str, str] = {}
        if source is not None:
            for name, tensor in source.items():
                key = self.names_of(name)[0]
                if key not in self._places:
                    self._note(name, tensor.detach(), write=False)
                places = self._places[key]
                if places and key not in found:
                    whole = tensor.detach().contiguous()
                    start = whole.storage_offset()
                    parts = [whole.as_strided(p.size, p.source_stride, start + p.source_offset) for p in places]
                    found[key] = digest(parts, self.dtype)
            return found
        tensors = self._tensors()
        packed = {id(module.weight): module for module in self._matrices}
        owner = ""
        whole = torch.empty(0)
        for key, noted in self._places.items():
            parts = []
            for place in noted or ():
                if place.owner != owner:
                    tensor = tensors[place.owner]
                    module = packed.get(id(tensor))
                    owner = place.owner
                    whole = tensor.detach() if module is None else self._read_back(module)
                parts.append(whole.as_strided(place.size, place.stride, whole.storage_offset() + place.offset))
            if parts:
                found[key] = digest(parts, self.dtype)
        return found

    def _read_back(self, module: nn.Module) -> torch.Tensor:
        """A packed matrix; of a head that shares the embedding's, only if both are the same."""
        whole = _unpack(module)
        if module not in self._packed_only and not torch.equal(whole, _weight(module)):
            return torch.full_like(whole, torch.nan)
        return whole

    # -- memory

    def nbytes(self) -> int | None:
        """Bytes of weights held now, packed matrices counted at their plain size; None where vLLM does not say."""
        return sum(storage.nbytes() for storage, _ in self._storages) + self._packed_bytes if self.in_place else None

    def release(self) -> bool:
        """Give the memory of all weights back, without their values; whether that was possible."""
        if not self.in_place:
            return False
        self._drop_packed()
        for storage, _ in self._storages:
            storage.resize_(0)
        return True

    def _allocate(self) -> None:
        self._drop_packed()
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def _drop_packed(self) -> None:
        for module in self._matrices:
            setattr(module, _MULTIPLY, nn.functional.linear)
        self._packed_bytes = 0

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by vLLM's names."""
        return dict(self.model.state_dict(keep_vars=True))


# ---------------------------------------------------------------------------- packed matrices

#: marks a layer whose matrix vLLM would have packed; the value says whether it would have dropped the plain form
_MATRIX = "_verl_matrix"
_KEPT = "_verl_kept"
#: what vLLM's layers call on CPUs: multiply(x, weight, bias)
_MULTIPLY = "cpu_linear"


@contextlib.contextmanager
def deferred_packing() -> Iterator[None]:
    """Models that vLLM builds inside keep plain matrices (CPU); :class:`ModelWeights` packs them after each update."""
    from vllm.model_executor.layers import utils

    def keep_plain(layer: nn.Module, remove_weight: bool) -> None:
        setattr(layer, _MULTIPLY, nn.functional.linear)
        if _weight(layer).dim() == 2:
            setattr(layer, _MATRIX, remove_weight)
        else:  # not a matrix: vLLM's own form, which only its reload can update
            original(layer, remove_weight)

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep_plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def _pack(module: nn.Module, *, remove_weight: bool) -> bool:
    """Let vLLM pack a matrix; whether it did. It has no packed form for every data type on every processor."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    weight = _weight(module)
    dispatch_cpu_unquantized_gemm(module, remove_weight)
    try:
        getattr(module, _MULTIPLY)(weight.new_zeros(1, weight.shape[1]), weight.new_empty(0), None)
    except (RuntimeError, IndexError):  # it multiplies with the plain matrix that it is given
        return False
    return True


def _unpack(module: nn.Module) -> torch.Tensor:
    """The matrix that a packed layer multiplies with."""
    weight = _weight(module)
    rows, columns = weight.shape
    product: torch.Tensor = getattr(module, _MULTIPLY)(torch.eye(columns, dtype=weight.dtype), weight, None)
    return product.t().contiguous().reshape(rows, columns)


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight)


def _is_converted(module: nn.Module) -> bool:
    """Whether vLLM turns a layer's weights into another form after loading them."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if isinstance(module, MLAAttention):
        return True
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    weight = getattr(module, "weight", None)
    plain = isinstance(weight, torch.Tensor) and (weight.dim() == 2 or weight.device.type != "cpu")
    return type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) or not plain


def _is_embedding(module: nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _has_own_head(model: nn.Module) -> bool:
    """Whether the output head is a matrix of its own, also where the policy's is tied to the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    looked_up = {id(module.weight) for module in model.modules() if _is_embedding(module)}
    return any(isinstance(m, ParallelLMHead) and id(m.weight) not in looked_up for m in model.modules())

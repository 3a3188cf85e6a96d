"""The module that generates, and where its weights live."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from verl.errors import ConfigError, WeightSyncError
from verl.models.lora import LoraSettings, attach_adapters, is_adapter_name
from verl.workers.rollout.hf.attention import ATTENTION_NAME, keep_last_hidden, register_attention
from verl.workers.rollout.types import WeightPart

logger = logging.getLogger(__name__)

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get parameters without memory, but real buffers.

    Buffers such as rotary frequencies are computed by the constructors and come with no checkpoint, so they must be
    real; parameters are assigned later.
    """
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def require_served_layers(config: Any) -> None:
    """Refuse a model with layers that this engine does not have.

    Raises:
        ConfigError: naming the kinds of layers.
    """
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise ConfigError(
            f"model type {config.model_type!r} has {', '.join(sorted(kinds))} layers, which rollout.name=hf does not "
            f"serve; it serves {', '.join(sorted(_SERVED_LAYER_TYPES))}"
        )


def build_module(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    lora: LoraSettings | None = None,
) -> nn.Module:
    """A causal language model without weights that generates through :mod:`~verl.workers.rollout.hf.attention`.

    Args:
        config: a Transformers configuration.
        dtype: of the parameters.
        device: of the buffers.
        trust_remote_code: build classes that come with the model.
        lora: the adapter that its layers get.

    Raises:
        ConfigError: the architecture needs attention that this engine does not have, or has no layer for the adapter.
    """
    from verl.models.loading import language_model_class

    register_attention()
    require_served_layers(config)
    try:
        with parameters_on_meta():
            module: nn.Module = language_model_class(config).from_config(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, KeyError) as error:  # KeyError: old code that looks the attention up by name
        raise ConfigError(f"model type {config.model_type!r} cannot be built for rollout.name=hf: {error}") from error
    if not getattr(module, "_supports_attention_backend", False):
        raise ConfigError(
            f"model type {config.model_type!r} does not let its attention be replaced (it has no AttentionInterface "
            "in Transformers), so rollout.name=hf cannot serve it"
        )
    head = module.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ConfigError(f"model type {config.model_type!r} has no output embeddings; it cannot generate text")
    head.register_forward_pre_hook(keep_last_hidden)
    if lora is not None:
        attach_adapters(module, lora)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
    return module.eval().requires_grad_(False)


@dataclass
class _Weight:
    """One tensor of the model; tied parameters are one weight with several names.

    Attributes:
        names: all its names, the first one for messages.
        slots: (module, attribute) pairs to assign.
        shape, dtype: what the module expects.
        persistent_buffer: a buffer that belongs to checkpoints.
        owned: the engine's own copy, None when the source is read in place.
        live: the source's tensor that ``owned`` was cast from and can be cast from again.
    """

    names: list[str]
    slots: list[tuple[nn.Module, str]]
    shape: torch.Size
    dtype: torch.dtype
    persistent_buffer: bool
    owned: torch.Tensor | None = None
    live: torch.Tensor | None = None
    current: torch.Tensor | None = field(default=None, repr=False)

    @property
    def of_adapter(self) -> bool:
        """Whether it belongs to a low-rank adapter, and not to the base model."""
        return is_adapter_name(self.names[0])

    def assign(self, tensor: torch.Tensor) -> None:
        self.current = tensor
        for module, attribute in self.slots:
            if self.persistent_buffer:
                module._buffers[attribute] = tensor
            else:
                module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)


class ModuleWeights:
    """Assigns weights to a module: in place of a copy wherever the source's tensor can be read directly.

    Args:
        module: from :func:`build_module`.
        dtype: dtype of the parameters.
        device: where they live.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._weights = _find_weights(module, dtype)
        self._by_name = {name: weight for weight in self._weights for name in weight.names}
        self._received: dict[int, torch.Tensor] | None = None
        self.complete = False
        #: the weights of the base model are there, or can be read again; an update may then bring the adapter alone
        self.base_held = False
        self._has_adapter = any(weight.of_adapter for weight in self._weights)

    @property
    def names(self) -> list[str]:
        """All names that are accepted; tied weights under each of their names."""
        return list(self._by_name)

    def begin(self) -> None:
        """Start an update; until :meth:`end` the weights count as incomplete."""
        if self._received is not None:
            raise WeightSyncError("a weight update is already running; end it before beginning another")
        self._received = {}
        self.complete = False

    def load(self, bucket: Iterable[tuple[str, torch.Tensor]], *, live: bool) -> None:
        """Take weights; see :meth:`RolloutEngine.load`."""
        if self._received is None:
            raise WeightSyncError("weights arrived outside of an update; call begin_update first")
        for name, tensor in bucket:
            weight = self._find(name)
            tensor = tensor.detach()
            if tensor.shape != weight.shape:
                raise WeightSyncError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the rollout expects {tuple(weight.shape)}; "
                    "a source must deliver whole, unsharded tensors"
                )
            if not weight.of_adapter:
                self.base_held = False
            before = self._received.get(id(weight))
            if before is not None:  # the second name of a tied weight
                if before.data_ptr() != tensor.data_ptr() and not torch.equal(before, tensor.to(before)):
                    raise WeightSyncError(
                        f"{' and '.join(weight.names)} are tied in the rollout but arrived with different values; "
                        "check tie_word_embeddings of the model configuration"
                    )
                continue
            self._store(weight, tensor, live=live)
            # what a stream gives is only valid now, and would take the memory of a second model if it were kept
            assert weight.current is not None
            self._received[id(weight)] = tensor if live else weight.current

    def parts(self, names: Iterable[str]) -> dict[str, list[WeightPart]]:
        """Own memory for each of these weights, whole, to be written during an update; then call :meth:`note`."""
        found = {}
        for name in names:
            weight = self._find(name)
            found[name] = [WeightPart((0,) * len(weight.shape), tuple(weight.shape), self._own(weight))]
        return found

    def note(self, names: Iterable[str]) -> None:
        """The memory of these weights is written."""
        if self._received is None:
            raise WeightSyncError("weights were written outside of an update; call begin_update first")
        for name in names:
            weight = self._find(name)
            self.base_held &= weight.of_adapter
            weight.live = None
            own = self._own(weight)
            if weight.current is not own:
                weight.assign(own)
            self._received[id(weight)] = own

    def end(self) -> None:
        """Finish the update.

        Raises:
            WeightSyncError: weights are missing.
        """
        if self._received is None:
            raise WeightSyncError("no weight update is running; call begin_update first")
        adapter_only = self._has_adapter and self.base_held
        expected = [weight for weight in self._weights if weight.of_adapter or not adapter_only]
        missing = [weight.names[0] for weight in expected if id(weight) not in self._received]
        self._received = None
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeightSyncError(
                f"{len(missing)} of {len(expected)} weights did not arrive: {', '.join(missing[:5])}{more}; "
                "the rollout stays without usable weights until a complete update"
            )
        if adapter_only:
            self.restore()  # of the base weights
        self.base_held = self.complete = True

    def cancel(self) -> None:
        """Leave a failed update; the weights stay incomplete."""
        self._received = None

    def _store(self, weight: _Weight, tensor: torch.Tensor, *, live: bool) -> None:
        same = tensor.dtype == weight.dtype and tensor.device == self.device
        if live and same:
            weight.owned = weight.live = None
            # always a new Parameter: the source may have replaced its storage
            if weight.current is None or weight.current.data_ptr() != tensor.data_ptr():
                weight.assign(tensor)
            return
        weight.live = tensor if live else None
        own = self._own(weight)
        own.copy_(tensor)
        if weight.current is not own:
            weight.assign(own)

    def _own(self, weight: _Weight) -> torch.Tensor:
        """The engine's own memory for a weight, without values at first."""
        if weight.owned is None or weight.owned.device != self.device:
            weight.owned = torch.empty(weight.shape, dtype=weight.dtype, device=self.device)
        return weight.owned

    def _find(self, name: str) -> _Weight:
        weight = self._by_name.get(name)
        if weight is None:
            near = [known for known in self._by_name if known.endswith(name.rsplit(".", 2)[-1])][:2]
            raise WeightSyncError(
                f"unexpected weight {name!r}: the rollout's {type(self.module).__name__} has no such parameter "
                f"(similar ones: {near}); both sides must be built from the same model configuration"
            )
        return weight

    def release(self) -> None:
        """Give back memory of own copies: what can be cast again is dropped, the rest moves to the host."""
        for weight in self._weights:
            if weight.owned is None:
                continue
            if weight.live is not None:
                weight.owned = None
                weight.assign(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
            elif self.device.type != "cpu":
                weight.owned = weight.owned.to("cpu")
                weight.assign(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))

    def restore(self) -> None:
        """Undo :meth:`release`."""
        for weight in self._weights:
            if weight.owned is None and weight.live is not None:
                weight.owned = weight.live.to(device=self.device, dtype=weight.dtype, copy=True)
                weight.assign(weight.owned)
            elif weight.owned is not None and weight.owned.device != self.device:
                weight.owned = weight.owned.to(self.device)
                weight.assign(weight.owned)

    def nbytes(self) -> tuple[int, int]:
        """Bytes of (own copies on the engine's device, weights read in place)."""
        owned = sum(w.owned.nbytes for w in self._weights if w.owned is not None and w.owned.device == self.device)
        aliased = sum(
            w.current.nbytes for w in self._weights if w.owned is None and w.live is None and w.current is not None
        )
        return owned, aliased

    def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per name of what is loaded, or of ``source`` cast as this module stores it."""
        if source is None:
            found = {weight.names[0]: weight.current for weight in self._weights if weight.current is not None}
            return {name: _digest(tensor) for name, tensor in found.items()}
        digests: dict[str, str] = {}
        for name, tensor in source.items():
            if name not in self._by_name:
                raise WeightSyncError(f"unexpected weight {name!r} in the checksum comparison")
            weight = self._by_name[name]
            digests.setdefault(weight.names[0], _digest(tensor.detach().to(weight.dtype)))
        return digests


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()


def _find_weights(module: nn.Module, dtype: torch.dtype) -> list[_Weight]:
    """The module's parameters and persistent buffers, tied ones together."""
    owners = dict(module.named_modules())
    tied = dict(getattr(module, "all_tied_weights_keys", None) or {})
    keep_fp32 = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        keep_fp32 |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    weights: dict[Any, _Weight] = {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    identity = {name: id(parameter) for name, parameter in parameters}
    for name, parameter in parameters:
        key = identity.get(tied.get(name, name), id(parameter))
        owner, _, attribute = name.rpartition(".")
        weight = weights.get(key)
        if weight is None:
            wanted = parameter.dtype
            if wanted.is_floating_point and _mentions(name, keep_fp32):
                wanted = torch.float32
            weight = weights[key] = _Weight([], [], parameter.shape, wanted, False)
        weight.names.append(name)
        weight.slots.append((owners[owner], attribute))
    for owner_name, owner_module in owners.items():
        for attribute, buffer in owner_module._buffers.items():
            if buffer is None or attribute in owner_module._non_persistent_buffers_set:
                continue
            name = f"{owner_name}.{attribute}" if owner_name else attribute
            wanted = torch.float32 if buffer.is_floating_point() and _mentions(name, keep_fp32) else buffer.dtype
            weights[name] = _Weight([name], [(owner_module, attribute)], buffer.shape, wanted, True)
    return list(weights.values())


def _mentions(name: str, keys: set[str]) -> bool:
    return any(re.search(rf"(^|\.){re.escape(key)}(\.|$)", name) for key in keys)

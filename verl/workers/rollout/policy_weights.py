"""The weights of a model by their Hugging Face names, and where an engine's own loaders put them.

Engines fuse projections (q, k and v become one matrix) and split them over tensor-parallel ranks; only their loaders
know how. :class:`WeightManifest` checks what arrives before a loader sees it, :class:`CopyRecorder` notes where it
goes, so that it can be read back and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl.errors import ConfigError, WeightSyncError
from verl.models.lora import LoraSettings, adapter_shapes, is_adapter_name

Named = tuple[str, torch.Tensor]


def split_adapter(bucket: Iterable[Named]) -> tuple[list[Named], list[Named]]:
    """Weights of the model, and matrices of its adapter."""
    weights: list[Named] = []
    adapter: list[Named] = []
    for item in bucket:
        (adapter if is_adapter_name(item[0]) else weights).append(item)
    return weights, adapter


@dataclass(frozen=True, slots=True)
class LiveWeight:
    """A weight of the training engine that stays readable, and how often it had been written to when it was read."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LiveWeight:
        """The weight as it is now."""
        return cls(tensor, _version_of(tensor))

    @property
    def unchanged(self) -> bool:
        """Whether nobody wrote to it since."""
        return _version_of(self.tensor) == self.version


def _version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------- which weights there are


@dataclass(frozen=True)
class _Expected:
    """One weight of the model; tied parameters are one weight with several names."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype


class WeightManifest:
    """The weights that an update consists of, from the model's Hugging Face configuration.

    Args:
        config: a Transformers configuration.
        dtype: of the weights in generation.
        trust_remote_code: build classes that come with the model.
        lora: the adapter that comes beside the weights; None: they come merged, or there is none.

    Raises:
        ConfigError: Transformers cannot build the model, or it has no layer for the adapter.
    """

    def __init__(
        self, config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False, lora: LoraSettings | None = None
    ) -> None:
        from verl.models.loading import language_model_class

        try:
            with torch.device("meta"):
                module = language_model_class(config).from_config(
                    config, dtype=dtype, trust_remote_code=trust_remote_code
                )
        except (ValueError, KeyError) as error:
            raise ConfigError(f"model type {config.model_type!r} cannot be built: {error}") from error
        #: name of the model's class
        self.architecture = type(module).__name__
        groups: dict[Any, list[Named]] = {}
        tied = dict(getattr(module, "all_tied_weights_keys", None) or {})
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, tensor in parameters.items():
            groups.setdefault(id(parameters[tied.get(name, name)]), []).append((name, tensor))
        for name, tensor in module.state_dict().items():
            if name not in parameters:  # buffers that belong to checkpoints
                groups[name] = [(name, tensor)]
        self._weights = [
            _Expected(tuple(name for name, _ in group), group[0][1].shape, group[0][1].dtype)
            for group in groups.values()
        ]
        #: whole adapter matrices by name
        self.adapter: dict[str, torch.Size] = {} if lora is None else adapter_shapes(module, lora)
        self._adapter = [_Expected((name,), shape, dtype) for name, shape in self.adapter.items()]
        self._by_name = {name: weight for weight in self._weights + self._adapter for name in weight.names}
        self._received: dict[tuple[str, ...], torch.Tensor] = {}
        self._module = module
        #: weights that checkpoints hold under other names or in several pieces
        self._converted = {
            weight.names[0]
            for group in groups.values()
            for weight in (self._by_name[group[0][0]],)
            if [name for name, _ in _as_in_checkpoint(module, *group[0])] != [group[0][0]]
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, unsplit, and of the adapter."""
        return sum(weight.shape.numel() * weight.dtype.itemsize for weight in self._weights + self._adapter)

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a weight, the one for messages and checksums first.

        Raises:
            WeightSyncError: there is no such weight.
        """
        if name not in self._by_name:
            near = [known for known in self._by_name if known.endswith(name.rsplit(".", 2)[-1])][:2]
            raise WeightSyncError(
                f"unexpected weight {name!r}: the rollout's model has no such parameter (similar ones: {near}); both "
                "sides must be built from the same model configuration"
            )
        return self._by_name[name].names

    def dtype_of(self, name: str) -> torch.dtype:
        """The type that generation has a weight in."""
        self.names_of(name)
        return self._by_name[name].dtype

    def as_in_checkpoint(self, name: str, tensor: torch.Tensor) -> list[Named]:
        """A weight as checkpoints hold it, which is the form that engines read: experts one by one, for example."""
        if self.names_of(name)[0] not in self._converted:
            return [(name, tensor)]
        return _as_in_checkpoint(self._module, name, tensor)

    def begin(self) -> None:
        """Forget what arrived before."""
        self._received = {}

    def accept(self, bucket: Iterable[Named], *, live: bool = True) -> Iterator[Named]:
        """Check weights and pass them on; the second name of a tied weight is left out.

        Args:
            bucket: names and tensors.
            live: the tensors stay valid, so that the two of a tied weight can be compared.

        Raises:
            WeightSyncError: an unknown name, a wrong shape, or tied weights that differ.
        """
        for name, tensor in bucket:
            names = self.names_of(name)
            tensor = tensor.detach()
            expected = self._by_name[name]
            if tensor.shape != expected.shape:
                raise WeightSyncError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the rollout expects {tuple(expected.shape)}; "
                    "a source must deliver whole, unsharded tensors"
                )
            if names in self._received:
                before = self._received[names]
                comparable = before.numel() and before.data_ptr() != tensor.data_ptr()
                if comparable and not torch.equal(before.to(tensor), tensor):
                    raise WeightSyncError(
                        f"{' and '.join(names)} are tied in the rollout but arrived with different values; check "
                        "tie_word_embeddings of the model configuration"
                    )
                continue
            # only tied weights are compared later; holding the others would keep every bucket alive
            self._received[names] = tensor if live and len(names) > 1 else tensor.new_empty(0)
            yield name, tensor

    def shape_of(self, name: str) -> torch.Size:
        """Shape of a whole weight."""
        self.names_of(name)
        return self._by_name[name].shape

    def note(self, names: Iterable[str]) -> None:
        """Weights that arrived without passing through :meth:`accept`."""
        for name in names:
            self._received[self.names_of(name)] = torch.empty(0)

    def without_adapter(self) -> None:
        """Expect merged weights from now on."""
        self.adapter = {}
        self._adapter = []
        self._by_name = {name: weight for weight in self._weights for name in weight.names}

    def end(self, *, adapter_only: bool = False) -> None:
        """Check that everything arrived.

        Args:
            adapter_only: the weights are there already.

        Raises:
            WeightSyncError: weights are missing.
        """
        expected = self._adapter if adapter_only else self._weights + self._adapter
        missing = [weight.names[0] for weight in expected if weight.names not in self._received]
        self._received = {}
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeightSyncError(
                f"{len(missing)} of {len(expected)} weights did not arrive: {', '.join(missing[:5])}{more}; "
                "the rollout stays without usable weights until a complete update"
            )


def _as_in_checkpoint(module: Any, name: str, tensor: torch.Tensor) -> list[Named]:
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(module, {name: tensor}).items())


# ---------------------------------------------------------------------------- where a weight lies


@dataclass(frozen=True)
class Place:
    """Where a part of a weight went: a view of one of the engine's parameters, and of the source that filled it.

    Attributes:
        owner: name of the parameter.
        size, stride, offset: of the view within the parameter.
        source_stride, source_offset: of the view within the contiguous source.
    """

    owner: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source_stride: tuple[int, ...]
    source_offset: int


def box_of(place: Place, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The box of a contiguous weight that a place was filled from, as (start, stop); None when it is none.

    Args:
        place: of one of the weight's parts.
        shape: of the whole weight.
    """
    strides = torch.empty(tuple(shape), device="meta").stride()
    if len(place.size) != len(shape) or any(
        size > 1 and mine != whole for size, mine, whole in zip(place.size, place.source_stride, strides, strict=True)
    ):
        return None
    start, rest = [], place.source_offset
    for stride, size in zip(strides, shape, strict=True):
        index = rest // stride if size > 1 else 0
        rest -= index * stride
        start.append(index)
    stop = tuple(first + length for first, length in zip(start, place.size, strict=True))
    if rest or any(end > size for end, size in zip(stop, shape, strict=True)):
        return None
    return tuple(start), stop


class CopyRecorder(TorchDispatchMode):
    """Notes every copy from a source's memory into a parameter while a weight loader runs.

    Args:
        owners: a parameter's storage -> its name and where it starts.
        source: what is loaded.
        write: let the copies happen.
    """

    def __init__(self, owners: Mapping[int, tuple[str, Any]], source: torch.Tensor, *, write: bool) -> None:
        super().__init__()
        self.owners = owners
        self.write = write
        self.source = source.untyped_storage().data_ptr()
        self.start = source.storage_offset()
        self.places: list[Place] = []
        self.plain = True  # False: a value was changed on its way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, value = args[0], args[1]
            owner = self.owners.get(into.untyped_storage()._cdata)
            if owner is not None:
                same = value.untyped_storage().data_ptr() == self.source and value.shape == into.shape
                self.plain &= same
                name, start = owner
                self.places.append(
                    Place(
                        name,
                        tuple(into.shape),
                        into.stride(),
                        into.storage_offset() - start,
                        value.stride(),
                        value.storage_offset() - self.start,
                    )
                )
                if not self.write:
                    return into
        return func(*args, **(kwargs or {}))


def digest(parts: Iterable[torch.Tensor], dtype: torch.dtype) -> str:
    """One digest of tensors in a row, as values of ``dtype``; -0 counts as 0."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        # adding 0 turns -0 into 0, a difference that multiplication with a packed matrix does not keep
        raw = part.detach().to(dtype).add(0).contiguous().reshape(-1).view(torch.uint8)
        state.update(raw.cpu().numpy().tobytes())
    return state.hexdigest()

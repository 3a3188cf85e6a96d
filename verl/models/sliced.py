"""Loading without ever holding the whole model: parameters without memory first, then each rank's slices of the files.

``from_pretrained`` reads all parameters into host memory on every rank before they are sharded. Here the model is
built with parameters on the meta device and sharded; the shards get memory, and their slices are read from the
safetensors files. What this does not cover is loaded the plain way, with the same result.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: (file, name of the tensor in it)
Place = tuple[Path, str]


class DeferredWeights:
    """Where the parameters of a model without memory are to be read from; empty where the model has its values.

    Attributes:
        places: parameter name -> place; None: no file has it, and it begins at 0.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place | None] = {}

    def __bool__(self) -> bool:
        return bool(self.places)

    def materialise(
        self, module: nn.Module, parameters: Callable[[], Mapping[str, Tensor]], device: torch.device
    ) -> None:
        """Give parameters memory and values. Each rank reads its own slices; no rank waits for another.

        Args:
            module: with parameters on the meta device, whole or sharded by FSDP2.
            parameters: gives them by the names of :attr:`places`.
            device: of their memory.

        Raises:
            ConfigError: a file cannot be read.
        """
        ties = _ties(module)
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        for first, others in ties:  # each module got a parameter of its own
            for owner, key in others:
                owner._parameters[key] = first[0]._parameters[first[1]]
        live = parameters()
        by_file: dict[Path, list[tuple[Tensor, str]]] = {}
        with torch.no_grad():
            for name, place in self.places.items():
                if place is None:
                    local_part(live[name]).zero_()
                else:
                    by_file.setdefault(place[0], []).append((live[name], place[1]))
            for file, wanted in by_file.items():
                try:
                    with safe_open(file, framework="pt") as reader:
                        for tensor, key in wanted:
                            local = local_part(tensor)
                            if local.numel():
                                local.copy_(reader.get_slice(key)[_slices(tensor)])
                except (OSError, SafetensorError) as error:
                    raise ConfigError(f"cannot read {file}: {error}; model.path must hold complete files") from error


def build_deferred(
    model_class: Any,
    directory: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, dict[str, Place | None], list[str]] | None:
    """A model without memory for its parameters.

    Args:
        model_class: an ``AutoModel`` class or a model class.
        directory: the model's files.
        config: the model's configuration, with its attention chosen.
        dtype: of the parameters.
        trust_remote_code: build classes that come with the model.

    Returns:
        The model, where each parameter is (None: in no file), and the names of the latter. None where the files are
        not safetensors, or hold the model in another form than it computes with.
    """
    files = weight_files(directory)
    if files is None or getattr(config, "quantization_config", None) is not None:
        return None
    options = {"dtype": dtype, "attn_implementation": config._attn_implementation}
    with parameters_on_meta():
        if hasattr(model_class, "from_config"):
            model = model_class.from_config(config, trust_remote_code=trust_remote_code, **options)
        else:
            model = model_class._from_config(config, **options)
    keeps_float32 = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    if get_model_conversion_mapping(model, add_legacy=False) or (keeps_float32 and dtype != torch.float32):
        return None
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    places: dict[str, Place | None] = {}
    missing: list[str] = []
    for name, parameter in model.named_parameters():
        place = _find(files, aliases[id(parameter)], model.base_model_prefix)
        if place is None:
            missing.append(name)
        elif _shape(place) != list(parameter.shape):
            return None
        places[name] = place
    for name, buffer in model.state_dict().items():
        if buffer.is_meta:
            continue
        place = _find(files, [name], model.base_model_prefix)
        if place is None:
            return None
        with safe_open(place[0], framework="pt") as reader:
            buffer.copy_(reader.get_tensor(place[1]))
    with contextlib.suppress(OSError):  # most models have none
        model.generation_config = GenerationConfig.from_pretrained(directory)
    model.eval()
    return model, places, missing


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have parameters without memory; their buffers are real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def weight_files(directory: Path) -> dict[str, Path] | None:
    """Tensor name -> file; None where the weights are not safetensors."""
    try:
        if (directory / INDEX).is_file():
            table = json.loads((directory / INDEX).read_text("utf-8"))["weight_map"]
            return {name: directory / file for name, file in table.items()}
        if (directory / SINGLE).is_file():
            with safe_open(directory / SINGLE, framework="pt") as reader:
                return dict.fromkeys(reader.keys(), directory / SINGLE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        logger.info("%s: %s; loading the plain way, which says what is wrong", directory, error)
    return None


def _find(files: Mapping[str, Path], names: list[str], prefix: str) -> Place | None:
    """The first of a tensor's names that a file has; files of a backbone alone lack its prefix."""
    for name in names:
        for key in (name, name.removeprefix(f"{prefix}.")):
            if key in files:
                return files[key], key
    return None


def _shape(place: Place) -> list[int]:
    with safe_open(place[0], framework="pt") as reader:
        return list(reader.get_slice(place[1]).get_shape())


Slot = tuple[nn.Module, str]


def _ties(module: nn.Module) -> list[tuple[Slot, list[Slot]]]:
    """Where a parameter is registered more than once: its first slot and the others."""
    slots: dict[int, list[Slot]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((owner, key))
    return [(found[0], found[1:]) for found in slots.values() if len(found) > 1]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, gradient or optimizer state, aliasing it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _slices(tensor: Tensor) -> tuple[slice, ...]:
    """The part of a whole tensor that this rank has; FSDP2 cuts like ``torch.chunk``."""
    whole = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(whole)
    local = tensor._local_tensor.shape
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            chunk = -(-tensor.shape[dim] // tensor.device_mesh.size(axis))
            start = min(coordinate[axis] * chunk, tensor.shape[dim])
            whole[dim] = slice(start, start + local[dim])
    return tuple(whole)

"""Low-rank adapters (LoRA, arXiv:2106.09685): train a few parameters beside frozen weights.

A linear layer computes ``x W^T + s (x A^T) B^T`` with A (r, in), B (out, r) and s = alpha / r. B starts at zero, so
that a fresh adapter changes nothing. The layers are those of the model, turned into :class:`LoraLinear` in place:
parameter names stay, ``lora_A`` and ``lora_B`` are added, and sharding treats them like any other parameter.

Adapters are stored in the format of the PEFT package, which reads them; the package itself is not needed here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from verl.errors import CheckpointError, ConfigError
from verl.utils.json_text import dumps_json
from verl.utils.seeding import derive_seed

if TYPE_CHECKING:
    from verl.config import ModelConfig

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."  # of PEFT's names
_PARTS = ("lora_A", "lora_B")
_VARIANTS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True)
class LoraSettings:
    """Which layers get an adapter, and of what size.

    Attributes:
        rank: r.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: last parts of module names, or one regular expression for the whole name; ``all-linear`` is every
            linear layer but the output embedding.
        exclude: of these, the ones to leave alone.
        init: how A starts: ``kaiming`` (uniform), ``xavier`` (uniform) or ``normal``.
        adapter_path: an adapter to go on from.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    init: str = "kaiming"
    adapter_path: str | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> LoraSettings | None:
        """The settings of a model section; None without adapters."""
        if config.lora_rank == 0:
            return None
        return cls(
            rank=config.lora_rank,
            alpha=float(config.lora_alpha),
            targets=tuple(config.target_modules),
            exclude=tuple(config.exclude_modules),
            init=config.lora_init,
            adapter_path=config.lora_adapter_path,
        )

    @property
    def scaling(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Made by :func:`add_adapters`, never directly."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scaling: float
    enabled: bool

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.adapted(input, linear(input, self.weight, self.bias))

    def adapted(self, input: Tensor, out: Tensor) -> Tensor:
        """The layer's output, from what it gives without its adapter."""
        if self.enabled:
            out = out + linear(linear(input, self.lora_A), self.lora_B) * self.scaling
        return out


def add_adapters(model: nn.Module, settings: LoraSettings, seed: int) -> list[str]:
    """Turn the chosen layers into :class:`LoraLinear` and freeze everything else but a head made for the task.

    Args:
        model: a Transformers model.
        settings: which layers, and how.
        seed: of the run; A depends on it and on the layer's name alone, so that all ranks start alike.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: no layer is chosen, or one that cannot have an adapter.
    """
    chosen = attach_adapters(model, settings)
    task_head = {id(p) for p in getattr(model, "score", nn.Module()).parameters()}  # of critics and reward models
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) in task_head or is_adapter_name(name))
    with torch.no_grad():
        for name, module in chosen.items():
            module.lora_A.copy_(first_matrix(settings, seed, name, module.in_features))
            module.lora_B.zero_()
    if settings.adapter_path:
        load_adapter(model, settings, settings.adapter_path)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    logger.info(
        "LoRA on %d layers: %d of %d parameters (%.2f%%) train", len(chosen), trained, total, 100 * trained / total
    )
    return list(chosen)


def attach_adapters(model: nn.Module, settings: LoraSettings) -> dict[str, LoraLinear]:
    """Turn the chosen layers into :class:`LoraLinear`; the new matrices have no values yet.

    Args:
        model: a Transformers model; where it is without memory, the matrices are too.
        settings: which layers, and of what size.

    Returns:
        The layers by name.

    Raises:
        ConfigError: no layer is chosen, or one that cannot have an adapter.
    """
    chosen = choose_layers(model, settings)
    for module in chosen.values():
        weight = module.weight
        module.__class__ = LoraLinear
        module.scaling, module.enabled = settings.scaling, True
        module.lora_A = nn.Parameter(weight.new_empty(settings.rank, module.in_features))
        module.lora_B = nn.Parameter(weight.new_empty(module.out_features, settings.rank))
    return chosen


def first_matrix(settings: LoraSettings, seed: int, name: str, inputs: int) -> Tensor:
    """(rank, inputs) float32: how A of the layer ``name`` starts."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
    a = torch.empty(settings.rank, inputs, dtype=torch.float32)
    if settings.init == "kaiming":
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    elif settings.init == "xavier":
        nn.init.xavier_uniform_(a, generator=generator)
    else:
        nn.init.normal_(a, std=1 / settings.rank, generator=generator)
    return a


def choose_layers(model: nn.Module, settings: LoraSettings, prefix: str = "") -> dict[str, Any]:
    """The layers of a Transformers model that get an adapter, by name.

    Args:
        model: it may be without memory, on the device ``meta``.
        settings: which layers.
        prefix: of the names, where ``model`` is a part of the whole one.

    Raises:
        ConfigError: no layer is chosen, or one that cannot have an adapter.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = {prefix + name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    candidates = {name: module for name, module in linears.items() if module is not output and name != "score"}
    if settings.targets == (ALL_LINEAR,):
        chosen = set(candidates)
    else:
        chosen = {name for name in linears if _matches(name, settings.targets)}
        if refused := sorted(chosen - candidates.keys()):
            raise ConfigError(
                f"model.target_modules={list(settings.targets)}: {refused[0]} is the output of the model, which gets "
                "no adapter here; name layers inside the blocks, or use all-linear"
            )
    chosen -= {name for name in chosen if _matches(name, settings.exclude)}
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name in candidates})
        raise ConfigError(
            f"model.target_modules={list(settings.targets)} with exclude_modules={list(settings.exclude)} chooses no "
            f"linear layer of {type(model).__name__}; it has {', '.join(known)}"
        )
    return {name: module for name, module in candidates.items() if name in chosen}


def adapter_shapes(model: nn.Module, settings: LoraSettings) -> dict[str, torch.Size]:
    """Shapes of the matrices that :func:`attach_adapters` would give a model, by name.

    Raises:
        ConfigError: no layer is chosen, or one that cannot have an adapter.
    """
    shapes: dict[str, torch.Size] = {}
    for name, layer in choose_layers(model, settings).items():
        shapes[f"{name}.lora_A"] = torch.Size((settings.rank, layer.in_features))
        shapes[f"{name}.lora_B"] = torch.Size((layer.out_features, settings.rank))
    return shapes


def _matches(name: str, patterns: Sequence[str]) -> bool:
    if any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns):
        return True
    return len(patterns) == 1 and re.fullmatch(patterns[0], name) is not None


def adapter_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Layers with an adapter by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in _PARTS


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the context the model computes as without its adapters."""
    layers = list(adapter_layers(model).values())
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The weight of a plain linear layer that computes the same: W + s B A, summed in float32."""
    return (weight.float() + (b.float() @ a.float()) * scaling).to(weight.dtype)


# ---- files of the PEFT format ------------------------------------------------------------------------------------


def save_adapter(tensors: Mapping[str, Tensor], settings: LoraSettings, base_model: str, directory: Path) -> None:
    """Write whole adapter tensors, by their names here, as PEFT reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[0] for name in tensors if is_adapter_name(name)}),
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(dumps_json(config, indent=2) + "\n", "utf-8")
    stored = {
        f"{_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items() if is_adapter_name(name)
    }
    save_file(stored, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(directory: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapter tensors by their names here, and the adapter's config.

    Raises:
        CheckpointError: no adapter there, or one of another kind.
    """
    directory = Path(directory).expanduser()
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text("utf-8"))
        stored = load_file(directory / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"there is no adapter in {directory} ({error}); it needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        ) from error
    special = [key for key in _VARIANTS if config.get(key)]
    if config.get("peft_type") != "LORA" or special:
        raise CheckpointError(
            f"the adapter in {directory} is of kind {config.get('peft_type')} {special or ''}; only plain LoRA is read"
        )
    return {name.removeprefix(_PREFIX).removesuffix(".weight"): tensor for name, tensor in stored.items()}, config


def load_adapter(model: nn.Module, settings: LoraSettings, directory: str | Path) -> None:
    """Fill a model's adapters from a PEFT directory.

    Raises:
        CheckpointError: the adapter has other layers, another rank or another alpha than the model.
    """
    wanted = {name: p for name, p in model.named_parameters() if is_adapter_name(name)}
    tensors = matching_adapter(directory, settings, wanted.keys())
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def matching_adapter(directory: str | Path, settings: LoraSettings, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a PEFT directory, which must be those of ``names`` and of the size that ``settings`` say.

    Raises:
        CheckpointError: it has other layers, another rank or another alpha.
    """
    tensors, config = read_adapter(directory)
    if (config.get("r"), float(config.get("lora_alpha", 0))) != (settings.rank, settings.alpha):
        raise CheckpointError(
            f"the adapter in {directory} has r={config.get('r')}, lora_alpha={config.get('lora_alpha')}; set "
            "model.lora_rank and model.lora_alpha to these"
        )
    if tensors.keys() != set(names):
        different = sorted(tensors.keys() ^ set(names))
        raise CheckpointError(
            f"the adapter in {directory} and model.target_modules differ in {len(different)} tensors, first "
            f"{different[0]!r}; name the layers that the adapter has"
        )
    return tensors

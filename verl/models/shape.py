"""How large a model is, from its ``config.json`` alone: the model is built without memory and counted."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.models.loading import language_model_class, load_hf_config, quiet_transformers
from verl.models.lora import LoraSettings, add_adapters

if TYPE_CHECKING:
    from verl.config import ModelConfig


#: kinds of layers, as a configuration names them, that keep a state of fixed size and nothing per token
_STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "rwkv", "ssm", "mlp", "moe"})


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps per token.

    Attributes:
        heads: key-value heads, which tensor parallelism divides; where there are fewer than ranks, each rank has one.
        width: numbers of keys and values per head. Latent attention has one head, which every rank keeps whole.
    """

    heads: int
    width: int

    def numbers(self, parallel: int = 1) -> int:
        """Numbers on one of ``parallel`` ranks."""
        return -(-self.heads // parallel) * self.width


def cache_layers(config: PreTrainedConfig) -> tuple[CacheLayer, ...]:
    """The layers of a language model that keep keys and values, from its configuration.

    A layer with a sliding window counts like any other: its cache is as large as the others' until the window is full.

    Args:
        config: of Transformers; of a vision-language model the whole or the language model's part.
    """
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    kinds = list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [])
    kinds = kinds[:count] if len(kinds) >= count else ["full_attention"] * count
    # the last layers of some models read what an earlier layer keeps
    own = count - int(getattr(text, "num_kv_shared_layers", None) or 0)
    return tuple(_cache_layer(text, kind) for kind in kinds[:own] if kind not in _STATE_LAYERS)


def _cache_layer(text: PreTrainedConfig, kind: str) -> CacheLayer:
    if getattr(text, "kv_lora_rank", None):  # latent attention keeps one compressed vector and its position
        return CacheLayer(1, int(text.kv_lora_rank) + int(text.qk_rope_head_dim))
    sliding = kind == "sliding_attention"

    def number(name: str, *others: str) -> int | None:
        """The first setting that the configuration has: this kind's own, or that of all layers."""
        names = ([f"swa_{name}"] if sliding else [f"global_{name}", f"num_global_{name.removeprefix('num_')}"]) + [name]
        values = (getattr(text, key, None) for key in (*names, *others))
        return next((int(value) for value in values if isinstance(value, int) and value > 0), None)

    heads = int(text.num_attention_heads)
    width = number("head_dim") or int(text.hidden_size) // heads
    return CacheLayer(number("num_key_value_heads") or heads, width + (number("v_head_dim") or width))


def cached_token_bytes(config: PreTrainedConfig, itemsize: int, *, parallel: int = 1) -> int:
    """Bytes that one token takes in the key-value cache of one rank, over all layers.

    Args:
        config: as for :func:`cache_layers`.
        itemsize: bytes of a number in the cache.
        parallel: ranks that share the model by tensor parallelism.
    """
    return sum(layer.numbers(parallel) for layer in cache_layers(config)) * itemsize


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model.

    Attributes:
        parameters: shape of every parameter, tied ones once.
        trained: of those that training changes: all, or low-rank adapters.
        layer_parameters: numbers in the largest decoder layer.
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: of its text model.
        cache: the layers that keep keys and values.
    """

    parameters: tuple[tuple[int, ...], ...]
    trained: tuple[tuple[int, ...], ...]
    layer_parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    cache: tuple[CacheLayer, ...]

    def cached_token_bytes(self, itemsize: int, *, parallel: int = 1) -> int:
        """:func:`cached_token_bytes` of this model."""
        return sum(layer.numbers(parallel) for layer in self.cache) * itemsize

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.parameters))

    def shard(self, ranks: int, *, trained: bool = False) -> int:
        """Numbers that the first of ``ranks`` holds, with each parameter cut along its first dimension.

        Args:
            ranks: that share the parameters.
            trained: only of those that training changes.
        """
        shapes = self.trained if trained else self.parameters
        return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1 for shape in shapes)


def model_shape(model_config: ModelConfig, head: str) -> ModelShape:
    """Count a model without loading it.

    Args:
        model_config: the ``model`` section.
        head: ``"lm"``, ``"value"`` or ``"classifier"``; the latter two replace the output embedding by one row.

    Raises:
        ConfigError: there is no such model, or its code cannot build it without weights.
    """
    config = load_hf_config(model_config)
    return shape_of(config, head, lora=LoraSettings.of(model_config), trust_remote_code=model_config.trust_remote_code)


def shape_of(
    config: PreTrainedConfig, head: str, *, lora: LoraSettings | None = None, trust_remote_code: bool = False
) -> ModelShape:
    """:func:`model_shape` of a Transformers configuration."""
    try:
        with torch.device("meta"), quiet_transformers():
            model = language_model_class(config).from_config(
                copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"model type {config.model_type!r} cannot be built without its weights: {error}") from error
    if lora is not None:
        add_adapters(model, replace(lora, adapter_path=None), seed=0)
    counted = model if head == "lm" else model.base_model
    shapes = [tuple(parameter.shape) for parameter in counted.parameters()]
    trained = [tuple(parameter.shape) for parameter in counted.parameters() if parameter.requires_grad]
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    if head != "lm":
        row: list[tuple[int, ...]] = [(1, hidden), (1,)] if head == "value" else [(1, hidden)]
        shapes += row
        trained += row
    layers = int(text.num_hidden_layers)
    names = set(model._no_split_modules or ())
    blocks = [module for module in counted.modules() if type(module).__name__ in names]
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0)
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    return ModelShape(
        parameters=tuple(shapes),
        trained=tuple(trained),
        layer_parameters=largest,
        layers=layers,
        hidden=hidden,
        intermediate=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=int(text.vocab_size),
        cache=cache_layers(config),
    )

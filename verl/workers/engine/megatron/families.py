"""Which models the Megatron engine knows: Megatron-core's settings from a Hugging Face config.

A family is described twice, here by its settings and in :mod:`~verl.workers.engine.megatron.weights` by the names of
its weights; both tables are keyed by ``config.model_type``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig

from verl.errors import ConfigError
from verl.models.logprobs import IDENTITY, LogitTransform

#: rotary embeddings whose frequencies do not depend on the length of the sequence at hand
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

#: settings that follow from the parallel sizes or the engine; overriding them would contradict it
_RESERVED = frozenset(
    {
        "bf16",
        "calculate_per_token_loss",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "finalize_model_grads_func",
        "fp16",
        "params_dtype",
        "pipeline_dtype",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "variable_seq_lengths",
        "virtual_pipeline_model_parallel_size",
    }
)

#: settings of Megatron-core's own attention, and why they say nothing here
_PACKED = "chooses a kernel of Megatron-core's attention; here attention is always over packed rows, so leave it out"
_WITHOUT_MEANING = {"attention_backend": _PACKED, "use_flash_attn": _PACKED, "flash_decode": _PACKED}


@dataclass(frozen=True)
class ModelSettings:
    """Everything that building one model needs beyond its weights.

    Attributes:
        transformer: keyword arguments of Megatron-core's ``TransformerConfig`` (``MLATransformerConfig`` with ``mla``).
        vocab_size: rows of the embedding in the Hugging Face model.
        tied: input and output embedding are one.
        mla: multi-head latent attention.
        moe_layers: for each layer whether it has experts; empty for a dense model.
        zero_centered_norm: norms multiply by 1 + weight (Gemma).
        embedding_scale: factor on the embedding's output.
        qk_norm: norms on queries and keys (with ``mla``: on their compressed forms).
        inv_freq: (D/2,) rotary frequencies.
        softmax_scale: factor on the attention scores; None for 1/sqrt(head size).
        windows: for each layer how many tokens one looks back at, itself included; None for all. Empty: all layers.
        attention_softcap: c in c*tanh(x/c) of the attention scores; None for no cap.
        logits: what the model does to its logits.
        norms_around: the outputs of attention and MLP have norms too, before they are added.
        local_inv_freq: frequencies of the layers with a window, where these have others.
    """

    transformer: dict[str, Any]
    vocab_size: int
    tied: bool
    inv_freq: Tensor
    mla: bool = False
    moe_layers: tuple[bool, ...] = ()
    zero_centered_norm: bool = False
    embedding_scale: float = 1.0
    qk_norm: bool = False
    softmax_scale: float | None = None
    windows: tuple[int | None, ...] = ()
    attention_softcap: float | None = None
    logits: LogitTransform = IDENTITY
    norms_around: bool = False
    local_inv_freq: Tensor | None = None


def model_settings(config: PreTrainedConfig) -> ModelSettings:
    """Settings of a model.

    Raises:
        ConfigError: a family, or a variant of one, that this engine does not know.
    """
    make = _FAMILIES.get(config.model_type)
    if make is None:
        raise ConfigError(
            f"the Megatron engine does not know the model type {config.model_type!r}; it knows "
            f"{', '.join(sorted(_FAMILIES))}. Use strategy=fsdp for other models"
        )
    return dataclasses.replace(make(config), windows=_windows(config))


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not window:
        return ()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"layers of type {unknown[0]!r} are not known to the Megatron engine; use strategy=fsdp")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _common(config: PreTrainedConfig, **changes: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"the activation {activation!r} is not known to the Megatron engine (known: "
            f"{', '.join(sorted(_ACTIVATIONS))}); use strategy=fsdp"
        )
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": _ACTIVATIONS[activation],
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": float(getattr(config, "attention_dropout", 0.0) or 0.0),
    }
    return settings | changes


#: silu is named by torch itself, because Megatron-core recognises SwiGLU by it
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def _refuse_bias(config: PreTrainedConfig) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ConfigError(f"{config.model_type} with {name}=True is not known to the Megatron engine; use fsdp")


def _llama(config: PreTrainedConfig) -> ModelSettings:
    _refuse_bias(config)
    inv_freq, scale = rotary_frequencies(config)
    return ModelSettings(
        _common(config), config.vocab_size, config.tie_word_embeddings, inv_freq, softmax_scale=_scaled(config, scale)
    )


def _qwen2(config: PreTrainedConfig) -> ModelSettings:
    inv_freq, scale = rotary_frequencies(config)
    return ModelSettings(
        _common(config, add_qkv_bias=True),
        config.vocab_size,
        config.tie_word_embeddings,
        inv_freq,
        softmax_scale=_scaled(config, scale),
    )


def _qwen3(config: PreTrainedConfig) -> ModelSettings:
    _refuse_bias(config)
    inv_freq, scale = rotary_frequencies(config)
    return ModelSettings(
        _common(config, qk_layernorm=True),
        config.vocab_size,
        config.tie_word_embeddings,
        inv_freq,
        qk_norm=True,
        softmax_scale=_scaled(config, scale),
    )


def _qwen3_moe(config: PreTrainedConfig) -> ModelSettings:
    dense = _qwen3(config)
    only_dense = set(config.mlp_only_layers or ())
    layers = tuple(
        config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0 and layer not in only_dense
        for layer in range(config.num_hidden_layers)
    )
    experts = _expert_settings(
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_layer_freq=[int(has) for has in layers],
        # softmax over all experts, then renormalised over the chosen ones, equals softmax over the chosen ones
        moe_router_pre_softmax=not config.norm_topk_prob,
    )
    return dataclasses.replace(dense, transformer=dense.transformer | experts, moe_layers=layers)


def _gemma(config: PreTrainedConfig) -> ModelSettings:
    _refuse_bias(config)
    inv_freq, _ = rotary_frequencies(config)
    return ModelSettings(
        _common(config, activation_func=_ACTIVATIONS["gelu_pytorch_tanh"]),
        config.vocab_size,
        config.tie_word_embeddings,
        inv_freq,
        zero_centered_norm=True,
        embedding_scale=math.sqrt(config.hidden_size),
    )


def _gemma2(config: PreTrainedConfig) -> ModelSettings:
    """Gemma 2: norms around blocks, windows in every other layer, soft caps on attention scores and logits."""
    _refuse_bias(config)
    _refuse_bidirectional(config)
    inv_freq, scale = rotary_frequencies(config)
    return _gemma_since_2(config, inv_freq, scale)


def _gemma3(config: PreTrainedConfig) -> ModelSettings:
    """Gemma 3, text: as Gemma 2 without its caps; norms on queries and keys, and layers with a window turn faster."""
    _refuse_bias(config)
    _refuse_bidirectional(config)
    types = sorted(set(config.layer_types))
    found = {kind: rotary_frequencies(config, kind) for kind in types}
    inv_freq, scale = found[types[0]]  # "full_attention", if there are both
    if len({other for _, other in found.values()}) > 1:
        raise ConfigError("rotary embeddings of two scales are not known to the Megatron engine; use strategy=fsdp")
    settings = _gemma_since_2(config, inv_freq, scale, qk_layernorm=True)
    local = found["sliding_attention"][0] if len(types) > 1 else None
    return dataclasses.replace(settings, qk_norm=True, local_inv_freq=local)


def _gemma_since_2(config: PreTrainedConfig, inv_freq: Tensor, scale: float, **changes: Any) -> ModelSettings:
    cap = config.final_logit_softcapping
    return ModelSettings(
        _common(config, **changes),
        config.vocab_size,
        config.tie_word_embeddings,
        inv_freq,
        zero_centered_norm=True,
        embedding_scale=math.sqrt(config.hidden_size),
        softmax_scale=scale * scale * config.query_pre_attn_scalar**-0.5,
        # Transformers' Gemma 3 has the key for the attention's cap and does not read it
        attention_softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        logits=IDENTITY if cap is None else LogitTransform(softcap=float(cap)),
        norms_around=True,
    )


def _refuse_bidirectional(config: PreTrainedConfig) -> None:
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(
            f"{config.model_type} with use_bidirectional_attention=True is no causal model; use strategy=fsdp"
        )


def _deepseek(config: PreTrainedConfig) -> ModelSettings:
    """DeepSeek-V2 and V3: latent attention, shared and routed experts."""
    _refuse_bias(config)
    inv_freq, scale = rotary_frequencies(config)
    third = config.model_type == "deepseek_v3"
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    settings = _common(
        config,
        num_query_groups=config.num_attention_heads,
        kv_channels=head,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        multi_latent_attention=True,
        rope_type="rope",  # the frequencies come from inv_freq, its scaling included
        rotary_scaling_factor=1.0,
    )
    layers = tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))
    if third:
        router = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # as in Transformers; override it to balance the experts
            "moe_router_num_groups": config.n_group,
            "moe_router_group_topk": config.topk_group,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        }
        if not config.norm_topk_prob and config.num_experts_per_tok > 1:
            raise ConfigError("deepseek_v3 with norm_topk_prob=False is not known to the Megatron engine; use fsdp")
    else:
        if config.topk_method not in ("greedy",):
            raise ConfigError(
                f"deepseek_v2 with topk_method={config.topk_method!r} is not known to the Megatron engine; use fsdp"
            )
        router = {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        }
    experts = _expert_settings(
        num_moe_experts=config.n_routed_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=config.moe_intermediate_size * (config.n_shared_experts or 0) or None,
        moe_layer_freq=[int(has) for has in layers],
        **router,
    )
    return ModelSettings(
        settings | experts,
        config.vocab_size,
        config.tie_word_embeddings,
        inv_freq,
        mla=True,
        moe_layers=layers,
        qk_norm=True,
        softmax_scale=_mla_scale(config, head, scale),
    )


def _expert_settings(**settings: Any) -> dict[str, Any]:
    return {
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": False,
        **settings,
    }


_FAMILIES: dict[str, Callable[[PreTrainedConfig], ModelSettings]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


def rotary_frequencies(config: PreTrainedConfig, layer_type: str | None = None) -> tuple[Tensor, float]:
    """(D/2,) frequencies of the rotary embedding and the factor on its sine and cosine, from the family's own module.

    Args:
        config: of the model.
        layer_type: of the layers that are meant, in a family whose layers differ.

    Raises:
        ConfigError: frequencies that depend on the sequence length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if layer_type is not None:
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        raise ConfigError(
            f"rotary embedding {kind!r} is not known to the Megatron engine (known: "
            f"{', '.join(sorted(_STATIC_ROPE))}); use strategy=fsdp"
        )
    module = sys.modules[AutoModel._model_mapping[type(config)].__module__]
    names = [name for name in vars(module) if name.endswith("RotaryEmbedding")]
    if len(names) != 1:
        raise ConfigError(f"{module.__name__} has no rotary embedding of its own; use strategy=fsdp")
    with torch.device("cpu"):
        rotary = getattr(module, names[0])(config)
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies: Tensor = getattr(rotary, f"{prefix}inv_freq")
    return frequencies.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling"))


def _scaled(config: PreTrainedConfig, rotary_scale: float) -> float | None:
    """Scores' factor where sine and cosine are scaled: both sides of every product carry it."""
    if rotary_scale == 1.0:
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rotary_scale * rotary_scale / math.sqrt(head_dim)


def _mla_scale(config: PreTrainedConfig, head: int, rotary_scale: float) -> float:
    """DeepSeek's factor on the scores, which grows with a stretched context (YaRN's ``mscale_all_dim``)."""
    if rotary_scale != 1.0:
        raise ConfigError(
            "latent attention with a scaled rotary embedding (mscale != mscale_all_dim) is not known to the Megatron "
            "engine; use strategy=fsdp"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    scale = head**-0.5
    stretch, all_dim = parameters.get("factor"), parameters.get("mscale_all_dim", 0)
    if parameters.get("rope_type", "default") != "default" and all_dim and stretch and stretch > 1:
        scale *= (0.1 * all_dim * math.log(stretch) + 1.0) ** 2
    return float(scale)


def check_overrides(overrides: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Values of ``override_transformer_config`` that Megatron-core takes.

    Raises:
        ConfigError: a name that it does not have, or a setting that belongs to another key.
    """
    for name in overrides:
        if name in _WITHOUT_MEANING:
            raise ConfigError(f"megatron.override_transformer_config.{name}: {_WITHOUT_MEANING[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"megatron.override_transformer_config.{name}: TransformerConfig has no such field{hint}")
        if name in _RESERVED:
            raise ConfigError(
                f"megatron.override_transformer_config.{name}: is decided by the engine; set the key of the megatron "
                "section instead"
            )
    return dict(overrides)

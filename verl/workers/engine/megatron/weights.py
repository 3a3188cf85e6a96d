"""Which Hugging Face tensors each Megatron weight is made of: one table per family, by ``config.model_type``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from verl.workers.engine.megatron.tensor_layouts import Cut, Form, FusedQKV, GateUp, Vocabulary, Whole


@dataclass(frozen=True)
class Weight:
    """One Megatron weight.

    Attributes:
        megatron: its name, with layers counted over the whole model; ``{expert}`` stands for the number of an expert
            on its rank.
        hf: names of the Hugging Face tensors it is made of.
        form: how it is cut.
        experts: number of experts whose weights ``hf`` stacks along a first dimension; 0 for other weights.
        files: names in checkpoint files that hold experts one by one, with ``{expert}``, and how these are cut.
    """

    megatron: str
    hf: tuple[str, ...]
    form: Form
    experts: int = 0
    files: tuple[str, ...] = ()
    file_form: Form | None = None


@dataclass(frozen=True)
class AdapterWeights:
    """The two matrices beside one Megatron weight.

    Attributes:
        a, b: they. The Hugging Face tensors of both are in the order of ``chosen``.
        chosen: which of the Hugging Face tensors that the weight is made of have an adapter.
        scaling: factor of its output.
    """

    a: Weight
    b: Weight
    chosen: tuple[int, ...]
    scaling: float


def weight_table(config: PreTrainedConfig, *, head: str, multiple_of: int, grouped: bool) -> list[Weight]:
    """Every weight of a model.

    Args:
        config: of the Hugging Face model.
        head: ``"lm"``, ``"value"`` or ``"classifier"``.
        multiple_of: see :class:`~verl.workers.engine.megatron.tensor_layouts.Vocabulary`.
        grouped: experts of a rank are one module rather than one each.
    """
    vocabulary = Vocabulary(config.vocab_size, multiple_of)
    table = [Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)]
    for layer in range(config.num_hidden_layers):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for weight in _LAYERS[config.model_type](config, layer, grouped):
            table.append(
                Weight(
                    here + weight.megatron,
                    tuple(there + name for name in weight.hf),
                    weight.form,
                    weight.experts,
                    tuple(there + name for name in weight.files),
                    weight.file_form,
                )
            )
    table.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Whole()))
    if head != "lm":
        table.append(Weight("output_layer.weight", ("score.weight",), Whole()))
        table.append(Weight("output_layer.bias", ("score.bias",), Whole()))
    elif not config.tie_word_embeddings:
        table.append(Weight("output_layer.weight", ("lm_head.weight",), vocabulary))
    return table


def _norms() -> list[Weight]:
    return [
        Weight("input_layernorm.weight", ("input_layernorm.weight",), Whole()),
        Weight("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Whole()),
    ]


def _attention(config: PreTrainedConfig, *, bias: bool = False, qk_norm: bool = False) -> list[Weight]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fused = FusedQKV(config.num_attention_heads, config.num_key_value_heads, head_dim)
    kinds = ("weight", "bias") if bias else ("weight",)
    table = [
        Weight(f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), fused)
        for kind in kinds
    ]
    table.append(Weight("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Cut(1)))
    if qk_norm:
        for x in "qk":
            table.append(Weight(f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), Whole()))
    return table


def _latent_attention(config: PreTrainedConfig) -> list[Weight]:
    query: list[tuple[str, str, Form]]
    if config.q_lora_rank is None:
        query = [("linear_q_proj", "q_proj", Cut(0))]
    else:
        query = [
            ("linear_q_down_proj", "q_a_proj", Whole()),
            ("q_layernorm", "q_a_layernorm", Whole()),
            ("linear_q_up_proj", "q_b_proj", Cut(0)),
        ]
    rest: list[tuple[str, str, Form]] = [
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", Whole()),
        ("kv_layernorm", "kv_a_layernorm", Whole()),
        ("linear_kv_up_proj", "kv_b_proj", Cut(0)),
        ("linear_proj", "o_proj", Cut(1)),
    ]
    return [
        Weight(f"self_attention.{here}.weight", (f"self_attn.{there}.weight",), form)
        for here, there, form in query + rest
    ]


def _mlp(here: str = "mlp", there: str = "mlp") -> list[Weight]:
    return [
        Weight(f"{here}.linear_fc1.weight", (f"{there}.gate_proj.weight", f"{there}.up_proj.weight"), GateUp()),
        Weight(f"{here}.linear_fc2.weight", (f"{there}.down_proj.weight",), Cut(1)),
    ]


def _experts(count: int, grouped: bool) -> list[Weight]:
    """Routed experts and their router."""

    def name(linear: str) -> str:
        return (
            f"mlp.experts.{linear}.weight{{expert}}"
            if grouped
            else f"mlp.experts.local_experts.{{expert}}.{linear}.weight"
        )

    one = "mlp.experts.{expert}."
    return [
        Weight("mlp.router.weight", ("mlp.gate.weight",), Whole()),
        Weight(
            name("linear_fc1"),
            ("mlp.experts.gate_up_proj",),
            GateUp(stacked=True),
            count,
            (one + "gate_proj.weight", one + "up_proj.weight"),
            GateUp(),
        ),
        Weight(name("linear_fc2"), ("mlp.experts.down_proj",), Cut(1), count, (one + "down_proj.weight",), Cut(1)),
    ]


def _norms_around() -> list[Weight]:
    """A norm before each block, and one on what it adds."""
    return [
        Weight("input_layernorm.weight", ("input_layernorm.weight",), Whole()),
        Weight("self_attn_bda.norm.weight", ("post_attention_layernorm.weight",), Whole()),
        Weight("pre_mlp_layernorm.weight", ("pre_feedforward_layernorm.weight",), Whole()),
        Weight("mlp_bda.norm.weight", ("post_feedforward_layernorm.weight",), Whole()),
    ]


def _llama_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    return _attention(config) + _mlp() + _norms()


def _gemma2_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    return _attention(config) + _mlp() + _norms_around()


def _gemma3_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    return _attention(config, qk_norm=True) + _mlp() + _norms_around()


def _qwen2_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    return _attention(config, bias=True) + _mlp() + _norms()


def _qwen3_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    return _attention(config, qk_norm=True) + _mlp() + _norms()


def _qwen3_moe_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    sparse = (layer + 1) % config.decoder_sparse_step == 0 and layer not in (config.mlp_only_layers or ())
    mlp = _experts(config.num_experts, grouped) if sparse else _mlp()
    return _attention(config, qk_norm=True) + mlp + _norms()


def _deepseek_layer(config: PreTrainedConfig, layer: int, grouped: bool) -> list[Weight]:
    if layer < config.first_k_dense_replace:
        mlp = _mlp()
    else:
        mlp = _experts(config.n_routed_experts, grouped)
        if config.model_type == "deepseek_v3":
            mlp.append(Weight("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), Whole()))
        if config.n_shared_experts:
            mlp += _mlp("mlp.shared_experts", "mlp.shared_experts")
    return _latent_attention(config) + mlp + _norms()


_LAYERS: dict[str, Callable[[PreTrainedConfig, int, bool], list[Weight]]] = {
    "deepseek_v2": _deepseek_layer,
    "deepseek_v3": _deepseek_layer,
    "gemma": _llama_layer,
    "gemma2": _gemma2_layer,
    "gemma3_text": _gemma3_layer,
    "llama": _llama_layer,
    "mistral": _llama_layer,
    "qwen2": _qwen2_layer,
    "qwen3": _qwen3_layer,
    "qwen3_moe": _qwen3_moe_layer,
}

"""Megatron-core's model of a family: its configuration, the specification of its layers, and the pieces of a rank."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from verl.errors import ConfigError
from verl.workers.engine.megatron.families import ModelSettings, check_overrides
from verl.workers.engine.megatron.modules import (
    HiddenStates,
    LinearHead,
    Norm,
    NormedAdd,
    PackedAttention,
    PackedRotary,
    RotaryChoice,
    WholeLinear,
    ZeroCenteredNorm,
)
from verl.workers.engine.megatron.parallel import ParallelSizes

if TYPE_CHECKING:
    from verl.config import MegatronConfig

#: the vocabulary is padded to a multiple of this times the tensor-parallel size, for the sake of matrix products
VOCAB_MULTIPLE = 8


class Model(GPTModel):
    """Megatron-core's GPT with our rotary embedding and head, and the family's factor on the embedding."""

    def __init__(self, settings: ModelSettings, outputs: int, head_bias: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        rotary = PackedRotary(settings.inv_freq, settings.local_inv_freq, per_head=not settings.mla)
        if settings.mla:
            for layer in self.decoder.layers:
                attention = layer.self_attention
                attention.rotary_pos_emb = rotary
                attention.core_attention.scale = settings.softmax_scale
                for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                    if (cut := getattr(attention, name, None)) is not None:
                        setattr(attention, name, WholeLinear(self.config, cut.input_size, cut.output_size))
        else:
            self.rotary_pos_emb = rotary
        if self.pre_process and settings.embedding_scale != 1.0:
            scale = settings.embedding_scale
            self.embedding.register_forward_hook(
                lambda module, inputs, output: output * torch.tensor(scale, dtype=output.dtype)
            )
        if not self.post_process:
            return
        if outputs:
            self.output_layer = LinearHead(
                self.config.hidden_size, outputs, bias=head_bias, dtype=self.config.params_dtype
            )
        else:
            self.output_layer.__class__ = HiddenStates


def transformer_config(
    settings: ModelSettings,
    config: MegatronConfig,
    sizes: ParallelSizes,
    *,
    dtype: torch.dtype,
    recompute: bool,
) -> TransformerConfig:
    """Megatron-core's configuration of one model.

    Args:
        settings: of the model.
        config: the section.
        sizes: of the parallel dimensions.
        dtype: of the parameters.
        recompute: compute every layer's activations again in the backward pass.
    """
    kind = MLATransformerConfig if settings.mla else TransformerConfig
    known = {f.name for f in dataclasses.fields(kind)}
    overrides = check_overrides(config.override_transformer_config, known)
    experts = bool(settings.moe_layers)
    chosen: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        # not a choice where experts or latent attention divide tokens over the tensor-parallel ranks
        "sequence_parallel": sizes.tp > 1 and (config.sequence_parallel or experts or settings.mla),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Stages tell each other how long a micro-batch is. With virtual stages two messages may be on their way between
        # the same two ranks, so there all micro-batches have one length, and sends and receives are in pairs.
        "variable_seq_lengths": sizes.vpp is None,
        "overlap_p2p_comm": sizes.vpp is not None,
        "batch_p2p_comm": sizes.vpp is None,
        "moe_token_dispatcher_type": "alltoall",  # the one that takes sequences of any length
        "deallocate_pipeline_outputs": True,
        "use_cpu_initialization": False,
        "init_method": _leave,  # weights come from files
        "output_layer_init_method": _leave,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "softmax_scale": settings.softmax_scale,
        **settings.transformer,
    }
    if settings.mla:
        # Megatron-core would sum these norms' gradients over tensor-parallel ranks that all have the whole
        chosen["qk_layernorm"] = False
    if recompute and not any(name.startswith("recompute") for name in overrides):
        chosen |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    try:
        return kind(**(chosen | overrides))
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron-core refuses this combination of settings: {error}") from error


def _leave(weight: Tensor) -> Tensor:
    """An initialisation that does nothing."""
    return weight


def build_chunks(
    settings: ModelSettings,
    config: TransformerConfig,
    device: torch.device,
    *,
    outputs: int,
    head_bias: bool,
    max_length: int,
) -> list[Model]:
    """The pieces of the model that this rank holds, weights not yet set; one, or several with virtual stages.

    Args:
        outputs: outputs of a linear head; 0 for a language model.
        head_bias: whether that head has a bias.
        max_length: longest sequence, for Megatron-core's records.
    """
    sizes = config.tensor_model_parallel_size * VOCAB_MULTIPLE
    vocab = -(-settings.vocab_size // sizes) * sizes
    chunks = []
    stages = config.virtual_pipeline_model_parallel_size
    for number in range(stages or 1):
        stage = number if stages else None
        chunks.append(
            Model(
                settings,
                outputs,
                head_bias,
                config=config,
                transformer_layer_spec=_block_spec(settings, config, stage, device),
                vocab_size=vocab,
                max_sequence_length=max_length,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=settings.tied and not outputs,
                position_embedding_type="rope",
                vp_stage=stage,
            )
        )
    return [chunk.to(device) for chunk in chunks]


def _backend(device: torch.device) -> BackendSpecProvider:
    """Transformer Engine's linear layers where there are any and a GPU to run them, Megatron-core's otherwise."""
    if device.type == "cuda":
        try:
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
        except ImportError:
            return LocalSpecProvider()
        return TESpecProvider()
    return LocalSpecProvider()


def _block_spec(
    settings: ModelSettings, config: TransformerConfig, stage: int | None, device: torch.device
) -> TransformerBlockSubmodules:
    """The layers of one piece of the model; those with experts differ from those without."""
    backend = _backend(device)
    norm = ZeroCenteredNorm if settings.zero_centered_norm else Norm
    try:
        first = get_transformer_layer_offset(config, vp_stage=stage)
        count = get_num_layers_to_build(config, vp_stage=stage)
    except AssertionError as error:
        raise ConfigError(
            f"the {config.num_layers} layers of the model do not divide over the stages ({error}); give this role's "
            "megatron.override_transformer_config.num_layers_in_first_pipeline_stage (or ..._last_...)"
        ) from error
    layers = []
    for layer in range(first, first + count):
        experts = bool(settings.moe_layers) and settings.moe_layers[layer]
        window = settings.windows[layer] if settings.windows else None
        layers.append(_layer_spec(settings, config, backend, norm, experts, window))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer_spec(
    settings: ModelSettings,
    config: TransformerConfig,
    backend: BackendSpecProvider,
    norm: type[Norm],
    experts: bool,
    window: int | None,
) -> ModuleSpec:
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    qk_norm = norm if settings.qk_norm else IdentityOp
    causal: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    if settings.mla:
        attention = ModuleSpec(
            module=MLASelfAttention,
            params=causal,
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=column,
                linear_q_down_proj=column,
                linear_q_up_proj=column,
                linear_kv_down_proj=column,
                linear_kv_up_proj=column,
                core_attention=PackedAttention,
                linear_proj=row,
                q_layernorm=qk_norm,
                kv_layernorm=qk_norm,
            ),
        )
    else:
        two = settings.local_inv_freq is not None
        attention = ModuleSpec(
            module=RotaryChoice if two else SelfAttention,
            params=causal | {"local": window is not None} if two else causal,
            submodules=SelfAttentionSubmodules(
                linear_qkv=column,
                core_attention=partial(PackedAttention, window=window, softcap=settings.attention_softcap),
                linear_proj=row,
                q_layernorm=qk_norm,
                k_layernorm=qk_norm,
            ),
        )
    if experts:
        mlp = get_moe_module_spec_for_backend(
            backend=backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    else:
        mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    add = get_bias_dropout_add
    if settings.norms_around:
        add = ModuleSpec(module=NormedAdd, params={"config": config, "norm": norm})
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=add,
        ),
    )

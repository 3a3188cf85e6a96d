"""The parts that this engine puts into Megatron-core's models, and the building of a model from them.

Megatron-core describes a layer by a specification of its modules. Linear layers, experts and the layer itself are
Megatron-core's (Transformer Engine's where it is installed, on CUDA). These modules are ours:

- :class:`PackedAttention`, the core attention: rows without padding, equal prompts stored once, exact on every device;
- :class:`PackedRotary`, the rotary embedding at given positions;
- :class:`Norm`, RMS norm as Transformers computes it, and :class:`NormedAdd`, one on what a block adds;
- :class:`RotaryChoice`, attention of models whose layers differ in their rotary embedding;
- :class:`HiddenStates`, the output layer that leaves the last hidden states as they are, because the engine applies
  the output embedding to the tokens that matter only, and never makes all logits.

What a layer needs to know about the rows, :class:`PackedRows`, travels as Megatron-core's ``packed_seq_params``:
it reaches the attention also when a layer is computed again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
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
from torch import Tensor, nn
from torch.nn.functional import pad

from verl.errors import ConfigError
from verl.models.attention import AttentionPlan, varlen_attention
from verl.models.ulysses import SequenceGroup
from verl.workers.engine.megatron_families import ModelSettings, check_overrides
from verl.workers.engine.megatron_parallel import ParallelSizes

if TYPE_CHECKING:
    from verl.config import MegatronConfig

#: the vocabulary is padded to a multiple of this times the tensor-parallel size, for the sake of matrix products
VOCAB_MULTIPLE = 8


@dataclass
class PackedRows(PackedSeqParams):
    """The rows of one micro-batch, for every layer.

    Attributes:
        plan: which tokens attend together; counts the tokens without the padding at the end.
        positions: (T / context parallel size,) position of this rank's tokens within their rows.
    """

    qkv_format: str = "sbhd"
    plan: AttentionPlan | None = None
    positions: Tensor | None = None


class PackedAttention(nn.Module):
    """Core attention over packed rows; see :mod:`verl.models.attention`.

    With context parallelism each rank has a slice of the tokens. Heads are exchanged for tokens before attention and
    back after it (all-to-all), so every rank attends over whole rows with its share of the heads.

    Args:
        config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale: Megatron-core's.
        window: tokens that one looks back at, itself included; None for all.
        softcap: c in c*tanh(x/c) of the scores; None for no cap.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.window = window
        self.softcap = softcap
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: (T, 1, H, D) or (T, H, D).
            key, value: the same with H / groups heads.
            packed_seq_params: the rows.

        Returns:
            (T, 1, H * D).
        """
        assert packed_seq_params is not None
        assert packed_seq_params.plan is not None
        plan = packed_seq_params.plan
        real = len(plan.unpad) if plan.unpad is not None else int(plan.cu_seqlens[-1])
        q, k, v = (x.reshape(x.shape[0], *x.shape[-2:]).transpose(0, 1)[None] for x in (query, key, value))
        padded = q.shape[2] * self.cp
        if self.cp > 1:
            group = parallel_state.get_context_parallel_group()
            sharing = SequenceGroup(group, group.rank(), self.cp)
            q, k, v = sharing.to_heads(q, k, v, real)
        else:
            q, k, v = (x[:, :, :real] for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        mask = plan.windowed(self.window)
        out, _ = varlen_attention(self, q, k, v, mask, dropout=dropout, scaling=self.scale, softcap=self.softcap)
        out = pad(out, (0, 0, 0, 0, 0, padded - real))
        if self.cp > 1:
            out = sharing.to_tokens(out)
        return out.reshape(out.shape[1], 1, -1)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:
    """Attention with capped scores, under the name by which :func:`varlen_attention` finds what a module needs.

    Args:
        query: (B, H, S, D); key and value: the same with H / groups heads.
        attention_mask: added to the scores, (B or 1, 1, S, S).

    Returns:
        (B, S, H, D), and None for the weights.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped @ key[:, :, None].transpose(-1, -2) * scaling
    scores = softcap * torch.tanh(scores / softcap) + attention_mask[:, :, None]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout)
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2), None


class PackedRotary(nn.Module):
    """Rotary embedding at the positions of packed rows.

    Megatron-core first asks for the length of the sequence and then for the angles up to it. Here the answer to the
    first question is the positions themselves.

    Args:
        inv_freq: (D/2,) frequencies.
        local_inv_freq: (D/2,) those of layers with a window, if they have others; their angles come after the first.
        per_head: shape of the angles is (T, 1, 1, D); otherwise (T, 1, D), as latent attention wants it.
    """

    def __init__(self, inv_freq: Tensor, local_inv_freq: Tensor | None = None, *, per_head: bool = True) -> None:
        super().__init__()
        self.inv_freq: Tensor
        both = [f for f in (inv_freq, local_inv_freq) if f is not None]
        self.register_buffer("inv_freq", torch.cat([f.repeat(2) for f in both]), persistent=False)
        self.per_head = per_head

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> Tensor:
        """The positions of this rank's tokens."""
        assert packed_seq_params is not None
        assert packed_seq_params.positions is not None
        return packed_seq_params.positions

    def forward(self, positions: Tensor, **unused: Any) -> Tensor:
        """Angles of each token, each frequency twice."""
        angles = torch.outer(positions.float(), self.inv_freq)
        return angles[:, None, None] if self.per_head else angles[:, None]


class RotaryChoice(SelfAttention):
    """Attention that takes its angles from those of two kinds of layers.

    Args:
        local: take the second half of the angles, for layers with a window.
    """

    def __init__(self, *args: Any, local: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local = local

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """As Megatron-core's, with (T, 1, 1, 2 D) angles."""
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb.chunk(2, -1)[int(self.local)], **kwargs)


class Norm(nn.Module):
    """RMS norm in float32, as in Transformers; with ``zero_centered`` the factor is 1 + weight."""

    zero_centered = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class ZeroCenteredNorm(Norm):
    """Gemma's norm."""

    zero_centered = True


class NormedAdd(nn.Module):
    """The end of a block whose output is normed before it is added to the residual.

    Args:
        config: of the model.
        norm: the kind.
    """

    def __init__(self, config: TransformerConfig, norm: type[Norm]) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function that Megatron-core's layer calls with the output and its bias, the residual and the dropout."""

        def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = output
            normed: Tensor = self.norm(x if bias is None else x + bias)
            return residual + nn.functional.dropout(normed, dropout, training)

        return add


class HiddenStates(ColumnParallelLinear):
    """The output embedding; keeps the weight, and passes the hidden states on."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """``input_`` itself."""
        return input_, None


class WholeLinear(nn.Linear):
    """A projection that every tensor-parallel rank has whole and applies to its part of the sequence.

    Latent attention compresses with it. Megatron-core's own choice, a projection cut over the ranks whose results are
    gathered, loses the other ranks' share of the gradient of the keys' rotary part, which all heads have in common.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The product, and no bias."""
        return super().forward(input_), None


class LinearHead(nn.Linear):
    """The head of a critic or reward model, whole on every rank; passes the hidden states on."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """``input_`` itself; the engine calls :meth:`apply_head` on the states that it needs."""
        return input_, None

    def apply_head(self, states: Tensor) -> Tensor:
        """(N, H) to (N, outputs), float32."""
        return nn.functional.linear(states, self.weight, self.bias).float()


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
    first = get_transformer_layer_offset(config, vp_stage=stage)
    count = get_num_layers_to_build(config, vp_stage=stage)
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

"""The parts that this engine puts into Megatron-core's models.

Megatron-core describes a layer by a specification of its modules (:mod:`~verl.workers.engine.megatron.model`). Linear
layers, experts and the layer itself are Megatron-core's (Transformer Engine's where it is installed, on CUDA). These
modules are ours:

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from verl.models.attention import AttentionPlan, varlen_attention
from verl.models.sequence_group import SequenceGroup


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

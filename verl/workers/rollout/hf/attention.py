"""Attention over the engine's cache, plugged into Transformers' models.

The rows of a running batch are aligned on their *last* token: every row's newest key sits in the same column of the
cache, shorter rows just start later. A decode step therefore writes one column, reads one slice, and a sliding window
is the last columns of that slice for all rows alike. Transformers builds no masks for an attention function that it
does not know, so what must be masked is told here, through :func:`forward_context`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.errors import RolloutError

ATTENTION_NAME = "verl_rollout"


@dataclass(slots=True)
class ForwardContext:
    """What one forward of the model is.

    Attributes:
        decode: one new token per row against the cache; otherwise a prefill of whole, right-padded prompts, or of
            left-padded tokens behind cached ones.
        pad_bias: decode only, (B,1,1,T) in the model's dtype: 0 where a row may look, -inf before its first token;
            None when all rows start in the same column.
        last_index: prefill only, (B,) index of each row's last token; the head runs for these alone.
        starts: prefill behind cached tokens only, (B,) column of each row's first token, of those that are read.
    """

    decode: bool
    pad_bias: torch.Tensor | None = None
    last_index: torch.Tensor | None = None
    starts: torch.Tensor | None = None


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextlib.contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make ``context`` the one that attention calls of this thread see."""
    _current.context = context
    try:
        yield
    finally:
        _current.context = None


def current_context() -> ForwardContext:
    """The context of the running forward."""
    context = _current.context
    if context is None:
        raise RolloutError(
            "the rollout's attention ran outside of the rollout engine; build the module for other uses anew"
        )
    return context


def keep_last_hidden(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Pre-hook of the output head: in a prefill pass on only each prompt's last hidden state.

    ``args[0]`` is (B,L,hidden) and becomes (B,1,hidden), which saves the (B,L,vocabulary) logits nobody reads.
    """
    context = _current.context
    if context is None or context.last_index is None:
        return None
    hidden = args[0]
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return (hidden[rows, context.last_index].unsqueeze(1), *args[1:])


def rollout_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the signature of Transformers' ``AttentionInterface``.

    Heads of a group share their keys and values without repeating them.

    Args:
        query: (B,H,L,D); ``key`` (B,K,T,D) and ``value`` (B,K,T,E) with K dividing H.
        attention_mask: always None, see the module's text.
        sliding_window: a token sees this many tokens, itself included.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        s_aux: (H,) logits of attention sinks, which take probability and give no value.

    Returns:
        (B,L,H,E), and None for the weights.
    """
    if not getattr(module, "is_causal", True):  # a vision tower's, over the patches of one image
        return F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None
    if position_bias is not None:
        raise RolloutError("the hf rollout does not serve models whose attention adds a position bias")
    context = current_context()
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if context.decode:
        return _decode(query, key, value, context.pad_bias, scaling, sliding_window, softcap, s_aux), None
    if context.starts is not None:
        return _extend(query, key, value, context.starts, scaling, sliding_window, softcap, s_aux), None
    return _prefill(query, key, value, scaling, sliding_window, softcap, s_aux), None


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pad_bias: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, _, width = query.shape
    if sliding_window is not None and key.shape[2] > sliding_window:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        pad_bias = None if pad_bias is None else pad_bias[..., -sliding_window:]
    kv_heads = key.shape[1]
    # the group's heads take the place of the query length: they look at the same keys
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, width)
    if softcap is None and s_aux is None and not (query.device.type == "cpu" and query.dtype == torch.float32):
        mask = None if pad_bias is None else pad_bias.expand(-1, -1, grouped.shape[2], -1)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    else:  # also the fastest way on CPU in float32, where the fused kernel is slow for a few queries a row
        out = _explicit(grouped * scaling, key, value, pad_bias, softcap, s_aux)
    return out.reshape(batch, 1, heads, value.shape[-1])


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, length, _ = query.shape
    group = heads // key.shape[1]
    windowed = sliding_window is not None and length > sliding_window
    if softcap is None and s_aux is None and not windowed:
        # right padding and a causal mask: no real token sees a padding token
        if group > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scaling)
        return out.transpose(1, 2)
    rows = torch.arange(length, device=query.device)
    distance = rows[:, None] - rows[None, :]
    hidden = distance < 0
    if windowed:
        hidden = hidden | (distance >= sliding_window)
    bias = torch.zeros(length, length, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    # fold the group into the query axis, as in decoding: query r of head g becomes row g*L + r
    grouped = query.reshape(batch, key.shape[1], group * length, query.shape[-1])
    out = _explicit(grouped * scaling, key, value, bias.repeat(group, 1), softcap, s_aux)
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2)


def _extend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, length, width = query.shape
    group = heads // key.shape[1]
    columns = torch.arange(key.shape[2], device=query.device)
    own = columns[-length:].unsqueeze(1)  # queries are the last columns
    hidden = columns > own
    if sliding_window is not None:
        hidden = hidden | (own - columns >= sliding_window)
    first = starts.view(-1, 1, 1)
    # padding before a row's first token looks at that token, so that it is not left without any
    hidden = torch.where(own < first, columns != first, hidden | (columns < first)).unsqueeze(1)
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    if softcap is None and s_aux is None:
        if group > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
        return out.transpose(1, 2)
    grouped = query.reshape(batch, key.shape[1], group * length, width)
    out = _explicit(grouped * scaling, key, value, bias.repeat(1, 1, group, 1), softcap, s_aux)
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention step by step; ``query`` (B,K,Q,D) is scaled, probabilities are float32."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if s_aux is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        kv_heads, queries = scores.shape[1], scores.shape[2]
        sinks = s_aux.to(scores.dtype).view(kv_heads, -1)  # (K, H/K)
        sinks = sinks.repeat_interleave(queries // sinks.shape[1], dim=1).view(1, kv_heads, queries, 1)
        scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, -1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def register_attention() -> None:
    """Make the attention known to Transformers under :data:`ATTENTION_NAME`. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, rollout_attention)

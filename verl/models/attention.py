"""Attention for packed rows: everything else in the model runs on one sequence of T tokens, attention per row.

Rows of different length are concatenated without padding into one sequence (1, T), see :mod:`verl.models.packing`.
Linear layers, norms and activations do not care. Attention does: a token may look at its own row only. Here the
queries and keys are gathered into a few right-padded blocks of similar length and each block runs through
``scaled_dot_product_attention`` with a causal mask; a real token never sees the padding because padding comes after
it. No T x T mask exists, and the result is exact.

Rows that begin with the same prompt may share its tokens: the model then sees the prompt once, and the attention of
every row gathers the shared keys. This is exact as well, because a causal model's states of a prefix do not depend
on what follows.

The function is registered with Transformers under :data:`IMPLEMENTATION`. Models pass whatever
``create_causal_mask`` and its kin return through to the attention function, so the mask builder registered here
returns a :class:`PackedMask` that carries the plan; recomputation in gradient checkpointing finds it there too.
Outside a packed forward both functions behave as Transformers' own ``sdpa``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.models.sequence_group import SequenceGroup

IMPLEMENTATION = "verl_varlen"

MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]

# What models hand to an attention function without meaning anything for a packed row: the mask already says it.
_NEUTRAL_KWARGS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)

# Cost of one more block, in scores (query x key) that could be computed in the same time. Only balances padding
# against the number of kernel calls; any value gives the same numbers.
_BLOCK_OVERHEAD = 2048


@dataclass
class Block:
    """Rows of similar length that run through one attention call.

    Attributes:
        rows: number of rows n.
        q_len: padded number of queries per row.
        k_len: padded number of keys per row.
        q_start: where the block's n * q_len gathered queries begin.
        k_start: where its n * k_len gathered keys begin.
        q_positions: (n or 1, q_len) position of each query within its row; None when it is ``arange(q_len)``.
    """

    rows: int
    q_len: int
    k_len: int
    q_start: int
    k_start: int
    q_positions: Tensor | None = None


class AttentionPlan:
    """Which packed tokens attend together.

    Not a dataclass on purpose: wrappers that walk through the arguments of a module copy dataclasses.

    Args:
        blocks: the attention calls.
        q_index: (Mq,) packed token of every gathered query slot; None when the packed order already is the padded one.
        k_index: (Mk,) the same for keys and values; None when equal to ``q_index``.
        unpad: (T,) where the result of each packed token lies among the Mq slots.
        flat_index: (L,) packed tokens of all rows one after the other; None when that is the packed order.
        flat_unpad: (T,) inverse of ``flat_index``.
        cu_seqlens: (n+1,) int32 row boundaries in ``flat_index``.
        max_len: length of the longest row in tokens.
    """

    def __init__(
        self,
        blocks: list[Block],
        q_index: Tensor | None,
        k_index: Tensor | None,
        unpad: Tensor | None,
        flat_index: Tensor | None,
        flat_unpad: Tensor | None,
        cu_seqlens: Tensor,
        max_len: int,
    ) -> None:
        self.blocks = blocks
        self.q_index = q_index
        self.k_index = k_index
        self.unpad = unpad
        self.flat_index = flat_index
        self.flat_unpad = flat_unpad
        self.cu_seqlens = cu_seqlens
        self.max_len = max_len
        self.causal = PackedMask(self, None)
        self.calls = 0  # attention calls made with this plan, to notice a model that does not use it
        self.sequence: SequenceGroup | None = None
        self.tokens = 0
        self._windowed: dict[int, PackedMask] = {}

    def windowed(self, size: int | None) -> PackedMask:
        """The causal mask that lets a token look at the ``size`` last ones, itself included; None is all of them."""
        if size is None or self.max_len <= size:
            return self.causal
        if size not in self._windowed:  # layers share what a mask has built
            self._windowed[size] = PackedMask(self, _window(size), size)
        return self._windowed[size]

    def share(self, group: SequenceGroup, tokens: int) -> None:
        """Let the ranks of ``group`` share the sequence: each brings its stretch of the ``tokens`` packed tokens."""
        self.sequence, self.tokens = group, tokens

    def to(self, device: torch.device) -> AttentionPlan:
        """The same plan with its indices on ``device``."""
        if device.type == "cpu":
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        blocks = [Block(b.rows, b.q_len, b.k_len, b.q_start, b.k_start, move(b.q_positions)) for b in self.blocks]
        other = AttentionPlan(
            blocks,
            move(self.q_index),
            move(self.k_index),
            move(self.unpad),
            move(self.flat_index),
            move(self.flat_unpad),
            self.cu_seqlens.to(device, non_blocking=True),
            self.max_len,
        )
        other.sequence, other.tokens = self.sequence, self.tokens
        return other


class PackedMask:
    """Stands in for the attention mask tensor while packed rows run through a model.

    Args:
        plan: the rows.
        function: mask rule on (batch, head, query position, key position), positions counted within a row; None is
            plain causal.
        window: sliding-window size if the rule is exactly a causal sliding window, for kernels that know windows.
    """

    def __init__(self, plan: AttentionPlan, function: MaskFunction | None, window: int | None = None) -> None:
        self.plan = plan
        self.function = function
        self.window = window
        self._built: dict[tuple[int, torch.dtype], Tensor | None] = {}

    def block_mask(self, number: int, dtype: torch.dtype, device: torch.device, always: bool = False) -> Tensor | None:
        """Additive mask (n or 1, 1, q_len, k_len) of a block; None if it is the plain square causal one.

        Args:
            number: index of the block in the plan.
            dtype: of the mask.
            always: build the tensor even for the plain causal mask.
        """
        block = self.plan.blocks[number]
        if self.function is None and block.q_positions is None and not always:
            return None
        key = (number, dtype)
        if key not in self._built:
            q = torch.arange(block.q_len, device=device)[None] if block.q_positions is None else block.q_positions
            q = q[:, None, :, None]
            k = torch.arange(block.k_len, device=device)[None, None, None, :]
            allowed = k <= q
            if self.function is not None:
                zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
                allowed = allowed & self.function(zero, zero, q, k)
            allowed = allowed.expand(q.shape[0], 1, block.q_len, block.k_len)
            # The lowest finite number rather than -inf: a padding query may see no key at all under a window.
            lowest = torch.finfo(dtype).min
            self._built[key] = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, lowest)
        return self._built[key]


class _Active(threading.local):
    plan: AttentionPlan | None = None


_ACTIVE = _Active()


@contextmanager
def packed_attention(plan: AttentionPlan | None) -> Iterator[None]:
    """While active, models with :data:`IMPLEMENTATION` read their input as rows packed by ``plan``."""
    previous, _ACTIVE.plan = _ACTIVE.plan, plan
    try:
        yield
    finally:
        _ACTIVE.plan = previous


def varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: MaskFunction,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Any:
    """Mask builder for Transformers: a :class:`PackedMask` in a packed forward, else what ``sdpa`` uses."""
    plan = _ACTIVE.plan
    if plan is None:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            *args,
            mask_function=mask_function,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            **kwargs,
        )
    if use_vmap or not allow_is_causal_skip:
        raise ConfigError(
            "this model adds its own rules to the attention mask, which packed rows do not support; "
            "set model.use_remove_padding=false"
        )
    if local_size is None or plan.max_len <= local_size:
        return plan.causal
    return PackedMask(plan, mask_function)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for Transformers.

    Args:
        query: (1, H, T, D) packed, or (B, H, S, D) outside a packed forward.
        key: (1, Hkv, T, D); H is a multiple of Hkv.
        value: (1, Hkv, T, Dv).
        attention_mask: a :class:`PackedMask`, or a mask tensor or None outside a packed forward.

    Returns:
        (1, T, H, Dv), and None for the weights, which are not kept.
    """
    special = _special_kwargs(kwargs)
    mask = attention_mask
    if not isinstance(mask, PackedMask):
        # a vision tower, whose attention is not causal, has patches of one image before it and not the packed rows
        plan = _ACTIVE.plan if getattr(module, "is_causal", True) else None
        if plan is None:
            return _padded_attention(module, query, key, value, mask, dropout, scaling, special, kwargs)
        # A model that builds its masks without Transformers' helpers: all that is left to go by is its window.
        mask = plan.windowed(kwargs.get("sliding_window"))
    mask.plan.calls += 1
    group = mask.plan.sequence
    if group is None:
        return _packed_attention(module, query, key, value, mask, dropout, scaling, special, kwargs), None
    if special:
        _check_shareable(module, key.shape[1], group.size, kwargs)
    query, key, value = group.to_heads(query, key, value, mask.plan.tokens)
    return group.to_tokens(_packed_attention(module, query, key, value, mask, dropout, scaling, special, kwargs)), None


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    dropout: float,
    scaling: float | None,
    special: bool,
    kwargs: dict[str, Any],
) -> Tensor:
    """(1, H, T, D) queries to (1, T, H, Dv) results, block by block."""
    plan = mask.plan
    if query.is_cuda and not special and mask.function is None and dropout == 0.0:
        out = _cuda_varlen(plan, query, key, value, scaling)
        if out is not None:
            return out

    heads, kv_heads, v_dim = query.shape[1], key.shape[1], value.shape[-1]
    dtype = query.dtype
    if dtype == torch.bfloat16 and query.device.type == "cpu" and not special:
        # PyTorch's backward kernel for bfloat16 takes several times as long as the one for float32
        query, key, value = query.float(), key.float(), value.float()
    flat_q, flat_k, flat_v = (_flat(x) for x in (query, key, value))
    if plan.q_index is not None:
        gathered_q = _GatherOnce.apply(flat_q, plan.q_index, plan.unpad)
        if plan.k_index is None:
            flat_k = _GatherOnce.apply(flat_k, plan.q_index, plan.unpad)
            flat_v = _GatherOnce.apply(flat_v, plan.q_index, plan.unpad)
        else:
            flat_k = flat_k.index_select(0, plan.k_index)
            flat_v = flat_v.index_select(0, plan.k_index)
        flat_q = gathered_q

    outputs = []
    for number, block in enumerate(plan.blocks):
        q_slots = flat_q[block.q_start : block.q_start + block.rows * block.q_len]
        k_slots = flat_k[block.k_start : block.k_start + block.rows * block.k_len]
        v_slots = flat_v[block.k_start : block.k_start + block.rows * block.k_len]
        q = q_slots.view(block.rows, block.q_len, heads, -1).transpose(1, 2)
        k = k_slots.view(block.rows, block.k_len, kv_heads, -1).transpose(1, 2)
        v = v_slots.view(block.rows, block.k_len, kv_heads, -1).transpose(1, 2)
        if special:
            additive = mask.block_mask(number, q.dtype, q.device, always=True)
            out = _eager(module, q, k, v, additive, dropout, scaling, kwargs)
        else:
            additive = mask.block_mask(number, q.dtype, q.device)
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=additive,
                dropout_p=dropout,
                is_causal=additive is None,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            ).transpose(1, 2)
        outputs.append(out.reshape(block.rows * block.q_len, heads * v_dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.q_index is not None:
        joined = _Unpad.apply(joined, plan.unpad)
    joined = joined.to(dtype)
    return joined.view(1, -1, heads, v_dim)


def _check_shareable(module: nn.Module, kv_heads: int, size: int, kwargs: dict[str, Any]) -> None:
    """The model's own attention code, which may count heads, must not notice that it has a share of them."""
    if kwargs.get("s_aux") is not None or kv_heads % size:
        raise ConfigError(
            f"{type(module).__name__} runs attention of its own, which needs its {kv_heads} key heads to divide over "
            "the ranks of a sequence and no parameters for single heads; use ulysses_sequence_parallel_size=1"
        )


def _special_kwargs(kwargs: dict[str, Any]) -> bool:
    """Whether the model asks for something beyond masked softmax attention, such as a soft cap or sinks."""
    return any(value is not None and name not in _NEUTRAL_KWARGS for name, value in kwargs.items())


def _flat(x: Tensor) -> Tensor:
    """(1, H, T, D) to (T, H*D); free for the layout that models produce."""
    return x.transpose(1, 2).reshape(x.shape[2], -1)


def _window(size: int) -> MaskFunction:
    return lambda batch, head, q, k: k > q - size


def _padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    special: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Ordinary padded rows: Transformers' ``sdpa``, or the model's own eager code for what ``sdpa`` would ignore."""
    if not special:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    q_len, k_len = query.shape[2], key.shape[2]
    if mask is None and getattr(module, "is_causal", True) and q_len > 1:
        mask = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device).tril(k_len - q_len)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, lowest)
    return _eager(module, query, key, value, mask, dropout, scaling, kwargs), None


def _eager(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    additive: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """The model file's own plain attention, which knows all of the model's extra arguments. Returns (B, S, H, Dv)."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        extra = sorted(n for n, value in kwargs.items() if value is not None and n not in _NEUTRAL_KWARGS)
        raise ConfigError(
            f"{type(module).__name__} asks its attention for {extra} and has no eager_attention_forward to fall back "
            'on; set model.override_config.attn_implementation to an implementation of the model, for example "eager"'
        )
    extra_args = dict(kwargs)
    if scaling is not None:
        extra_args["scaling"] = scaling
    return eager(module, q, k, v, additive, dropout=dropout, **extra_args)[0]


class _GatherOnce(torch.autograd.Function):
    """``x[index]`` where only one slot of each source row has a gradient, the one that ``unpad`` names.

    The other slots are padding (their keys are never attended, their queries are never read), so the backward is a
    gather as well, cheaper than the scatter-add that autograd would use, and deterministic on every device.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (unpad,) = ctx.saved_tensors
        return grad.index_select(0, unpad), None, None


class _Unpad(torch.autograd.Function):
    """``y[unpad]``, where no slot is read twice, so the backward writes instead of adding."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        ctx.slots = y.shape[0]
        return y.index_select(0, unpad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (unpad,) = ctx.saved_tensors
        return grad.new_zeros(ctx.slots, grad.shape[1]).index_copy_(0, unpad, grad), None


@cache
def _cuda_kernel() -> Callable[..., Tensor] | None:
    """A variable-length kernel ``f(q, k, v, cu_seqlens, max_len, scale)`` on (T, H, D), if one is installed."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        pass
    else:

        def flash(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_len: int, scale: float | None) -> Tensor:
            return flash_attn_varlen_func(q, k, v, cu, cu, max_len, max_len, softmax_scale=scale, causal=True)

        return flash
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    def torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_len: int, scale: float | None) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        out = varlen_attn(q, k, v, cu, cu, max_len, max_len, scale=scale, window_size=(-1, 0), enable_gqa=gqa)
        assert isinstance(out, Tensor)  # a tuple only where auxiliary results were asked for
        return out

    return torch_varlen


def _cuda_varlen(plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """Causal attention through a CUDA kernel without padding; None where the kernels do not apply."""
    kernel = _cuda_kernel()
    half = query.dtype in (torch.float16, torch.bfloat16)
    if kernel is None or not half or query.shape[-1] != value.shape[-1] or query.shape[-1] > 256:
        return None
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
    if plan.flat_index is not None:
        q, k, v = (x.index_select(0, plan.flat_index) for x in (q, k, v))
    out = kernel(q.contiguous(), k.contiguous(), v.contiguous(), plan.cu_seqlens, plan.max_len, scale)
    if plan.flat_unpad is not None:
        out = out.index_select(0, plan.flat_unpad)
    return out[None]


def split_into_blocks(q_lens: Sequence[int], k_lens: Sequence[int]) -> list[list[int]]:
    """Group rows so that padding each group to its longest row costs little.

    Minimises the sum over groups of ``rows * max(q_len) * max(k_len)`` plus a constant per group, over groups that
    are contiguous in the order of the query length (dynamic programme over at most 24 distinct lengths).

    Args:
        q_lens: queries per row.
        k_lens: keys per row.

    Returns:
        Lists of row numbers, each ascending.
    """
    q, k = np.asarray(q_lens), np.asarray(k_lens)
    count = len(q)
    if count == 0:
        return []
    q_max, k_max = int(q.max()), int(k.max())
    if count * q_max * k_max - int((q * k).sum()) <= _BLOCK_OVERHEAD:
        return [list(range(count))]
    order = np.argsort(q, kind="stable")
    sorted_q = q[order]
    starts = np.flatnonzero(np.r_[True, sorted_q[1:] != sorted_q[:-1]])
    if len(starts) > 24:
        starts = starts[np.unique(np.linspace(0, len(starts) - 1, 24).astype(int))]
    edges = [*starts.tolist(), count]
    parts = len(edges) - 1
    part_k = [int(k[order[edges[i] : edges[i + 1]]].max()) for i in range(parts)]
    part_q = [int(sorted_q[edges[i + 1] - 1]) for i in range(parts)]
    best: list[float] = [0.0] + [float("inf")] * parts
    cut = [0] * (parts + 1)
    for end in range(1, parts + 1):
        widest = 0
        for begin in range(end - 1, -1, -1):
            widest = max(widest, part_k[begin])
            rows = edges[end] - edges[begin]
            cost = best[begin] + rows * part_q[end - 1] * widest + _BLOCK_OVERHEAD
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    groups = []
    end = parts
    while end > 0:
        groups.append(sorted(order[edges[cut[end]] : edges[end]].tolist()))
        end = cut[end]
    return groups[::-1]


AttentionInterface.register(IMPLEMENTATION, varlen_attention)
AttentionMaskInterface.register(IMPLEMENTATION, varlen_mask)

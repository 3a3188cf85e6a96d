"""Ulysses sequence parallelism: several ranks share one packed sequence (arXiv:2309.14509).

Every rank of a sequence group plans the same rows and runs the model on its own stretch of the T packed tokens, padded
to a multiple of the group. Linear layers, norms and experts see single tokens and do not care. Around attention two
all-to-all exchanges trade stretches for heads: a rank then has all T tokens of H / size heads, runs the ordinary
attention of packed rows on them, shared prompts included, and trades back. After the model each rank computes the
results (log-probs, entropies, values) that its own tokens predict, and an all-gather gives every rank all of them.

Images go through the vision tower on every rank of the group; each takes the features that its tokens stand for.

Every rank of the group then computes the same loss. In the backward pass it follows its own results only; the sum of
the ranks' gradients is the whole one. Gradient reduction averages over all ranks, so the part of each is scaled up by
the group's size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.models.packing import RowLayout


class SequenceGroup:
    """The ranks that share a sequence, and the exchanges between them. Every method but the constructor is collective.

    Args:
        group: their process group.
        rank: this rank's place in it, which is also the place of its stretch of tokens.
        size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Trade this rank's tokens for its heads, in one exchange.

        Key and value heads are repeated where there are fewer than ranks, or they do not divide.

        Args:
            query, key, value: (1, heads, t, D), t this rank's tokens, padding included.
            tokens: T, without the padding.

        Returns:
            The same as (1, heads / size, T, D), with at least one key and value head.

        Raises:
            ConfigError: the query heads do not divide.
        """
        check_heads(query.shape[1], self.size)
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        parts = [self._by_rank(x) for x in (query, key, value)]
        received = _AllToAll.apply(torch.cat(parts, -1).transpose(0, 1).contiguous(), self.group)
        rows = received.flatten(0, 1)[:tokens]
        split = rows.split([part.shape[-1] for part in parts], -1)
        query, key, value = (
            flat.reshape(1, tokens, x.shape[1] // self.size, x.shape[-1]).transpose(1, 2)
            for flat, x in zip(split, (query, key, value), strict=True)
        )
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """Trade back: (1, T, heads / size, D) to (1, t, heads, D)."""
        _, tokens, heads, width = output.shape
        stretch = -(-tokens // self.size)
        padded = pad(output.reshape(tokens, heads * width), (0, 0, 0, stretch * self.size - tokens))
        received = _AllToAll.apply(padded.view(self.size, stretch, heads * width).contiguous(), self.group)
        return received.transpose(0, 1).reshape(1, stretch, self.size * heads, width)

    def _by_rank(self, x: Tensor) -> Tensor:
        """(1, heads, t, D) to (t, size, heads / size * D)."""
        _, heads, tokens, width = x.shape
        return x[0].transpose(0, 1).reshape(tokens, self.size, heads // self.size * width)


class Spread:
    """Results that lie on the ranks whose tokens predict them.

    Args:
        index: (N,) packed token that each result comes from.
        tokens: T.
        group: the ranks.
    """

    def __init__(self, index: Tensor, tokens: int, group: SequenceGroup) -> None:
        stretch = -(-tokens // group.size)
        owner = torch.div(index, stretch, rounding_mode="floor")
        counts = torch.bincount(owner, minlength=group.size)
        self.group = group
        self.mine = (owner == group.rank).nonzero().flatten()  # which of the N results this rank computes
        self.index = index[self.mine] - group.rank * stretch
        if not len(self.mine):
            # A stand-in that nobody reads: this rank's head and layers must take part in the backward pass too.
            self.index = index.new_zeros(1)
        self.width = max(int(counts.max()), 1)
        # place of result i: its rank's part, then its number among that rank's results
        order = torch.argsort(owner, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[owner[order]]
        self.place = owner * self.width + place

    def take(self, values: Tensor) -> Tensor:
        """(N, ...) to this rank's own, or the stand-in's."""
        return values[self.mine] if len(self.mine) else values[:1]

    def to(self, device: torch.device) -> Spread:
        """The same with its indices on ``device``."""
        other = object.__new__(Spread)
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("mine", "index", "place")}
        other.__dict__.update(self.__dict__, **moved)
        return other

    def join(self, values: Tensor) -> Tensor:
        """This rank's results to all N, the same on every rank; collective and differentiable."""
        padded = pad(values, (*(0, 0) * (values.dim() - 1), 0, self.width - len(values)))
        return JoinResults.apply(padded, self.place, self.group)


def split_sequence(layout: RowLayout, group: SequenceGroup) -> RowLayout:
    """This rank's stretch of a packed layout; the rows, and where results belong, stay those of the whole.

    Args:
        layout: of the group's rows, the same on every rank; on the host.
        group: the ranks.

    Raises:
        ConfigError: rows with padding cannot be split.
    """
    if layout.plan is None:
        raise ConfigError("sequence parallelism works on rows without padding; set model.use_remove_padding=true")
    total = layout.input_ids.shape[1]
    stretch = -(-total // group.size)
    start = group.rank * stretch

    def cut(values: Tensor, fill: int) -> Tensor:
        return pad(values, (0, stretch * group.size - total), value=fill)[..., start : start + stretch].contiguous()

    layout.plan.share(group, total)
    results = Spread(layout.predict_index, total, group)
    last = Spread(layout.last_index, total, group) if layout.rows else None
    return replace(
        layout,
        input_ids=cut(layout.input_ids, 0),
        position_ids=cut(layout.position_ids, 0),
        attention_mask=cut(layout.attention_mask, 1),
        predict_index=results.index,
        targets=results.take(layout.targets),
        last_index=layout.last_index if last is None else last.index,
        tokens=stretch,
        images=None if layout.images is None else layout.images.part(start, start + stretch),
        spread=results,
        last_spread=last,
    )


def check_heads(heads: int, size: int) -> None:
    """Raise ``ConfigError`` where the attention heads of a model do not divide over the ranks of a sequence."""
    if heads % size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: must divide the model's {heads} attention heads; use one of "
            f"{', '.join(map(str, fits))}"
        )


def check_model(config: PreTrainedConfig, size: int, *, packed: bool) -> None:
    """Refuse at start-up what sequence parallelism cannot run.

    Args:
        config: of the model.
        size: ranks that share a sequence.
        packed: whether the engine runs rows without padding.

    Raises:
        ConfigError: rows are padded, or the heads do not divide.
    """
    if not packed:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: needs rows without padding; set model.use_remove_padding=true, or "
            f"use 1 where a model ({type(config).__name__}) cannot run so"
        )
    check_heads(int(config.get_text_config().num_attention_heads), size)


class _AllToAll(torch.autograd.Function):
    """Rank j's ``x[i]`` becomes rank i's ``y[j]``; its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad.contiguous(), ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class JoinResults(torch.autograd.Function):
    """All-gather of results whose backward keeps this rank's part, scaled up because reductions average ranks."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, place: Tensor, group: SequenceGroup) -> Tensor:
        parts = padded.new_empty((group.size, *padded.shape))
        dist.all_gather(list(parts.unbind(0)), padded.contiguous(), group=group.group)
        ctx.save_for_backward(place)
        ctx.group = group
        ctx.shape = parts.shape
        return parts.flatten(0, 1).index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.shape)
        whole.flatten(0, 1).index_copy_(0, place, grad)
        return whole[ctx.group.rank] * ctx.group.size, None, None


__all__ = ["SequenceGroup", "Spread", "check_heads", "check_model", "split_sequence"]

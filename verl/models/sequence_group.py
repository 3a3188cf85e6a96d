"""The ranks that share a sequence: their exchanges of tokens for heads, and of results."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from verl.errors import ConfigError


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


def check_heads(heads: int, size: int) -> None:
    """Raise ``ConfigError`` where the attention heads of a model do not divide over the ranks of a sequence."""
    if heads % size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: must divide the model's {heads} attention heads; use one of "
            f"{', '.join(map(str, fits))}"
        )


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

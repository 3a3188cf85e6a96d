"""Log-probabilities and entropies where the vocabulary is divided over ranks (tensor parallelism).

The same numbers as :mod:`verl.models.logprobs`. Each rank has the rows of the output embedding for its part of the
vocabulary and makes the logits of that part only, in chunks of tokens; what crosses ranks is three numbers per token:
the largest logit, the sum of exponentials and the target's logit, and one more for the entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from verl.models.logprobs import CHUNK_NUMBERS_CPU, CHUNK_NUMBERS_DEVICE, IDENTITY, NEVER, LogitTransform


@dataclass(frozen=True)
class VocabShard:
    """A rank's part of the vocabulary.

    Attributes:
        first: number of the first token.
        size: tokens that exist; further rows of the embedding are padding and take no part.
        group: the ranks that have the other parts; None when this rank has all.
    """

    first: int
    size: int
    group: dist.ProcessGroup | None = None

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Combine over the ranks, in place."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values


def parallel_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    chunk_numbers: int | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and optionally the entropy of each distribution, in float32.

    All ranks of the shard's group call it with the same tokens and get the same results. The gradient of ``hidden`` is
    complete on every rank; that of ``weight`` is for the rank's own rows.

    Args:
        hidden: (N, H) states that predict the targets.
        weight: (rows, H) of the output embedding, rows >= ``shard.size``.
        targets: (N,) int64, numbers in the whole vocabulary.
        shard: which tokens ``weight`` is for.
        temperature: divides the logits; must be positive.
        transform: the model's own change to its logits.
        entropy: also return entropies, in nats.
        chunk_numbers: most logits to hold at a time; by default a size that suits the device.
        keep: keep the log-softmax for the backward pass where one chunk holds it; False recomputes it.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive; at 0 a distribution is a single choice")
    log_probs, entropies = _ParallelLogProbs.apply(
        hidden, weight, targets, shard, float(temperature), transform, entropy, _chunk_rows(weight, chunk_numbers), keep
    )
    return log_probs, entropies if entropy else None


@torch.no_grad()
def parallel_sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    chunk_numbers: int | None = None,
) -> Tensor:
    """Sum of the squared probabilities of each distribution, (N,) float32, without gradient.

    Args: as :func:`parallel_token_log_probs`.
    """
    rows = _chunk_rows(weight, chunk_numbers)
    sums = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    for start in range(0, hidden.shape[0], rows):
        log_p, _ = _log_softmax(hidden[start : start + rows], weight, shard, temperature, transform)
        sums[start : start + rows] = log_p.mul_(2.0).exp_().sum(-1)
    return shard.reduce(sums)


def _chunk_rows(weight: Tensor, chunk_numbers: int | None) -> int:
    if chunk_numbers is None:
        chunk_numbers = CHUNK_NUMBERS_CPU if weight.device.type == "cpu" else CHUNK_NUMBERS_DEVICE
    return max(1, chunk_numbers // weight.shape[0])


def _log_softmax(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    temperature: float,
    transform: LogitTransform,
    need_slope: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(n, shard.size) float32 log-probabilities of the rank's tokens under the softmax over all of them.

    And the derivative of the soft cap, if the logits have one and it is asked for.
    """
    x = linear(hidden, weight[: shard.size]).float()
    slope: Tensor | None = None
    if transform.softcap is None:
        if transform.scale != temperature:
            x.mul_(transform.scale / temperature)
    else:
        x.mul_(transform.scale / transform.softcap).tanh_()
        if need_slope:  # of c*tanh(x/c)
            slope = 1.0 - x * x
        x.mul_(transform.softcap / temperature)
    if transform.unsampled is not None:
        mine = transform.unsampled - shard.first
        x.index_fill_(-1, mine[(mine >= 0) & (mine < shard.size)], NEVER)
    largest = x.amax(-1) if shard.size else x.new_full(x.shape[:1], float("-inf"))
    x.sub_(shard.reduce(largest, dist.ReduceOp.MAX)[:, None])
    total = shard.reduce(x.exp().sum(-1))
    return x.sub_(total.log_()[:, None]), slope


class _ParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        transform: LogitTransform,
        entropy: bool,
        rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        # one row for the log-probabilities and one for the entropies, so that one reduction serves both
        results = hidden.new_zeros((2 if entropy else 1, count), dtype=torch.float32)
        kept: Tensor | None = None
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            log_p, _ = _log_softmax(hidden[part], weight, shard, temperature, transform)
            mine, column = _own(targets[part], shard)
            if shard.size:
                results[0, part] = torch.where(mine, log_p.gather(1, column[:, None])[:, 0], 0.0)
            if entropy:
                results[1, part] = log_p.exp().mul_(log_p).sum(-1).neg_()
            if keep and count <= rows and transform.softcap is None:
                kept = log_p
            del log_p  # before the next chunk is made
        shard.reduce(results)
        entropies = results[1] if entropy else results.new_empty(0)
        ctx.save_for_backward(hidden, weight, targets, kept, entropies)
        ctx.settings = (shard, temperature, transform, entropy, rows)
        return results[0], entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, kept, entropies = ctx.saved_tensors
        shard, temperature, transform, entropy, rows = ctx.settings
        count = hidden.shape[0]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        own_weight = weight[: shard.size]
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            log_p, slope = kept, None
            if log_p is None:
                log_p, slope = _log_softmax(hidden[part], weight, shard, temperature, transform, need_slope=True)
            grad = grad_log_probs[part, None]
            d_logits = log_p.exp().neg_()
            if entropy:
                # dH/dx_j = -p_j (log p_j + H);  d log p_t/dx_j = [j=t] - p_j
                d_logits.mul_((log_p + entropies[part, None]).mul_(grad_entropies[part, None]).add_(grad))
            else:
                d_logits.mul_(grad)
            mine, column = _own(targets[part], shard)
            if shard.size:
                d_logits.scatter_add_(1, column[:, None], torch.where(mine, grad[:, 0], 0.0)[:, None])
            if slope is not None:
                d_logits.mul_(slope)
            if transform.scale != temperature:
                d_logits.mul_(transform.scale / temperature)
            d_logits = d_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = d_logits @ own_weight
            if grad_weight is not None:
                grad_weight[: shard.size] += d_logits.t() @ hidden[part]
        if grad_hidden is not None:
            grad_hidden = shard.reduce(grad_hidden).to(hidden.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *([None] * 7)


def _own(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Which targets are in this rank's part, and their columns there (0 for the others)."""
    column = targets - shard.first
    mine = (column >= 0) & (column < shard.size)
    return mine, torch.where(mine, column, 0)

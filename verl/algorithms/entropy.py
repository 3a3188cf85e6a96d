"""Entropy of the policy's next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregate import Count, agg_loss, keep_masked


def entropy_from_logits(logits: Tensor) -> Tensor:
    r"""Entropy :math:`-\sum_v p_v \log p_v` in nats over the last dimension: ``(..., V)`` to ``(...)`` float32.

    A logit of minus infinity (a forbidden token) contributes 0, to the gradient as well.
    """
    log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(dim=-1)


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregated entropy of ``logits`` ``(B, R, V)``; a bonus when it is *subtracted* from the loss.

    Args:
        logits: ``(B, R, V)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`, as are the remaining arguments.
    """
    entropy = entropy_from_logits(keep_masked(logits, response_mask.unsqueeze(-1)))
    return agg_loss(
        entropy,
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )

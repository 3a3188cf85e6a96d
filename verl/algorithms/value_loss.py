"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregate import Count, agg_loss, keep_masked, masked_mean
from verl.errors import ConfigError


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float | None,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Squared error of the value prediction, clipped around the old prediction (as in PPO, arXiv:1707.06347).

    .. math::
        l = \tfrac12 \max\bigl((V - R)^2, (\operatorname{clip}(V, V_{old} - \epsilon, V_{old} + \epsilon) - R)^2\bigr)

    Args:
        vpreds: ``(B, R)`` predictions being trained.
        returns: ``(B, R)`` targets.
        values: ``(B, R)`` predictions at the start of the step.
        response_mask: ``(B, R)``.
        cliprange_value: :math:`\epsilon` in units of reward; ``None`` for no clipping.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`, as are the remaining arguments.

    Returns:
        ``(vf_loss, vf_clipfrac)``: the scalar loss and the share of masked tokens for which the clipped term was
        larger.

    Raises:
        ConfigError: ``cliprange_value`` is negative.
    """
    if cliprange_value is not None and cliprange_value < 0:
        raise ConfigError(f"cliprange_value is {cliprange_value}; it must not be negative (None turns clipping off)")
    vpreds, returns, values = (keep_masked(x, response_mask) for x in (vpreds, returns, values))
    losses = (vpreds - returns).square()
    clipped = torch.zeros_like(losses, dtype=torch.bool)
    if cliprange_value is not None:
        bounded = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
        bounded_losses = (bounded - returns).square()
        clipped = bounded_losses > losses
        losses = torch.maximum(losses, bounded_losses)
    loss = 0.5 * agg_loss(
        losses,
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
    return loss, masked_mean(clipped.double(), response_mask)

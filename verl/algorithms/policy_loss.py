"""The PPO surrogate: clipped importance ratios, with asymmetric and dual clipping."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.aggregate import agg_loss, masked_mean
from verl.algorithms.registry import MetricValue, register_policy_loss
from verl.algorithms.settings import setting
from verl.algorithms.surrogate import clip_widths, loss_inputs, pessimistic, reduce_losses, token_means
from verl.errors import ConfigError


class ClippedSurrogate(NamedTuple):
    """Per-token pieces of the surrogate, all ``(B, R)`` and finite outside the mask."""

    losses: Tensor
    clipped: Tensor
    lower_clipped: Tensor
    approx_kl: Tensor


def clipped_surrogate(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
) -> ClippedSurrogate:
    """Token losses of :func:`compute_policy_loss`, and which tokens were clipped.

    Raises:
        ConfigError: ``clip_ratio_c`` is not above 1, or a clip width is negative.
    """
    if clip_ratio_c <= 1.0:
        raise ConfigError(f"clip_ratio_c is {clip_ratio_c}; dual clipping needs a bound above 1 (usual: 3.0)")
    if clip_low < 0 or clip_high < 0:
        raise ConfigError(f"clip widths are {clip_low} and {clip_high}; they must not be negative")
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped = pessimistic(x.advantages, x.ratio, clip_low, clip_high)
    floor = -x.advantages * clip_ratio_c
    return ClippedSurrogate(
        losses=torch.where(x.advantages < 0, torch.minimum(losses, floor), losses),
        clipped=clipped,
        lower_clipped=((losses > floor) & (x.advantages < 0)).detach(),
        approx_kl=-x.log_ratio.detach(),
    )


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The clipped PPO loss (Schulman et al., arXiv:1707.06347) with counts of the given tensors.

    With :math:`\rho = \exp(\log\pi - \log\pi_{old})`:

    .. math::
        l = \max\bigl(-A\rho,\; -A\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high})\bigr),
        \qquad l \leftarrow \min(l, -cA) \text{ where } A < 0

    The separate widths are those of DAPO (arXiv:2503.14476); the bound *c* is dual clipping (arXiv:1912.09729). The
    log ratio is clamped to ±20.

    Args:
        old_log_prob: ``(B, R)`` under the policy at the start of the step.
        log_prob: ``(B, R)`` under the policy being trained.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        cliprange: width used where a separate one is not given.
        cliprange_low: :math:`\epsilon_{low}`.
        cliprange_high: :math:`\epsilon_{high}`.
        clip_ratio_c: *c*, above 1.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.

    Returns:
        ``(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)``, scalars; the last three are token means.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ConfigError("no clip width: give cliprange, or both cliprange_low and cliprange_high")
    s = clipped_surrogate(old_log_prob, log_prob, advantages, response_mask, low, high, clip_ratio_c)
    return (
        agg_loss(s.losses, response_mask, loss_agg_mode),
        masked_mean(s.clipped.double(), response_mask),
        masked_mean(s.approx_kl.double(), response_mask),
        masked_mean(s.lower_clipped.double(), response_mask),
    )


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    """The clipped PPO loss as a registered loss; formula in :func:`compute_policy_loss`.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``clip_ratio`` (0.2), ``clip_ratio_low`` and ``clip_ratio_high`` (default:
            ``clip_ratio``), ``clip_ratio_c`` (3.0) and ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy, applied after clipping.

    Returns:
        ``(loss, metrics)``: ``actor/pg_clipfrac``, ``actor/ppo_kl`` (k1, of old against new) and
        ``actor/pg_clipfrac_lower``.
    """
    low, high = clip_widths(config)
    s = clipped_surrogate(
        old_log_prob, log_prob, advantages, response_mask, low, high, setting(config, "clip_ratio_c", 3.0)
    )
    metrics = token_means(response_mask, pg_clipfrac=s.clipped, ppo_kl=s.approx_kl, pg_clipfrac_lower=s.lower_clipped)
    return reduce_losses(s.losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics

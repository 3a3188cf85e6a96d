"""DPPO: a trust region in divergence instead of ratio (Qi et al., arXiv:2602.04879)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.registry import MetricValue, register_policy_loss
from verl.algorithms.surrogate import Inputs, clip_widths, loss_inputs, reduce_losses, token_means


def binary_total_variation(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    r"""Total variation :math:`|\pi(y_t) - \pi_{old}(y_t)|` of "this token or another one"."""
    return (log_prob.double().exp() - old_log_prob.double().exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    r"""KL divergence of "this token or another one".

    .. math:: \mu\log\frac{\mu}{\pi} + (1-\mu)\log\frac{1-\mu}{1-\pi}, \qquad \mu = \pi_{old}(y_t)
    """
    new, old = log_prob.double().clamp(max=0.0), old_log_prob.double().clamp(max=0.0)
    old_p, old_rest, new_rest = old.exp(), -torch.expm1(old), -torch.expm1(new)
    # xlogy(0, 0) is 0: a token that was certain says nothing about the others.
    return old_p * (old - new) + torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, new_rest)


def _masked_surrogate(
    x: Inputs,
    divergence: Callable[[Tensor, Tensor], Tensor],
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    low, high = clip_widths(config)
    with torch.no_grad():
        distance = divergence(x.log_prob, x.old_log_prob)
        above = (x.advantages > 0) & (x.log_ratio > 0) & (distance > high)
        below = (x.advantages < 0) & (x.log_ratio < 0) & (distance > low)
        dropped = above | below
    losses = torch.where(dropped, 0.0, -x.advantages * x.ratio)
    metrics = token_means(x.mask, pg_clipfrac=dropped, ppo_kl=-x.log_ratio, dppo_divergence=distance)
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""DPPO with total variation: no clipping, but tokens that left the trust region are dropped.

    .. math::
        l = -M A \rho, \qquad M = \begin{cases}
        0 & A > 0,\ \rho > 1,\ D > \delta_{high} \\ 0 & A < 0,\ \rho < 1,\ D > \delta_{low} \\ 1 & \text{else}
        \end{cases}, \qquad D = |\pi(y_t) - \pi_{old}(y_t)|

    A ratio bound holds rare tokens back and lets frequent ones go far; a bound on the probability's change does
    neither. :math:`\delta` are ``clip_ratio_low`` and ``clip_ratio_high``. A token that moves back towards the old
    policy always keeps its gradient. The paper measures against the policy that *sampled* (see ``bypass_mode``).

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.

    Returns:
        ``(loss, metrics)``: ``actor/pg_clipfrac`` (share of dropped tokens), ``actor/ppo_kl`` and
        ``actor/dppo_divergence`` (mean *D*).
    """
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    return _masked_surrogate(x, binary_total_variation, response_mask, loss_agg_mode, config, rollout_is_weights)


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""DPPO with KL divergence: as ``dppo_tv`` with *D* from :func:`binary_kl`.

    A bound in nats is smaller than one on the ratio: with ``clip_ratio`` left at 0.2 it hardly ever acts; 0.05 is
    usual.

    Args, returns: as :func:`compute_policy_loss_dppo_tv`.
    """
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    return _masked_surrogate(x, binary_kl, response_mask, loss_agg_mode, config, rollout_is_weights)

"""Policy losses without a hard edge: every token keeps a gradient (SAPO, CISPO, DRO)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.registry import MetricValue, register_policy_loss
from verl.algorithms.settings import setting
from verl.algorithms.surrogate import clip_widths, loss_inputs, loss_setting, reduce_losses, token_means
from verl.errors import ConfigError


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""SAPO: a sigmoid gate in place of clipping (Gao et al., arXiv:2511.20347).

    .. math::
        l = -A\,\frac{4}{\tau}\,\sigma\bigl(\tau(\rho - 1)\bigr), \qquad
        \tau = \tau_{pos} \text{ if } A > 0 \text{ else } \tau_{neg}

    The factor makes the gradient at :math:`\rho = 1` that of plain policy gradient; away from 1 it fades, faster
    with a larger :math:`\tau`. The *value* at :math:`\rho = 1` is :math:`-2A/\tau`, not :math:`-A`.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`; the paper's is ``seq-mean-token-mean``.
        config: actor section; gives ``tau_pos`` (1.0), ``tau_neg`` (1.05) and ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.

    Returns:
        ``(loss, metrics)``: ``actor/ppo_kl`` and ``actor/sapo_gate`` (mean slope of the gate relative to
        :math:`\rho = 1`: 1 on policy, towards 0 far from it).

    Raises:
        ConfigError: a temperature is not positive.
    """
    positive, negative = setting(config, "tau_pos", 1.0), setting(config, "tau_neg", 1.05)
    if positive <= 0 or negative <= 0:
        raise ConfigError(f"tau_pos is {positive} and tau_neg is {negative}; both must be positive")
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    new = x.log_ratio.new_tensor
    tau = torch.where(x.advantages > 0, new(positive), new(negative))
    gate = torch.sigmoid(tau * (x.ratio - 1))
    metrics = token_means(x.mask, ppo_kl=-x.log_ratio, sapo_gate=4 * gate * (1 - gate))
    losses = -x.advantages * gate * 4 / tau
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""CISPO: policy gradient with a clipped, constant importance weight (MiniMax, arXiv:2506.13585).

    .. math:: l = -\operatorname{sg}\bigl[\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high})\bigr]\,
        A \log\pi(y_t)

    Clipping bounds a token's weight and never removes its gradient. The paper leaves the lower side open, here
    ``clip_ratio_low=1``, and tunes the upper one.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.

    Returns:
        ``(loss, metrics)``: ``actor/pg_clipfrac`` (share of tokens whose weight was clipped) and ``actor/ppo_kl``.
    """
    low, high = clip_widths(config)
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    ratio = x.ratio.detach()
    weight = ratio.clamp(max(1 - low, 0.0), 1 + high)
    metrics = token_means(x.mask, pg_clipfrac=weight != ratio, ppo_kl=-x.log_ratio)
    losses = -weight * x.advantages * x.log_prob
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""DRO: policy gradient with a squared log-ratio penalty, for off-policy data (Richemond et al., arXiv:2405.19107).

    .. math:: l = -A \log\pi(y_t) + \tfrac{\beta}{2}\bigl(\log\pi(y_t) - \log\pi_{old}(y_t)\bigr)^2

    The minimum in :math:`\log\pi` lies at :math:`\log\pi_{old} + A/\beta`: the penalty says how far an advantage may
    carry a token, with no ratio and no clipping. The paper writes it for whole sequences and a learned value; applied
    to tokens it is also used by Kimi k1.5 (arXiv:2501.12599).

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``policy_loss.dro_beta`` (0.05) and ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.

    Returns:
        ``(loss, metrics)``: ``actor/ppo_kl`` and ``actor/dro_penalty`` (the penalty term per token).

    Raises:
        ConfigError: ``dro_beta`` is negative.
    """
    beta = loss_setting(config, "dro_beta", 0.05)
    if beta < 0:
        raise ConfigError(f"policy_loss.dro_beta is {beta}; a negative penalty would push the policy away")
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    # The square needs no bound on the log ratio, and a clamped one would lose the pull back.
    penalty = 0.5 * beta * (x.log_prob - x.old_log_prob).square()
    metrics = token_means(x.mask, ppo_kl=-x.log_ratio, dro_penalty=penalty)
    losses = penalty - x.advantages * x.log_prob
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics

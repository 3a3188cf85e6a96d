"""Policy losses whose importance ratio belongs to the whole sequence: GSPO and GMPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.registry import MetricValue, register_policy_loss
from verl.algorithms.surrogate import (
    clip_widths,
    loss_inputs,
    pessimistic,
    reduce_losses,
    sequence_mean,
    token_means,
)


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""GSPO: PPO's clipping with one length-normalised ratio for each sequence (Zheng et al., arXiv:2507.18071).

    .. math::
        s_i = \exp\Bigl(\tfrac{1}{T_i}\sum_t \log\tfrac{\pi(y_t)}{\pi_{old}(y_t)}\Bigr), \qquad
        l_i = \max\bigl(-A_i s_i,\; -A_i \operatorname{clip}(s_i, 1-\epsilon_{low}, 1+\epsilon_{high})\bigr)

    Every token of a sequence gets the loss :math:`l_i`; :math:`A_i` is the mean of its advantages. With
    ``seq-mean-token-mean`` this is the paper's objective. The ratio of a sequence moves far less than that of a
    token: the paper clips at 3e-4 and 4e-4, and the default width of 0.2 would never clip.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.

    Returns:
        ``(loss, metrics)``: ``actor/pg_clipfrac`` (share of tokens in sequences that were clipped) and
        ``actor/ppo_kl``.
    """
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped = pessimistic(
        sequence_mean(x.advantages, x.mask), sequence_mean(x.log_ratio, x.mask).exp(), *clip_widths(config)
    )
    metrics = token_means(x.mask, pg_clipfrac=clipped.expand_as(x.mask), ppo_kl=-x.log_ratio)
    return reduce_losses(losses.expand_as(x.mask), response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("gspo_token")
def compute_policy_loss_gspo_token(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""GSPO in its token form: the sequence's ratio in value, each token's own log-prob in gradient.

    .. math::
        s_{it} = \operatorname{sg}[s_i]\,\frac{\pi(y_t)}{\operatorname{sg}[\pi(y_t)]}, \qquad
        l_{it} = \max\bigl(-A_{it} s_{it},\; -A_{it} \operatorname{clip}(s_{it}, 1-\epsilon_{low},
        1+\epsilon_{high})\bigr)

    For advantages that differ between the tokens of a sequence (Zheng et al., arXiv:2507.18071, section 4.3). With
    equal ones and ``seq-mean-token-mean``, value and gradient are those of ``gspo``.

    Args, returns: as :func:`compute_policy_loss_gspo`.
    """
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    sequence = sequence_mean(x.log_ratio, x.mask).detach()
    losses, clipped = pessimistic(
        x.advantages, (sequence + x.log_prob - x.log_prob.detach()).exp(), *clip_widths(config)
    )
    metrics = token_means(x.mask, pg_clipfrac=clipped, ppo_kl=-x.log_ratio)
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""GMPO: the geometric mean of the clipped token ratios (Zhao et al., arXiv:2507.20673).

    .. math::
        l_i = -A_i \exp\Bigl(\tfrac{1}{T_i}\sum_t c_t\Bigr), \qquad
        c_t = \begin{cases} \min(d_t, \epsilon_{high}) & A_i \ge 0 \\ \max(d_t, -\epsilon_{low}) & A_i < 0 \end{cases},
        \qquad d_t = \log\frac{\pi(y_t)}{\pi_{old}(y_t)}

    Tokens are clipped one by one, on the side that PPO clips, and in *log* space: the clip widths here bound the log
    ratio. The paper uses 0.4 for both. Every token of a sequence gets the loss :math:`l_i`; :math:`A_i` is the mean
    of its advantages.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`; the paper's is ``seq-mean-token-mean``.
        config: actor section; gives ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors; each multiplies the loss of its token.

    Returns:
        ``(loss, metrics)``: ``actor/pg_clipfrac`` (share of clipped tokens) and ``actor/ppo_kl``.
    """
    low, high = clip_widths(config)
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    advantage = sequence_mean(x.advantages, x.mask)
    held = torch.where(advantage < 0, x.log_ratio.clamp(min=-low), x.log_ratio.clamp(max=high))
    losses = (-advantage * sequence_mean(held, x.mask).exp()).expand_as(x.mask)
    metrics = token_means(x.mask, pg_clipfrac=held != x.log_ratio, ppo_kl=-x.log_ratio)
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics

"""GPG: policy gradient without ratio, clipping, critic or reference (Chu et al., arXiv:2504.02546)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked
from verl.algorithms.group import Index, against_baseline, scores_and_groups, spread
from verl.algorithms.registry import MetricValue, register_adv_est, register_policy_loss
from verl.algorithms.surrogate import reduce_losses


@register_adv_est("gpg")
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""GPG advantage: the centred score, rescaled for the samples that carry no signal (arXiv:2504.02546).

    .. math:: A_i = \alpha\,\frac{B}{B - M}\,\frac{s_i - \operatorname{mean}(s)}{F}

    *B* is the number of samples and *M* the number whose advantage is 0, so the gradient keeps its size when many
    groups are all right or all wrong. *M* counts samples with zero *advantage*, as the paper does; counting zero
    *scores*, as some implementations do, gives other numbers. One-sample and tied groups: see
    :mod:`verl.algorithms.group`.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: not used; part of the common signature of group estimators.
        f_norm: *F*, a constant divisor.
        alpha: extra factor.
        config: not used; ``f_norm`` and ``alpha`` may be set in the ``algorithm`` section.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        centred = against_baseline(scores, groups.mean(scores)[groups.ids], groups)
        informative = (centred != 0).sum().clamp(min=1)
        result = spread(alpha * (scores.shape[0] / informative) * centred / f_norm, response_mask)
        return result, result.clone()


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""GPG loss: :math:`-A_t \log\pi(y_t)`, no importance ratio (arXiv:2504.02546).

    Args:
        old_log_prob: not used; part of the common signature.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: gives ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.
    """
    losses = -keep_masked(log_prob, response_mask) * keep_masked(advantages.detach(), response_mask)
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), {}

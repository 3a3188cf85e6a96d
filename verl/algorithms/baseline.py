"""Critic-free estimators that need no groups: the baseline comes from the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.algorithms.settings import setting


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the masked rewards from each token on, ``(B, R)`` float32, 0 outside the mask.

    As in :mod:`verl.algorithms.gae`, only masked tokens are time steps: tool output between them is not discounted for.
    """
    mask = response_mask.bool().t().contiguous()
    rewards = keep_masked(token_level_rewards.float().t(), mask)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(rewards.shape[0])):
        running = torch.where(mask[t], rewards[t] + gamma * running, running)
        returns[t] = running
    return keep_masked(returns.t(), response_mask)


@register_adv_est("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""REINFORCE++: discounted returns whitened over the batch (Hu et al., arXiv:2501.03262).

    .. math:: R_t = \sum_{k \ge t} \gamma^{k-t} r_k, \qquad A = \operatorname{whiten}(R)

    Whitening runs over all masked tokens (variance with n - 1, epsilon 1e-8). Meant for rewards that include the KL
    penalty per token (``algorithm.use_kl_in_reward``).

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        config: gives ``gamma`` (default 1.0).

    Returns:
        ``(advantages, returns)``, both ``(B, R)`` float32, 0 outside the mask.
    """
    with torch.no_grad():
        returns = discounted_returns(token_level_rewards, response_mask, setting(config, "gamma", 1.0))
        return masked_whiten(returns, response_mask), returns

"""Critic-free estimators that need no groups: the baseline comes from the whole batch, or from a greedy answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.algorithms.settings import setting
from verl.errors import DataError


def discounted_returns(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Discounted sum of the masked rewards from each token on, ``(B, R)`` in ``dtype``, 0 outside the mask.

    As in :mod:`verl.algorithms.gae`, only masked tokens are time steps: tool output between them is not discounted for.
    """
    mask = response_mask.bool().t().contiguous()
    rewards = keep_masked(token_level_rewards.to(dtype).t(), mask)
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


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""ReMax: the rewards to come, less the score of the prompt's greedy answer (Li et al., arXiv:2310.10505).

    .. math:: A_t = \sum_{k \ge t} r_k - b

    *b* is made in the rollout phase by the policy itself, so it needs neither a critic nor several samples a prompt.
    There is no discount and no whitening.

    Args:
        token_level_rewards: ``(B, R)``.
        reward_baselines: ``(B,)`` score of the greedy answer.
        response_mask: ``(B, R)``.
        config: not used.

    Returns:
        ``(advantages, returns)``, both ``(B, R)`` float32, 0 outside the mask; returns are the sums themselves.

    Raises:
        DataError: ``reward_baselines`` does not have one number per sample.
    """
    with torch.no_grad():
        if reward_baselines.shape != token_level_rewards.shape[:1]:
            raise DataError(
                f"reward_baselines has shape {tuple(reward_baselines.shape)} for {token_level_rewards.shape[0]} "
                "samples; give one score per sample"
            )
        returns = discounted_returns(token_level_rewards, response_mask, 1.0, torch.float64)
        advantages = keep_masked(returns - reward_baselines.double().unsqueeze(-1), response_mask)
        return advantages.float(), returns.float()

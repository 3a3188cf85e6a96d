"""Generalised advantage estimation: the critic-based estimator of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_whiten
from verl.algorithms.registry import register_adv_est


@register_adv_est("gae")
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438).

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}, \qquad R_t = A_t + V_t

    "t + 1" is the next token *sampled by the policy*: tool output and padding are not time steps, so the recursion
    jumps over positions where the mask is 0 without discounting for them. The value after the last sampled token is 0,
    also for a response that was cut at the length limit.

    Returned advantages are whitened over all masked tokens of the batch (variance with n - 1, epsilon 1e-8); returns
    use the advantages before whitening.

    Args:
        token_level_rewards: ``(B, R)``; only rewards on masked tokens count.
        values: ``(B, R)``, the critic's estimate before each token.
        response_mask: ``(B, R)``, 1 for tokens sampled by the policy.
        gamma: discount factor.
        lam: mixing of one-step (0) and Monte Carlo (1) estimates.

    Returns:
        ``(advantages, returns)``, both ``(B, R)`` float32, 0 outside the mask.
    """
    with torch.no_grad():
        # Time-major, so that each step of the recursion reads contiguous memory.
        mask = response_mask.bool().t().contiguous()
        rewards = keep_masked(token_level_rewards.float().t(), mask)
        value = keep_masked(values.float().t(), mask)
        advantage = torch.zeros_like(value)
        next_value = value.new_zeros(value.shape[1])
        next_advantage = value.new_zeros(value.shape[1])
        for t in reversed(range(value.shape[0])):
            delta = rewards[t] + gamma * next_value - value[t]
            next_advantage = torch.where(mask[t], delta + gamma * lam * next_advantage, next_advantage)
            next_value = torch.where(mask[t], value[t], next_value)
            advantage[t] = next_advantage
        raw = keep_masked(advantage.t(), response_mask)
        returns = keep_masked(raw + value.t(), response_mask)
        return masked_whiten(raw, response_mask), returns

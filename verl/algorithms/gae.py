"""Generalised advantage estimation: the critic-based estimator of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.errors import ConfigError


def advantages_of_values(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """The recursion of :func:`compute_gae_advantage_return`, not whitened.

    Args:
        rewards: ``(B, R)``.
        values: ``(B, R)``.
        response_mask: ``(B, R)``.
        gamma: discount factor.
        lam: one number, or ``(B,)`` one for each sequence.

    Returns:
        ``(B, R)`` float32, 0 outside the mask.
    """
    # Time-major, so that each step of the recursion reads contiguous memory.
    mask = response_mask.bool().t().contiguous()
    reward = keep_masked(rewards.float().t(), mask)
    value = keep_masked(values.float().t(), mask)
    advantage = torch.zeros_like(value)
    next_value = value.new_zeros(value.shape[1])
    next_advantage = value.new_zeros(value.shape[1])
    for t in reversed(range(value.shape[0])):
        delta = reward[t] + gamma * next_value - value[t]
        next_advantage = torch.where(mask[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[t], value[t], next_value)
        advantage[t] = next_advantage
    return keep_masked(advantage.t(), response_mask)


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    r"""VAPO's lambda for a response of *l* sampled tokens: :math:`1 - 1/(\alpha l)`, at least 0, ``(B,)`` float32.

    The weights :math:`\lambda^k` of a long response then reach as far, measured in its length, as those of a short one.

    Raises:
        ConfigError: ``alpha`` is not positive.
    """
    if alpha <= 0:
        raise ConfigError(f"algorithm.length_adaptive_alpha is {alpha}; it must be positive (VAPO: 0.05)")
    length = response_mask.bool().sum(-1).clamp(min=1).float()
    return (1 - 1 / (alpha * length)).clamp(min=0.0)


@register_adv_est("gae")
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    length_adaptive_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438).

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}, \qquad R_t = A_t + V_t

    "t + 1" is the next token *sampled by the policy*: tool output and padding are not time steps, so the recursion
    jumps over positions where the mask is 0 without discounting for them. The value after the last sampled token is 0,
    also for a response that was cut at the length limit.

    Returned advantages are whitened over all masked tokens of the batch (variance with n - 1, epsilon 1e-8); returns
    use the advantages before whitening.

    VAPO (arXiv:2504.05118) gives critic and policy a lambda each, so that the critic learns from unbiased returns
    (``lam_critic=1.0``) while the policy keeps its variance low, and makes the policy's depend on the response's
    length, :math:`\lambda = 1 - 1/(\alpha l)` (``length_adaptive_alpha=0.05``).

    Args:
        token_level_rewards: ``(B, R)``; only rewards on masked tokens count.
        values: ``(B, R)``, the critic's estimate before each token.
        response_mask: ``(B, R)``, 1 for tokens sampled by the policy.
        gamma: discount factor.
        lam: mixing of one-step (0) and Monte Carlo (1) estimates.
        lam_critic: the same for ``returns``; default ``lam``.
        length_adaptive_alpha: :math:`\alpha`; given, it replaces ``lam`` for ``advantages``.

    Returns:
        ``(advantages, returns)``, both ``(B, R)`` float32, 0 outside the mask.
    """
    with torch.no_grad():
        policy_lam: float | Tensor = lam
        if length_adaptive_alpha is not None:
            policy_lam = length_adaptive_lambda(response_mask, length_adaptive_alpha)
        critic_lam = lam if lam_critic is None else lam_critic
        raw = advantages_of_values(token_level_rewards, values, response_mask, gamma, policy_lam)
        target = raw
        if length_adaptive_alpha is not None or critic_lam != lam:
            target = advantages_of_values(token_level_rewards, values, response_mask, gamma, critic_lam)
        return masked_whiten(raw, response_mask), target + keep_masked(values.float(), response_mask)

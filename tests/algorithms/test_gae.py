from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import normal, poison, ragged_mask
from verl.algorithms.gae import compute_gae_advantage_return, length_adaptive_lambda
from verl.errors import ConfigError


def reference(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """GAE as the double sum of its definition, over the sampled tokens only; advantages not whitened."""
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for i in range(len(values)):
        at = np.flatnonzero(mask[i])
        r, v = rewards[i, at], np.append(values[i, at], 0.0)
        delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(at))]
        for k, t in enumerate(at):
            advantages[i, t] = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(at)))
            returns[i, t] = advantages[i, t] + v[k]
    return advantages, returns


def test_literal_numbers() -> None:
    # gamma = lam = 0.5. Sequence 1: deltas 0+.5*2-1=0, 0+.5*4-2=0, 8-4=4; advantages 4/16=.25, 1, 4.
    rewards = torch.tensor([[0.0, 0.0, 8.0], [1.0, 0.0, 0.0]])
    values = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.5)
    torch.testing.assert_close(returns, torch.tensor([[1.25, 3.0, 8.0], [1.0, 0.0, 0.0]]))
    raw = np.array([0.25, 1.0, 4.0, 0.5])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(advantages[mask.bool()], expected, rtol=1e-6)
    assert advantages[1, 1:].tolist() == [0.0, 0.0]


def test_tool_output_is_no_time_step() -> None:
    """A hole in the mask gives what the sequence without the hole gives."""
    rewards, values = torch.tensor([[0.1, 0.2, 1.0]]), torch.tensor([[0.3, -0.4, 0.6]])
    dense, dense_returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 3), 0.9, 0.8)
    hole_mask = torch.tensor([[1, 0, 0, 1, 0, 1, 0]])
    at = hole_mask.bool()
    wide_rewards, wide_values = torch.full((1, 7), float("nan")), torch.full((1, 7), 99.0)
    wide_rewards[at], wide_values[at] = rewards[0], values[0]
    holed, holed_returns = compute_gae_advantage_return(wide_rewards, wide_values, hole_mask, 0.9, 0.8)
    torch.testing.assert_close(holed[at], dense[0])
    torch.testing.assert_close(holed_returns[at], dense_returns[0])
    assert not holed[~at].any()
    assert not holed_returns[~at].any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_equals_the_definition(seed: int, gamma: float, lam: float) -> None:
    mask = ragged_mask(4, 6, seed)
    rewards, values = normal(4, 6, seed=seed), normal(4, 6, seed=seed + 1)
    advantages, returns = compute_gae_advantage_return(poison(rewards, mask), poison(values, mask), mask, gamma, lam)
    raw, expected_returns = reference(rewards.numpy(), values.numpy(), mask.numpy(), gamma, lam)
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-4, atol=1e-5)
    chosen = raw[mask.numpy() > 0]
    white = np.where(mask.numpy() > 0, (raw - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0.0)
    np.testing.assert_allclose(advantages, white, rtol=1e-4, atol=1e-4)
    assert advantages.dtype == returns.dtype == torch.float32


def test_lambda_one_returns_are_discounted_rewards_whatever_the_values() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    _, returns = compute_gae_advantage_return(rewards, torch.tensor([[5.0, -3.0, 2.0]]), torch.ones(1, 3), 0.5, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.25, 0.5, 1.0]]))


def test_no_gradient_flows_into_the_critic() -> None:
    values = torch.zeros(1, 2, requires_grad=True)
    advantages, returns = compute_gae_advantage_return(torch.ones(1, 2), values, torch.ones(1, 2), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize("order", [[1, 0, 3, 2], [3, 2, 1, 0]])
def test_sample_order_only_permutes_the_result(order: list[int]) -> None:
    mask, rewards, values = ragged_mask(4, 6), normal(4, 6, seed=1), normal(4, 6, seed=2)
    straight = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.9)
    shuffled = compute_gae_advantage_return(rewards[order], values[order], mask[order], 0.9, 0.9)
    for a, b in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(a[order], b)


def test_the_critic_may_have_a_lambda_of_its_own() -> None:
    """VAPO: returns of lambda 1 are the rewards to come, whatever lambda the policy uses."""
    rewards, values = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.ones(1, 3)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5, lam_critic=1.0)
    assert returns.tolist() == [[8.0, 8.0, 8.0]]
    # deltas 1, 2, 4; advantages 1 + .5 * (2 + .5 * 4) = 3, 4, 4
    raw = np.array([3.0, 4.0, 4.0])
    np.testing.assert_allclose(advantages[0], (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-6)
    plain, plain_returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5)
    torch.testing.assert_close(plain, advantages)
    assert plain_returns.tolist() == [[4.0, 6.0, 8.0]]


def test_lambda_may_depend_on_the_length_of_the_response() -> None:
    # alpha 0.5: four sampled tokens (one tool token between) have lambda 1 - 1/2, two tokens 1 - 1 = 0
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 8.0], [0.0, 4.0, 0.0, 0.0, 0.0]])
    values = torch.zeros(2, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    advantages, returns = compute_gae_advantage_return(
        rewards, values, mask, 1.0, 0.9, lam_critic=1.0, length_adaptive_alpha=0.5
    )
    raw = np.array([1.0, 2.0, 4.0, 8.0, 0.0, 4.0])
    np.testing.assert_allclose(advantages[mask.bool()], (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-6)
    assert returns[mask.bool()].tolist() == [8.0, 8.0, 8.0, 8.0, 4.0, 4.0]
    lam = length_adaptive_lambda(torch.ones(1, 100), 0.05)
    assert lam.tolist() == pytest.approx([1 - 1 / 5])
    assert length_adaptive_lambda(torch.ones(1, 10), 0.05).tolist() == [0.0]  # 1 - 2 would alternate signs
    with pytest.raises(ConfigError, match="length_adaptive_alpha is 0"):
        length_adaptive_lambda(mask, 0.0)

"""PRIME on numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.algorithms.prime import compute_prime_advantage, implicit_reward_loss, implicit_rewards

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
UID = np.array(["a", "a", "a"], dtype=object)


def test_rewards_are_scaled_log_ratios() -> None:
    rewards = implicit_rewards(
        torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, 3.0]]), torch.tensor([[1, 1, 0]]), 0.1
    )
    np.testing.assert_allclose(rewards.numpy(), [[0.05, -0.1, 0.0]], rtol=1e-6)


def test_loss_is_the_cross_entropy_of_the_outcome() -> None:
    log_prob = torch.tensor([[1.0, 1.0, NAN], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[0.0, 0.0, NAN], [0.0, 1.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # sums of rewards with beta 1/2: 1 and -3/2
    loss, accuracy = implicit_reward_loss(log_prob, ref, mask, torch.tensor([1.0, 1.0]), 0.5)
    sigmoid = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.5))]
    assert loss.item() == pytest.approx(-(math.log(sigmoid[0]) + math.log(sigmoid[1])) / 2, rel=1e-12)
    assert accuracy.item() == 0.5
    loss.backward()
    assert log_prob.grad is not None
    # d loss / d log_prob = beta (sigmoid - outcome) / 2 responses
    expected = [[0.25 * (sigmoid[0] - 1)] * 2 + [0.0], [0.25 * (sigmoid[1] - 1)] * 3]
    np.testing.assert_allclose(log_prob.grad.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("rounding", [-1e-7, 0.0, 1e-7])
def test_accuracy_does_not_hang_on_rounding(rounding: float) -> None:
    """A model equal to its reference has sums of zero, whose sign depends on how the batch was split."""
    log_prob = torch.tensor([[-1.0 + rounding], [1.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.0], [0.0]], dtype=torch.float64)
    _, accuracy = implicit_reward_loss(log_prob, ref, torch.ones(2, 1), torch.tensor([1.0, 1.0]), 0.5)
    assert accuracy.item() == 0.75


def test_pieces_of_a_mini_batch_add_up_and_empty_rows_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    log_prob, ref = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])
    outcomes = torch.tensor([1.0, 0.0, NAN, 0.25])
    whole, _ = implicit_reward_loss(log_prob, ref, mask, outcomes, 0.3)
    pieces = [
        implicit_reward_loss(log_prob[rows], ref[rows], mask[rows], outcomes[rows], 0.3, dp_size=2, global_batch_size=3)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert sum(loss.item() for loss, _ in pieces) / 2 == pytest.approx(whole.item(), rel=1e-12)


def test_advantage() -> None:
    rewards = torch.tensor([[0.0, 1.0, NAN], [0.0, 0.0, 0.0], [1.0, NAN, NAN]])
    process = torch.tensor([[1.0, 3.0, NAN], [0.0, 3.0, 0.0], [6.0, NAN, NAN]])
    advantages, returns = compute_prime_advantage(
        rewards, process, MASK, UID, process_reward_coef=2.0, outcome_reward_coef=4.0
    )
    # mean process rewards 2, 1, 6: baselines of the others 3.5, 4, 1.5; outcomes 1, 0, 1: 1 - 1/2, 0 - 1, 1 - 1/2
    expected = [
        [2 * (-2.5 - 0.5) + 2, 2 * -0.5 + 2, 0],
        [2 * (-4 - 1 - 4) - 4, 2 * (-1 - 4) - 4, 2 * -4 - 4],
        [2 * 4.5 + 2, 0, 0],
    ]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(returns.numpy(), advantages.numpy())


def test_discount_and_lone_samples() -> None:
    advantages, _ = compute_prime_advantage(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), ["x"], gamma=0.5
    )
    # nothing to compare with: the returns themselves, 1 + 0.5 * 2 and 2, plus the outcome
    np.testing.assert_allclose(advantages.numpy(), [[3.0, 3.0]], rtol=1e-6)


def test_a_response_without_a_token_is_not_among_the_others() -> None:
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    process = torch.tensor([[1.0, 1.0], [2.0, 2.0], [NAN, NAN]])
    advantages, _ = compute_prime_advantage(torch.zeros(3, 2), process, mask, UID)
    np.testing.assert_allclose(advantages.numpy(), [[-2, -1], [2, 1], [0, 0]], rtol=1e-6)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.algorithms.batches import normal, poison
from verl.algorithms.token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
    token_energy,
)
from verl.errors import SchemaError

BOTH = [compute_optimal_token_baseline_advantage, compute_multi_turn_optimal_token_baseline_advantage]


def test_energy_is_the_squared_norm_of_the_logit_gradient() -> None:
    logits = normal(2, 3, 5, seed=1).requires_grad_()
    tokens = torch.tensor([[0, 4, 2], [3, 3, 1]])
    log_p = torch.log_softmax(logits, -1)
    chosen = log_p.gather(-1, tokens[..., None])[..., 0]
    chosen.sum().backward()
    energy = token_energy(chosen.detach(), torch.ones(2, 3), sum_pi_squared=log_p.detach().exp().square().sum(-1))
    torch.testing.assert_close(energy, logits.grad.square().sum(-1))


def test_energy_from_the_entropy_is_exact_for_even_distributions_and_a_bound_else() -> None:
    mask = torch.tensor([[1, 1, 0]])
    log_p = torch.tensor([[math.log(0.25), math.log(0.7), float("nan")]])
    entropy = torch.tensor([[math.log(4), -(0.7 * math.log(0.7) + 0.3 * math.log(0.3)), float("nan")]])
    energy = token_energy(log_p, mask, entropys=entropy)
    assert energy[0, 0].item() == pytest.approx(1 - 0.5 + 0.25)
    exact = 1 - 1.4 + 0.49 + 0.09
    assert 0.3**2 <= energy[0, 1].item() <= exact
    assert energy[0, 2].item() == 0.0
    with pytest.raises(SchemaError, match="sum_pi_squared or entropys"):
        token_energy(log_p, mask)


def certain(*energies: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and sums of squares that give these energies: probability 1/2, sum = energy."""
    return torch.full((len(energies),), math.log(0.5)), torch.tensor(energies)


def test_literal_numbers() -> None:
    # two responses of a prompt; energies 1, 1, 2 and 3; scores 6 and 2
    log_p, squares = certain(1.0, 1.0, 2.0, 3.0)
    log_p, squares = torch.stack([log_p[:3], log_p[:3]]), torch.stack([squares[:3], squares[[3, 0, 0]]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 1.0, 5.0], [2.0, 0.0, 0.0]])
    advantages, returns = compute_optimal_token_baseline_advantage(
        poison(rewards, mask), mask, ["a", "a"], poison(log_p, mask), sum_pi_squared=poison(squares, mask)
    )
    assert returns.tolist() == [[6.0, 6.0, 5.0], [2.0, 0.0, 0.0]]
    first = (1 * 6 + 3 * 2) / 4
    # from the second token on, the first response is alone: baseline 0
    torch.testing.assert_close(advantages, torch.tensor([[6 - first, 6.0, 5.0], [2 - first, 0.0, 0.0]]))
    turnwise, _ = compute_multi_turn_optimal_token_baseline_advantage(
        poison(rewards, mask), mask, ["a", "a"], poison(log_p, mask), sum_pi_squared=poison(squares, mask)
    )
    whole = (4 * 6 + 3 * 2) / 7
    torch.testing.assert_close(turnwise, torch.tensor([[6 - whole, 6 - whole, 5 - whole], [2 - whole, 0.0, 0.0]]))


def reference(rewards: np.ndarray, mask: np.ndarray, index: np.ndarray, energy: np.ndarray, gamma: float) -> np.ndarray:
    out = np.zeros(mask.shape)
    at = [np.flatnonzero(row) for row in mask]
    to_go = [
        [sum(gamma ** (j - k) * rewards[i, at[i][j]] for j in range(k, len(at[i]))) for k in range(len(at[i]))]
        for i in range(len(mask))
    ]
    spent = [np.cumsum(energy[i, at[i]]) + 1e-8 for i in range(len(mask))]
    for i in range(len(mask)):
        for k, t in enumerate(at[i]):
            group = [j for j in range(len(mask)) if index[j] == index[i] and len(at[j]) > k]
            weights, values = [spent[j][k] for j in group], [to_go[j][k] for j in group]
            out[i, t] = to_go[i][k] - (np.average(values, weights=weights) if len(group) > 1 else 0.0)
    return out


def test_against_a_loop_with_tools_and_importance_weights() -> None:
    rng = np.random.default_rng(0)
    mask = torch.from_numpy((rng.random((9, 7)) < 0.7).astype(np.int64))
    mask[4] = 0
    rewards, index = normal(9, 7, seed=2), rng.integers(0, 3, 9)
    log_p, weights = -normal(9, 7, seed=3).abs() - 0.1, normal(9, 7, seed=4).exp()
    squares = log_p.exp().square() + 0.05
    dirty = {
        "old_log_probs": poison(log_p, mask),
        "sum_pi_squared": poison(squares, mask),
        "rollout_is_weights": poison(weights, mask),
    }
    p = np.exp(log_p.numpy())
    energy = np.maximum(1 - 2 * p + squares.numpy(), (1 - p) ** 2) * weights.numpy() ** 2
    expected = reference(rewards.numpy(), mask.numpy(), index, energy, 0.9)
    found, _ = compute_optimal_token_baseline_advantage(poison(rewards, mask), mask, index, gamma=0.9, **dirty)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    order = [3, 8, 0, 5, 1, 7, 2, 6, 4]
    shuffled, _ = compute_optimal_token_baseline_advantage(
        rewards[order], mask[order], index[order], gamma=0.9, **{key: value[order] for key, value in dirty.items()}
    )
    torch.testing.assert_close(shuffled, found[order])


def test_turns_are_compared_with_turns() -> None:
    """Turn lengths differ: the second turn of one response meets the second turn of the other."""
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [0.0, 2.0, 0.0, 8.0]])
    log_p, energies = torch.full((2, 4), math.log(0.5)), torch.tensor([[1.0, 0.0, 1.0, 1.0], [2.0, 2.0, 0.0, 2.0]])
    found, returns = compute_multi_turn_optimal_token_baseline_advantage(
        rewards, mask, ["a", "a"], log_p, sum_pi_squared=energies
    )
    assert returns.tolist() == [[4.0, 0.0, 3.0, 3.0], [10.0, 10.0, 0.0, 8.0]]
    one = (1 * 4 + 4 * 10) / 5
    two = (3 * 3 + 6 * 8) / 9
    expected = [[4 - one, 0, 3 - two, 3 - two], [10 - one, 10 - one, 0, 8 - two]]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("fn", BOTH)
def test_equal_scores_give_exactly_zero_and_a_lone_response_keeps_its_score(fn) -> None:
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1]])
    rewards = torch.tensor([[0.0, 0.1], [0.0, 0.1], [0.0, 0.1], [0.0, 0.7]])
    log_p = -normal(4, 2, seed=5).abs()
    found, _ = fn(rewards, mask, list("aaab"), log_p, entropys=normal(4, 2, seed=6).abs())
    assert not found[:3].any()
    assert found[3].tolist() == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("fn", BOTH)
def test_tokens_that_were_certain_have_the_plain_mean_as_baseline(fn) -> None:
    found, _ = fn(
        torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), list("aa"), torch.zeros(2, 1), entropys=torch.zeros(2, 1)
    )
    assert found[:, 0].tolist() == pytest.approx([0.5, -0.5])

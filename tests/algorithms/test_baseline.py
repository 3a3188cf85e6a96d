from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.algorithms.baseline import compute_reinforce_plus_plus_outcome_advantage, compute_remax_outcome_advantage
from verl.errors import DataError

NAN = float("nan")


def test_returns_are_discounted_over_sampled_tokens_and_advantages_whitened() -> None:
    rewards = torch.tensor([[1.0, NAN, 2.0, 4.0], [3.0, NAN, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, SimpleNamespace(gamma=0.5))
    # 4; 2 + .5*4 = 4; 1 + .5*4 = 3: the tool token in between neither discounts nor cuts
    torch.testing.assert_close(returns, torch.tensor([[3.0, 0.0, 4.0, 4.0], [3.0, 0.0, 0.0, 0.0]]))
    tokens = np.array([3.0, 4.0, 4.0, 3.0])
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages[mask.bool()], expected, rtol=1e-6)
    assert not advantages[mask == 0].any()


def test_gamma_comes_from_attribute_or_key_and_is_one_by_default() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    for config, first in ((None, 1.0), ({"gamma": 0.25}, 0.25), (SimpleNamespace(gamma=0.5), 0.5)):
        _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)
        assert returns.tolist() == [[first, 1.0]]


def test_remax_subtracts_the_greedy_score_from_the_rewards_to_come() -> None:
    rewards = torch.tensor([[1.0, NAN, 2.0], [0.5, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    advantages, returns = compute_remax_outcome_advantage(rewards, torch.tensor([2.5, 1.0, 7.0]), mask)
    assert returns.tolist() == [[3.0, 0.0, 2.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert advantages.tolist() == [[0.5, 0.0, -0.5], [-0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_remax_wants_one_baseline_per_sample() -> None:
    with pytest.raises(DataError, match=r"shape \(1,\) for 2 samples"):
        compute_remax_outcome_advantage(torch.zeros(2, 1), torch.zeros(1), torch.ones(2, 1))

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import poison
from verl.algorithms.best_of import compute_grpo_passk_outcome_advantage, compute_maxrl_outcome_advantage
from verl.errors import DataError


def column(scores: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None].repeat(1, 2)
    mask = torch.tensor([[1, 0]] * len(scores))
    return poison(rewards, mask), mask


def test_pass_at_k_rewards_the_lead_of_a_single_best_response() -> None:
    rewards, mask = column([1.0, 4.0, 2.0, 3.0, 3.0, 0.0, 5.0])
    index = list("aaabbbc")
    advantages, returns = compute_grpo_passk_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 5.0]  # b: two best; c: alone
    assert not advantages[:, 1].any()
    assert torch.equal(advantages, returns)
    scaled, _ = compute_grpo_passk_outcome_advantage(rewards, mask, index)
    assert scaled[1, 0].item() == pytest.approx(2.0 / (np.std([1, 4, 2], ddof=1) + 1e-6))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999))
def test_pass_at_k_is_the_loss_of_leaving_a_response_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, index = rng.integers(0, 4, 12).astype(float), rng.integers(0, 4, 12)
    rewards, mask = column(scores.tolist())
    advantages, _ = compute_grpo_passk_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    for i in range(12):
        group = [scores[j] for j in range(12) if index[j] == index[i]]
        others = [scores[j] for j in range(12) if index[j] == index[i] and j != i]
        assert advantages[i, 0].item() == (max(group) - max(others) if others else scores[i])


def test_maxrl_divides_by_the_success_rate() -> None:
    rewards, mask = column([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    advantages, returns = compute_maxrl_outcome_advantage(rewards, mask, list("aaaabbccd"), epsilon=0.0)
    # a: rate 1/4: (1 - 1/4) / (1/4) = 3 and -1; b and c are tied; d is alone
    assert advantages[:, 0].tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert torch.equal(advantages, returns)
    damped, _ = compute_maxrl_outcome_advantage(rewards, mask, list("aaaabbccd"), epsilon=0.25)
    assert damped[0, 0].item() == pytest.approx(0.75 / 0.5)


def test_maxrl_refuses_negative_scores() -> None:
    rewards, mask = column([1.0, -0.5])
    with pytest.raises(DataError, match="a score is -0.5"):
        compute_maxrl_outcome_advantage(rewards, mask, ["a", "a"])


@pytest.mark.parametrize("fn", [compute_grpo_passk_outcome_advantage, compute_maxrl_outcome_advantage])
def test_order_of_samples_only_permutes_the_result(fn) -> None:
    rewards, mask = column([1.0, 4.0, 2.0, 3.0, 0.5, 0.0])
    index, order = np.array(list("ababab"), dtype=object), [5, 2, 0, 4, 1, 3]
    torch.testing.assert_close(fn(rewards[order], mask[order], index[order])[0], fn(rewards, mask, index)[0][order])

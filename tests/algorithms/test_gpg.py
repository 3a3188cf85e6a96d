from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.algorithms.batches import MODES, counts, normal, poison, ragged_mask
from verl.algorithms.gpg import compute_gpg_outcome_advantage, compute_policy_loss_gpg


def test_signal_is_scaled_by_the_share_of_informative_samples() -> None:
    # groups a: 1, 0 (informative), b: 1, 1 and c: 0, 0 (not): B / (B - M) = 6 / 2
    rewards = torch.tensor([[1.0], [0.0], [1.0], [1.0], [0.0], [0.0]])
    index = np.array(list("aabbcc"), dtype=object)
    advantages, returns = compute_gpg_outcome_advantage(rewards, torch.ones(6, 1), index)
    assert advantages[:, 0].tolist() == pytest.approx([1.5, -1.5, 0, 0, 0, 0])
    assert torch.equal(advantages, returns)
    scaled, _ = compute_gpg_outcome_advantage(rewards, torch.ones(6, 1), index, f_norm=3.0, alpha=2.0)
    torch.testing.assert_close(scaled, advantages * 2 / 3)


def test_no_signal_at_all_is_zero() -> None:
    advantages, _ = compute_gpg_outcome_advantage(torch.ones(2, 1), torch.ones(2, 1), ["a", "a"])
    assert advantages.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_loss_is_minus_log_prob_times_advantage(mode: str) -> None:
    mask = ragged_mask(4, 5)
    log_prob, advantages, weights = normal(4, 5, seed=1), normal(4, 5, seed=2), normal(4, 5, seed=3).exp()
    x = poison(log_prob, mask).requires_grad_()
    config = SimpleNamespace(global_batch_info={"dp_size": 2, **counts(mask), "loss_scale_factor": 5})
    loss, metrics = compute_policy_loss_gpg(
        x.detach(), x, poison(advantages, mask), mask, mode, config, poison(weights, mask)
    )
    loss.backward()
    sums = (-log_prob * advantages * weights * mask).sum(-1)
    expected = {
        "token-mean": sums.sum() / mask.sum(),
        "seq-mean-token-sum": sums.sum() / 3,
        "seq-mean-token-mean": (sums / mask.sum(-1).clamp(min=1)).sum() / 3,
        "seq-mean-token-sum-norm": sums.sum() / 3 / 5,
    }[mode]
    torch.testing.assert_close(loss.detach(), 2 * expected)
    assert metrics == {}
    assert torch.isfinite(x.grad).all()


def test_gradcheck() -> None:
    mask, advantages = ragged_mask(3, 4), normal(3, 4, seed=4)
    x = normal(3, 4, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: compute_policy_loss_gpg(v, v, advantages, mask, "token-mean")[0], x)

"""Rollout correction on two responses whose ratios are small whole numbers and their inverses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.algorithms.bypass_loss import compute_policy_loss_bypass_mode
from verl.algorithms.correction import (
    acceptance,
    correct_rollout,
    importance_weights,
    log_ratios,
    mismatch_metrics,
    normalize_weights,
    ratios_at,
    weight_metrics,
)
from verl.errors import ConfigError

NAN = float("nan")
# ratios: 2, 1/2 in the first response, 4, 1, 1/2 in the second; their products are 1 and 2
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ROLLOUT = torch.tensor([[-1.0, -2.0, NAN], [-0.5, -1.5, -3.0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([[2.0, 0.5, NAN], [4.0, 1.0, 0.5]], dtype=torch.float64).log()
TRAIN = ROLLOUT + LOG_RATIO
LN2 = math.log(2)


def clean() -> torch.Tensor:
    return log_ratios(TRAIN, ROLLOUT, MASK)


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    np.testing.assert_allclose(actual.numpy(), np.array(expected), rtol=1e-12, atol=1e-12)


def test_log_ratios_carry_no_gradient_and_ignore_what_is_outside() -> None:
    train = TRAIN.clone().requires_grad_()
    result = log_ratios(train, ROLLOUT, MASK)
    assert not result.requires_grad
    close(result, [[LN2, -LN2, 0], [2 * LN2, 0, -LN2]])


@pytest.mark.parametrize(
    ("level", "upper", "expected"),
    [
        ("token", 3.0, [[2, 0.5, 0], [3, 1, 0.5]]),
        ("token", 1.5, [[1.5, 0.5, 0], [1.5, 1, 0.5]]),
        ("sequence", 3.0, [[1, 1, 0], [2, 2, 2]]),
        ("sequence", 1.5, [[1, 1, 0], [1.5, 1.5, 1.5]]),
        ("geometric", 3.0, [[1, 1, 0], [2 ** (1 / 3)] * 3]),
        ("icepop", 3.0, [[2, 0.5, 0], [0, 1, 0.5]]),
    ],
)
def test_weights(level: str, upper: float, expected: list[list[float]]) -> None:
    close(importance_weights(clean(), MASK, level, upper=upper), expected)


def test_icepop_has_a_lower_bound_too() -> None:
    close(importance_weights(clean(), MASK, "icepop", lower=0.6, upper=5.0), [[2, 0, 0], [4, 1, 0]])


def test_ratios_are_bounded_before_the_exponential() -> None:
    far = torch.tensor([[1000.0, -1000.0]], dtype=torch.float64)
    ones = torch.ones(1, 2)
    close(ratios_at(far, ones, "token"), [[math.exp(20), math.exp(-20)]])
    close(ratios_at(far * torch.tensor([1.0, 0.0]), ones, "sequence"), [[math.exp(20)] * 2])


def test_normalised_weights_have_mean_one_over_tokens_or_responses() -> None:
    # token: (3 + 1 + 0.5 + 2 + 0.5) / 5 = 1.4
    token = importance_weights(clean(), MASK, "token", upper=3.0)
    close(normalize_weights(token, MASK, "token"), [[2 / 1.4, 0.5 / 1.4, 0], [3 / 1.4, 1 / 1.4, 0.5 / 1.4]])
    # sequence: (1 + 1.5) / 2 = 1.25, whatever the lengths
    sequence = importance_weights(clean(), MASK, "sequence", upper=1.5)
    close(normalize_weights(sequence, MASK, "sequence"), [[0.8, 0.8, 0], [1.2, 1.2, 1.2]])
    close(normalize_weights(torch.zeros(2, 3).double(), MASK, "token"), [[0] * 3] * 2)


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", {"upper": 3.0, "lower": 0.6}, [[1, 0, 0], [0, 1, 0]]),
        ("token", {"upper": 3.0}, [[1, 1, 0], [0, 1, 1]]),
        ("sequence", {"upper": 1.5}, [[1, 1, 0], [0, 0, 0]]),
        ("geometric", {"upper": 1.2}, [[1, 1, 0], [0, 0, 0]]),  # 2 ** (1/3) = 1.26
        ("geometric", {"upper": 1.3}, [[1, 1, 0], [1, 1, 1]]),
        (None, {"veto": 0.45}, [[1, 1, 0], [1, 1, 1]]),
        (None, {"veto": 0.6}, [[0, 0, 0], [0, 0, 0]]),
        ("token", {"upper": 3.0, "veto": 0.45}, [[1, 1, 0], [0, 1, 1]]),
    ],
)
def test_acceptance(level: str | None, bounds: dict[str, float], expected: list[list[int]]) -> None:
    accepted = acceptance(clean(), MASK, level, **bounds)
    assert accepted.dtype == torch.bool
    assert accepted.int().tolist() == expected


def test_veto_takes_the_whole_response_but_no_other() -> None:
    log_ratio = torch.tensor([[0.0, math.log(1e-5)], [0.0, 0.0]], dtype=torch.float64)
    assert acceptance(log_ratio, torch.ones(2, 2), None, veto=1e-4).tolist() == [[False, False], [True, True]]


def test_mismatch_metrics() -> None:
    metrics = mismatch_metrics(TRAIN, ROLLOUT, MASK)
    # log ratios sum to ln 2 over five tokens; sum of r - 1 - ln r is (2 + 1/2 + 4 + 1 + 1/2) - 5 - ln 2
    expected = {
        "kl": -LN2 / 5,
        "k3_kl": (3 - LN2) / 5,
        "log_prob_abs_diff": LN2,
        "rollout_ppl": (math.exp(1.5) + math.exp(5 / 3)) / 2,
        "training_ppl": (math.exp(1.5) + math.exp((5 - LN2) / 3)) / 2,
        "ppl_ratio": (1 + 2 ** (-1 / 3)) / 2,
        "log_ppl_diff": -LN2 / 6,
        "log_ppl_abs_diff": LN2 / 6,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert mismatch_metrics(TRAIN, ROLLOUT, torch.zeros_like(MASK)) == {}


def test_weight_metrics_see_raw_weights() -> None:
    metrics = weight_metrics(clean(), MASK, "token", upper=3.0, lower=0.6)
    # weights 2, 1/2, 4, 1, 1/2: sum 8, squares 21.5
    assert metrics == pytest.approx(
        {
            "rollout_is_mean": 1.6,
            "rollout_is_std": math.sqrt(21.5 / 5 - 1.6**2),
            "rollout_is_min": 0.5,
            "rollout_is_max": 4.0,
            "rollout_is_eff_sample_size": 64 / (5 * 21.5),
            "rollout_is_ratio_fraction_high": 0.2,
            "rollout_is_ratio_fraction_low": 0.4,
            "chi2_token": 3.3,
            "chi2_seq": 1.5,
        },
        rel=1e-12,
    )
    by_sequence = weight_metrics(clean(), MASK, "sequence", upper=1.5, lower=0.6)
    assert by_sequence["rollout_is_mean"] == pytest.approx(1.5)
    assert by_sequence["rollout_is_eff_sample_size"] == pytest.approx(9 / (2 * 5))


def test_everything_together() -> None:
    result = correct_rollout(
        TRAIN,
        ROLLOUT,
        MASK,
        {
            "rollout_is": "token",
            "rollout_is_threshold": 3.0,
            "rollout_is_batch_normalize": True,
            "rollout_rs": "token",
            "rollout_rs_threshold": 3.0,
            "rollout_rs_threshold_lower": 0.6,
            "rollout_token_veto_threshold": 0.45,
        },
    )
    assert result.accepted is not None
    assert result.weights is not None
    assert result.weights.dtype == torch.float32
    assert result.accepted.int().tolist() == [[1, 0, 0], [0, 1, 0]]
    # weights 2 and 1 are left, with mean 1.5
    np.testing.assert_allclose(result.weights[result.accepted].numpy(), [2 / 1.5, 1 / 1.5], rtol=1e-6)
    assert result.metrics["rollout_rs_masked_fraction"] == pytest.approx(0.6)
    assert result.metrics["rollout_rs_seq_masked_fraction"] == 1.0
    assert result.metrics["rollout_is_veto_fraction"] == 0.0
    assert result.metrics["rollout_is_max"] == pytest.approx(4.0)


def test_without_settings_nothing_is_corrected() -> None:
    result = correct_rollout(TRAIN, ROLLOUT, MASK)
    assert result.weights is None
    assert result.accepted is None
    assert result.metrics == {}


def test_equal_policies_are_left_alone() -> None:
    result = correct_rollout(ROLLOUT, ROLLOUT, MASK, {"rollout_is": "sequence", "rollout_rs": "geometric"})
    assert result.weights is not None
    assert result.accepted is not None
    assert torch.equal(result.weights, MASK.float())
    assert torch.equal(result.accepted, MASK.bool())
    assert result.metrics["rollout_is_eff_sample_size"] == 1.0
    assert mismatch_metrics(ROLLOUT, ROLLOUT, MASK)["kl"] == 0.0


def test_unusable_settings() -> None:
    with pytest.raises(ConfigError, match="unknown level 'tokens'"):
        importance_weights(clean(), MASK, "tokens")
    with pytest.raises(ConfigError, match="must be positive"):
        importance_weights(clean(), MASK, "token", upper=0.0)


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_bypass_loss_gives_rejected_tokens_no_weight(kind: str) -> None:
    """Ratios 1/2, 1, 2 with bounds 2/3 and 3/2: only the middle token counts, over a denominator of three tokens."""
    log_prob = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = (log_prob - torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64).log()).detach()
    config = {"policy_loss": {"bypass_loss_type": kind, "bypass_rs": "token", "bypass_rs_threshold": 1.5}}
    advantages, mask = torch.full((1, 3), 6.0, dtype=torch.float64), torch.ones(1, 3)
    loss, metrics = compute_policy_loss_bypass_mode(old, log_prob, advantages, mask, "token-mean", config)
    loss.backward()
    assert log_prob.grad is not None
    # the gradient of -6 rho and of -6 log pi at ratio 1 is -6 in both
    np.testing.assert_allclose(log_prob.grad.numpy(), [[0, -2, 0]], atol=1e-12)
    assert float(metrics["rollout_corr/rollout_rs_masked_fraction"]) == pytest.approx(2 / 3)

    config["policy_loss"] = {"bypass_loss_type": kind, "bypass_veto_threshold": 0.6}
    loss, metrics = compute_policy_loss_bypass_mode(old, log_prob, advantages, mask, "token-mean", config)
    assert loss.item() == 0
    assert float(metrics["rollout_corr/rollout_rs_masked_fraction"]) == 1

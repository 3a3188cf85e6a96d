"""The first update on fresh samples: nothing has moved yet, and the numbers say so exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("packed", [True, False])
def test_ratio_is_one_and_kl_is_zero(packed: bool, run_training: Callable[..., list[dict[str, Any]]]) -> None:
    """Policy, old policy and reference are one model in fp32: log-probabilities agree to the last bit."""
    (row,) = run_training(
        "trainer.controller=local",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.model.use_remove_padding={packed}",
    )
    data = row["data"]
    assert data["actor/ppo_kl"] == 0.0
    assert data["actor/kl_loss"] == 0.0
    assert data["actor/pg_clipfrac"] == 0.0
    assert data["actor/pg_clipfrac_lower"] == 0.0
    # token-mean of -A with ratio exactly 1
    assert data["actor/pg_loss"] == pytest.approx(-data["critic/advantages/mean"], abs=1e-7)
    # what was sampled is what training computes: fp32, the same weights, another order of the same sums
    assert data["training/rollout_probs_diff_max"] < 1e-5

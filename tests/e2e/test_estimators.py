"""Estimators and losses that need more of the trainer than a batch: a greedy baseline, a memory, the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import deterministic

pytestmark = pytest.mark.e2e

RunTraining = Callable[..., list[dict[str, Any]]]

LOCAL = ["trainer.controller=local", "trainer.total_training_steps=3"]
#: how the same work may be cut
CUT = ["actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"]


def test_remax_has_a_greedy_baseline(run_training: RunTraining, tmp_path: Path) -> None:
    """One sample a prompt: the advantage of each is its score less the greedy answer's."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1 + len(set(solution_str)) / 8\n"
    )
    rows = run_training(
        *LOCAL,
        f"custom_reward_function.path={tmp_path}/reward.py",
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.n=1",
        "trainer.total_training_steps=2",
    )
    for row in rows:
        data = row["data"]
        # every answer is worth at least 1, the greedy ones too
        assert data["critic/advantages/max"] <= data["critic/score/max"] - 1
        assert data["actor/grad_norm"] > 0


def test_spo_remembers_across_a_restart(run_training: RunTraining, tmp_path: Path) -> None:
    spo = [
        *LOCAL,
        "algorithm.adv_estimator=spo",
        "actor_rollout_ref.rollout.n=1",
        "trainer.total_training_steps=5",
        "trainer.save_freq=1",
    ]
    whole = run_training(*spo)  # an epoch has two steps: from the third on, prompts come back
    rest = run_training(
        *spo, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run1/global_step_3"
    )
    assert deterministic(rest) == deterministic(whole[3:])
    forgotten = run_training(
        *spo,
        "algorithm.spo.rho_min=0.0",
        "algorithm.spo.rho_max=0.0",
    )
    assert deterministic(forgotten)[0] == deterministic(whole)[0]
    assert deterministic(forgotten)[4] != deterministic(whole)[4], "the memory must matter"


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_losses_that_look_at_the_whole_batch_do_not_depend_on_the_cut(loss: str, run_training: RunTraining) -> None:
    chosen = [
        *LOCAL,
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.1",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=0.0001",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ]
    whole, pieces = run_training(*chosen), run_training(*chosen, *CUT)
    for expected, actual in zip(deterministic(whole), deterministic(pieces), strict=True):
        assert expected["actor/cov_selected"] > 0.05
        assert actual["actor/cov_selected"] == expected["actor/cov_selected"]
        # kl_cov ranks tokens, and rounding may swap two that are as good as equal
        if loss == "clip_cov":
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_pf_ppo_draws_by_score(run_training: RunTraining) -> None:
    rows = run_training(
        *LOCAL,
        "algorithm.adv_estimator=gae",
        "algorithm.use_pf_ppo=True",
        "algorithm.pf_ppo.weight_pow=8",
        "critic.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
    )
    plain = run_training(
        *LOCAL, "algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4", "trainer.total_training_steps=1"
    )
    assert rows[0]["data"]["critic/score/mean"] > plain[0]["data"]["critic/score/mean"]


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_has_exact_energies(name: str, run_training: RunTraining) -> None:
    """Without the sum of squared probabilities, a bound from the entropies stands in, and the numbers are others."""
    chosen = [*LOCAL, f"algorithm.adv_estimator={name}", "trainer.total_training_steps=1"]
    exact, cut = run_training(*chosen), run_training(*chosen, *CUT)
    bound = run_training(*chosen, "actor_rollout_ref.actor.calculate_sum_pi_squared=False")
    assert deterministic(cut)[0] == pytest.approx(deterministic(exact)[0], rel=1e-4, abs=1e-6)
    assert bound[0]["data"]["critic/advantages/mean"] != exact[0]["data"]["critic/advantages/mean"]

"""Dashboards rely on metric names: a run emits documented names, and all that are promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl.trainer.ppo.metrics import undocumented

pytestmark = pytest.mark.e2e

PROMISED = """
critic/score/mean critic/rewards/max critic/advantages/min critic/returns/mean critic/values/mean critic/vf_loss
critic/vf_clipfrac critic/vpred_mean critic/vf_explained_var critic/grad_norm critic/lr
actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/grad_norm actor/lr
actor/reward_kl_penalty actor/reward_kl_penalty_coeff
response_length/mean response_length/clip_ratio prompt_length/max response/aborted_ratio
training/global_step training/epoch training/rollout_probs_diff_mean
timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv timing_s/update_critic
timing_s/update_actor timing_s/step timing_s/testing timing_s/save_checkpoint timing_per_token_ms/gen
perf/total_num_tokens perf/time_per_step perf/throughput perf/cpu_memory_used_gb
global_seqlen/min global_seqlen/balanced_max global_seqlen/mean
""".split()


def test_names(run_training: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run_training(
        "trainer.controller=local",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=True",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
    )
    before, step = (row["data"] for row in rows)
    assert {name for name in before if not name.startswith("val-")} == set()
    assert "val-core/digits/reward/mean@1" in before
    assert undocumented([*before, *step]) == []
    assert [name for name in PROMISED if name not in step] == []

"""Rollout correction in a whole run: what it changes, what it reports, and that agreement leaves a run alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

from verl.trainer.ppo.metrics import undocumented
from verl.workers.engine.fsdp.engine import FSDPEngine

pytestmark = pytest.mark.e2e

RunTraining = Callable[..., list[dict[str, Any]]]

LOCAL = ["trainer.controller=local", "trainer.total_training_steps=2"]
SECTION = "algorithm.rollout_correction"
#: rollout log-probs are those of the distribution cut at top-p, training's are not: a mismatch made by configuration
MISMATCH = ["actor_rollout_ref.rollout.top_p=0.8"]


def numbers(rows: list[dict[str, Any]], *without: str) -> list[dict[str, float]]:
    """Metrics without clocks and memory and without those whose names start with one of ``without``."""
    drop = ("timing", "perf/", "weight_sync/", *without)
    return [{name: value for name, value in row["data"].items() if not name.startswith(drop)} for row in rows]


def test_agreement_is_left_alone(run_training: RunTraining) -> None:
    """One engine in fp32: weights are 1 to rounding, nothing is rejected, and the run is what it is without."""
    plain = run_training(*LOCAL)
    corrected = run_training(
        *LOCAL,
        f"{SECTION}.rollout_is=sequence",
        f"{SECTION}.rollout_rs=geometric",
        f"{SECTION}.rollout_rs_threshold=1.01",
        f"{SECTION}.rollout_token_veto_threshold=1e-4",
    )
    for row in corrected:
        data = row["data"]
        assert undocumented(data) == []
        assert data["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert data["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-6)
        assert data["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert data["rollout_corr/rollout_is_veto_fraction"] == 0
        assert abs(data["rollout_corr/kl"]) < 1e-5
    for expected, actual in zip(numbers(plain), numbers(corrected, "rollout_corr/"), strict=True):
        kept = {name: value for name, value in expected.items() if not name.startswith("rollout_corr/")}
        assert actual == pytest.approx(kept, rel=1e-4, abs=1e-5)


def test_a_mismatch_is_weighted_rejected_and_explained(
    run_training: RunTraining, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="verl.trainer.ppo.mismatch"):
        plain = run_training(*LOCAL, *MISMATCH)
    assert "top-p" in caplog.text
    # cutting 0.2 of the probability makes every ratio at least 0.8
    assert all(0.1 < row["data"]["rollout_corr/log_prob_abs_diff"] <= -math.log(0.8) for row in plain)

    weighted = run_training(*LOCAL, *MISMATCH, f"{SECTION}.rollout_is=token")
    data = weighted[0]["data"]
    assert 0.8 <= data["rollout_corr/rollout_is_min"] <= data["rollout_corr/rollout_is_max"] < 1
    # the first step has the same samples and advantages; weights below 1 make its gradient smaller
    assert weighted[0]["data"]["critic/score/mean"] == plain[0]["data"]["critic/score/mean"]
    assert weighted[0]["data"]["actor/grad_norm"] < plain[0]["data"]["actor/grad_norm"]

    bound = f"{SECTION}.rollout_rs_threshold_lower={data['rollout_corr/rollout_is_mean']}"
    rejected = run_training(*LOCAL, *MISMATCH, f"{SECTION}.rollout_rs=token", bound)
    data = rejected[0]["data"]
    assert 0 < data["rollout_corr/rollout_rs_masked_fraction"] < 1
    # rejection is the update's affair: scores and advantages are those of all samples
    for name in ("critic/score/mean", "critic/advantages/mean", "response_length/mean"):
        assert data[name] == plain[0]["data"][name]
    assert data["actor/pg_loss"] != plain[0]["data"]["actor/pg_loss"]


def test_everything_rejected_changes_nothing(run_training: RunTraining) -> None:
    rows = run_training(
        *LOCAL,
        *MISMATCH,
        f"{SECTION}.rollout_token_veto_threshold=10",
        "trainer.total_training_steps=1",
    )
    data = rows[0]["data"]
    assert data["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert data["actor/pg_loss"] == 0
    assert data["actor/grad_norm"] == 0


def never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("log-probabilities were computed in a pass of their own")


def test_bypass_mode_recomputes_nothing(run_training: RunTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 on one engine the rollout's log-probs are the policy's, so the first step is the same to rounding."""
    normal = run_training(*LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr(FSDPEngine, "forward", never)
        bypass = run_training(*LOCAL, f"{SECTION}.bypass_mode=True")
    data = bypass[0]["data"]
    assert not [name for name in data if name.startswith(("rollout_corr/", "training/rollout_probs_diff"))]
    assert "timing_s/old_log_prob" in data
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert data[name] == pytest.approx(normal[0]["data"][name], rel=1e-4, abs=1e-5)


def test_a_step_of_one_update_needs_no_pass_for_old_log_probs(
    run_training: RunTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old policy is the policy: the same updates, on the same samples, to the last digit."""
    whole = [*LOCAL, "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.entropy_coeff=0.01"]
    normal = run_training(*whole)
    monkeypatch.setattr(FSDPEngine, "forward", never)
    skipped = run_training(*whole, "actor_rollout_ref.actor.skip_old_log_prob=True")
    lost = ("rollout_corr/", "training/rollout_probs_diff", "actor/entropy")
    assert len(skipped) == 2
    for expected, actual in zip(numbers(normal, *lost), numbers(skipped, "actor/entropy"), strict=True):
        assert actual.keys() == expected.keys()
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-7)
    # of the update now, where it was the mean over the same tokens before it
    entropies = [[row["data"]["actor/entropy"] for row in rows] for rows in (normal, skipped)]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-5)


def test_bypass_mode_rejects_and_weights_within_the_loss(run_training: RunTraining) -> None:
    bypass = [*LOCAL, *MISMATCH, f"{SECTION}.bypass_mode=True", "trainer.total_training_steps=1"]
    plain, rejected, reinforce = (
        run_training(*bypass, *more)[0]["data"]
        for more in (
            [],
            [f"{SECTION}.rollout_token_veto_threshold=10"],
            [f"{SECTION}.loss_type=reinforce", f"{SECTION}.rollout_is=token"],
        )
    )
    assert plain["actor/grad_norm"] > 0
    assert rejected["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert rejected["actor/grad_norm"] == 0
    # the ratio is at least 0.8 in the first mini-batch and the weights are not truncated
    assert 0.75 < reinforce["actor/bypass_is_weight"] < 1
    assert undocumented(reinforce) == []

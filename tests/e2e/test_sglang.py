"""GRPO with an SGLang server beside the training process: it samples from the policy, step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.rollout.adapted import adapter_mb
from tests.workers.rollout.helpers import missing_package

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.sglang,
    pytest.mark.skipif(bool(missing_package("sglang")), reason=missing_package("sglang") or ""),
]


def test_sampled_log_probs_are_the_trainers_after_every_update(
    run_training: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    rows = run_training(
        "actor_rollout_ref.rollout.name=sglang",
        "trainer.controller=local",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.temperature=0.8",
        "data.val_batch_size=6",
    )
    assert len([row for row in rows if "actor/pg_loss" in row["data"]]) == 3
    for row in rows:
        if "training/rollout_probs_diff_max" in row["data"]:
            assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
            assert row["data"]["actor/grad_norm"] > 0
    versions = [row["data"]["weight_sync/version"] for row in rows if "weight_sync/version" in row["data"]]
    assert versions == sorted(set(versions))


def test_updates_hand_the_adapter_over_alone(
    run_training: Callable[..., list[dict[str, Any]]], tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    rows = run_training(
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.lora_merge=False",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.controller=local",
    )
    assert len(rows) == 3
    for row in rows:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        assert row["data"]["actor/grad_norm"] > 0
        assert row["data"]["weight_sync/copied_mb"] == pytest.approx(adapter_mb(tiny_model_dir, rank=4))

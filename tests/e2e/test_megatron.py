"""GRPO and PPO with the policy divided over two processes by Megatron-core, on Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]
SIZES = "actor_rollout_ref.actor.megatron"
SAME_NUMBERS = ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "critic/score/mean")


@pytest.fixture
def train(
    run_training: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Two steps of a run whose every weight sync is checked."""
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    return lambda *overrides: run_training("trainer.total_training_steps=2", *overrides)


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: row["data"][name] for name in SAME_NUMBERS} for row in rows if "actor/pg_loss" in row["data"]]


LORA = [
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr=1e-2",
]


@pytest.mark.parametrize("model", [[], pytest.param(LORA, marks=pytest.mark.slow)], ids=["weights", "adapters"])
def test_tensor_parallel_training_is_that_of_one_process(
    train: Callable[..., list[dict[str, Any]]], model: list[str]
) -> None:
    shared = [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        *model,
    ]
    expected = numbers(train("trainer.controller=local", *shared))
    rows = train(
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.strategy=megatron",
        f"{SIZES}.tensor_model_parallel_size=2",
        *shared,
    )
    got = numbers(rows)
    assert len(got) == len(expected) == 2
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert all(row["data"]["training/rollout_probs_diff_max"] < 1e-4 for row in rows)


def test_pipeline_parallel_ppo_with_a_critic(train: Callable[..., list[dict[str, Any]]]) -> None:
    rows = train(
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.strategy=megatron",
        f"{SIZES}.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
    )
    assert len(rows) == 2
    for row in rows:
        assert row["data"]["actor/grad_norm"] > 0
        assert row["data"]["critic/grad_norm"] > 0
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_a_run_resumes_under_other_sizes(run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    shared = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=megatron"]
    checkpoints = tmp_path / "checkpoints"
    whole = run_training(
        *shared,
        f"{SIZES}.tensor_model_parallel_size=2",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={checkpoints}",
    )
    rest = run_training(
        *shared,
        f"{SIZES}.pipeline_model_parallel_size=2",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoints}/global_step_2",
    )
    assert [row["step"] for row in rest] == [3]
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean")
    got, expected = ({name: rows[-1]["data"][name] for name in names} for rows in (rest, whole))
    assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)

"""Stopping and resuming changes nothing: weights, metrics and sample order, bit for bit on CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.e2e

STEPS = 5  # 20 prompts in batches of 8: an epoch has 2 steps, so steps 2 and 4 end one

ALGORITHM = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "critic.optim.lr=1e-3",
    "critic.ppo_mini_batch_size=4",
    "trainer.controller=local",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "actor_rollout_ref.actor.shuffle=True",
]


def deterministic(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Metrics without clocks and memory."""
    timed = ("timing", "perf/", "weight_sync/")
    return [{k: v for k, v in row["data"].items() if not k.startswith(timed)} for row in rows]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The exported model of the last step."""
    return load_file(run_dir / f"global_step_{STEPS}" / "actor" / "huggingface" / "model.safetensors")


def prompts(directory: Path, step: int) -> list[str]:
    """What was sampled in a step, in order."""
    return [json.loads(line)["input"] + json.loads(line)["output"] for line in (directory / f"{step}.jsonl").open()]


def test_resume_is_exact(run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    whole = run_training(*ALGORITHM, f"trainer.rollout_data_dir={tmp_path}/whole")
    assert len({row["data"]["actor/grad_norm"] for row in whole}) == STEPS, "the run must change from step to step"
    for run, step in enumerate((1, 2, 4), start=2):
        rest = run_training(
            *ALGORITHM,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={tmp_path}/run1/global_step_{step}",
            f"trainer.rollout_data_dir={tmp_path}/rest{step}",
        )
        assert [row["step"] for row in rest] == list(range(step + 1, STEPS + 1))
        assert deterministic(rest) == deterministic(whole[step:])
        for later in range(step + 1, STEPS + 1):
            assert prompts(tmp_path / f"rest{step}", later) == prompts(tmp_path / "whole", later)
        expected, actual = weights(tmp_path / "run1"), weights(tmp_path / f"run{run}")
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.usefixtures("ray_local")
def test_resume_on_two_workers(run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    """Sharded models and optimizers through Ray."""
    two = [*ALGORITHM, "trainer.controller=ray", "trainer.n_gpus_per_node=2", "trainer.save_freq=2"]
    whole = run_training(*two)
    rest = run_training(
        *two, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run1/global_step_2"
    )
    assert deterministic(rest) == deterministic(whole[2:])


def test_auto_resume_finds_the_newest(run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    """The default mode continues a run that is started again with the same command, and then has nothing left to do."""
    directory = f"trainer.default_local_dir={tmp_path}/same"
    run_training(*ALGORITHM, directory)
    assert (tmp_path / "same" / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    again = run_training(*ALGORITHM, directory, f"trainer.total_training_steps={STEPS + 1}")
    assert [row["step"] for row in again] == [STEPS + 1]

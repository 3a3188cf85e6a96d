"""Reinforcement learning with low-rank adapters, through the entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.model_merger import load_tensors
from verl.models.lora import read_adapter

pytestmark = pytest.mark.e2e

LORA = [
    "trainer.controller=local",
    "actor_rollout_ref.model.lora.rank=4",
    "actor_rollout_ref.model.lora.alpha=8",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "trainer.save_freq=1",
]


def test_the_reference_is_the_base_and_a_checkpoint_goes_on(
    run_training: Callable[..., list[dict[str, Any]]],
    tiny_model_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    whole = run_training(*LORA)
    # two updates a step: the first one of a run is at the reference itself
    assert 0 <= whole[0]["data"]["actor/kl_loss"] < whole[2]["data"]["actor/kl_loss"]
    for row in whole:  # the merged weights that generate are the ones that train
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        assert row["data"]["actor/grad_norm"] > 0
    rest = run_training(
        *LORA, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run1/global_step_2"
    )
    for name in ("actor/kl_loss", "actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        assert rest[0]["data"][name] == whole[2]["data"][name]
    role = tmp_path / "run1" / "global_step_3" / "actor"
    tensors, settings = read_adapter(role / "lora_adapter")
    assert (settings["r"], settings["base_model_name_or_path"]) == (4, tiny_model_dir)
    assert any(name.endswith("lora_B") and tensor.abs().max() > 0 for name, tensor in tensors.items())
    merged, _ = load_tensors(role, "fsdp")
    again, _ = load_tensors(tmp_path / "run2" / "global_step_3" / "actor", "fsdp")
    assert all(torch.equal(merged[name], again[name]) for name in merged)

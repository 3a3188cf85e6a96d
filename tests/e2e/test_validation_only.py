"""``trainer.val_only``: a model is judged without training data, critic or reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.errors import CheckpointError

pytestmark = pytest.mark.e2e


def test_validates_a_model_and_a_checkpoint(run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    trained = run_training(
        "trainer.controller=local", "algorithm.adv_estimator=gae", "trainer.save_freq=3", "trainer.test_freq=3"
    )
    only = (
        "trainer.controller=local",
        "trainer.val_only=True",
        "data.train_files=[]",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
    )
    (fresh,) = run_training(*only, f"trainer.validation_data_dir={tmp_path}/dump")
    (resumed,) = run_training(
        *only, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run1/global_step_3"
    )
    name = "val-core/digits/reward/mean@1"
    assert (fresh["step"], resumed["step"]) == (0, 3)
    assert resumed["data"][name] == trained[2]["data"][name]
    assert len((tmp_path / "dump" / "0.jsonl").read_text().splitlines()) == 6
    assert json.loads((tmp_path / "dump" / "0.jsonl").read_text().splitlines()[0])["step"] == 0


def test_directory_for_samples_is_checked_first(
    run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="_data_dir"):
        run_training("trainer.controller=local", f"trainer.rollout_data_dir={tmp_path}/file/samples")

"""``trainer.deterministic``: the same seed gives the same run, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_resume import deterministic

pytestmark = pytest.mark.e2e

Run = Callable[..., list[dict[str, Any]]]

#: imported by every process of the run; the rank that is to be late waits for the other one
LATE = """
import os
import time
from pathlib import Path

import torch

if os.environ.get("WORLD_SIZE") == "2":
    started, rank = Path(__file__).with_name("started"), os.environ["RANK"]
    deadline = time.monotonic() + 60
    while rank == Path(__file__).with_name("late").read_text() and not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with started.open("a") as file:
        file.write(rank)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1
"""


@pytest.mark.usefixtures("ray_local")
def test_whatever_the_order_in_which_workers_start(
    run_training: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_lib.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = [
        "trainer.deterministic=True",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=3",
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.model.external_lib=late_lib",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]
    runs = []
    for late, order in (("0", "10"), ("1", "01")):
        (tmp_path / "late").write_text(late)
        (tmp_path / "started").unlink(missing_ok=True)
        rows = run_training(*keys, f"trainer.rollout_data_dir={tmp_path}/samples{late}")
        assert (tmp_path / "started").read_text() == order
        samples = [json.loads(line) for line in (tmp_path / f"samples{late}" / "3.jsonl").open()]
        model = load_file(tmp_path / f"run{len(runs) + 1}" / "global_step_3" / "actor/huggingface/model.safetensors")
        runs.append((deterministic(rows), samples, model))
    (rows, samples, model), (rows_again, samples_again, model_again) = runs
    assert rows_again == rows
    assert samples_again == samples
    assert all(torch.equal(model_again[name], model[name]) for name in model)
    assert not torch.are_deterministic_algorithms_enabled()  # a run leaves this process as it was


def test_it_changes_no_number_on_a_cpu(run_training: Run) -> None:
    """There the ordinary algorithms are deterministic already."""
    keys = ["trainer.controller=local", "trainer.cpu_threads_per_worker=1"]
    assert deterministic(run_training(*keys, "trainer.deterministic=True")) == deterministic(run_training(*keys))

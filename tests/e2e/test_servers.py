"""Training with rollout servers gives what training with the engine in the workers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_equivalence import comparable

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_local")]

Run = Callable[..., list[dict[str, Any]]]

COMMON = ["trainer.test_freq=2", "trainer.val_before_train=True", "actor_rollout_ref.actor.use_kl_loss=True"]
ASYNC = [
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
]


@pytest.mark.parametrize(
    ("workers", "both", "more"),
    [
        pytest.param(1, [], [], marks=pytest.mark.slow),
        (2, [], []),
        (2, [], ["actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast"]),
        (2, ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2"], []),
    ],
    ids=["1 worker", "2 workers", "2 workers, broadcast", "2 workers, adapters"],
)
def test_servers_sample_what_the_workers_would(
    workers: int, both: list[str], more: list[str], run_training: Run, tmp_path: Path
) -> None:
    cut = [*COMMON, *both, f"trainer.n_gpus_per_node={workers}"]
    expected = run_training(*cut, f"trainer.rollout_data_dir={tmp_path}/sync")
    got = run_training(*cut, *ASYNC, *more, f"trainer.rollout_data_dir={tmp_path}/async")
    assert [comparable(row) for row in got] == [comparable(row) for row in expected]
    assert any(row["data"].get("actor/grad_norm", 0) > 0 for row in got)
    for step in (1, 2, 3):
        assert samples(tmp_path / "async", step) == samples(tmp_path / "sync", step)


def samples(directory: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{step}.jsonl").read_text().splitlines()]

"""A long run does not collect memory, open files, threads or tensors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.e2e.chaos import RAYS_OWN, RunningTrainer, metrics_by_step
from tests.e2e.conftest import merge_overrides
from verl.utils.trackers import FileTracker

pytestmark = pytest.mark.e2e


def held() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    return {
        "resident": psutil.Process().memory_info().rss,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    }


@pytest.mark.slow
def test_fifty_steps_hold_no_more_than_thirty(
    run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actor and critic train, samples are written, and every tenth step is saved in the background.

    Twenty steps let allocators and caches reach their sizes. Resident memory may then grow by 3 of its 540 MB, which is
    what the allocator's rounding leaves open; a tensor that a step leaves behind counts whatever its size.
    """
    windows = {"early": range(21, 31), "late": range(41, 51)}
    seen: dict[int, dict[str, int]] = {}
    log = FileTracker.log

    def watched(self: FileTracker, data: Mapping[str, Any], step: int) -> None:
        log(self, data, step)
        seen[step] = held()

    monkeypatch.setattr(FileTracker, "log", watched)
    run_training(
        "trainer.controller=local",
        "trainer.total_training_steps=50",
        "trainer.total_epochs=100",
        "trainer.save_freq=10",
        "trainer.max_ckpt_to_keep=1",
        f"trainer.rollout_data_dir={tmp_path}/samples",
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.checkpoint.async_save=True",
    )
    for name, allowed in (("files", 0), ("threads", 0), ("tensors", 0), ("resident", 3 << 20)):
        # the least of each window, since a save may be under way in any step
        early, late = (min(seen[step][name] for step in window) for window in windows.values())
        assert late <= early + allowed, f"{name}: {early} in steps 21 to 30, {late} in steps 41 to 50"


#: imported by every process of the run; in the controller it adds to each record what is held when the step is over
WATCH = f"""
import gc
import os
import time

import psutil
import ray
from ray._private.internal_api import node_stats

from verl.utils.trackers import FileTracker

log = FileTracker.log


def watched(self, data, step):
    gc.collect()
    references = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    node = ray.nodes()[0]
    for _ in range(30):  # objects go a moment after their last reference
        store = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
        if store.num_local_objects <= len(references):
            break
        time.sleep(0.1)
    titles = [(child, " ".join(child.cmdline())) for child in psutil.Process().children(recursive=True)]
    own = tuple("ray::" + name for name in {RAYS_OWN})
    workers = [child for child, title in titles if title.startswith("ray::") and not title.startswith(own)]
    assert len(workers) == 2, titles
    held = {{
        "store_bytes": store.object_store_bytes_used,
        "store_objects": store.num_local_objects,
        "store_total": store.cumulative_created_bytes,
        "references": len(references),
        "files": len(os.listdir("/proc/self/fd")) + sum(worker.num_fds() for worker in workers),
        "resident": sum(worker.memory_info().rss for worker in workers),
    }}
    log(self, {{**data, **{{"held/" + name: value for name, value in held.items()}}}}, step)


FileTracker.log = watched
"""


@pytest.mark.parametrize("steps", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_workers_and_the_object_store_hold_no_more_after_many_steps(
    steps: int, base_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on Ray, whose store takes every batch here, however small."""
    (tmp_path / "watch_held.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RAY_max_direct_call_object_size", "100")
    keys = [
        "actor_rollout_ref.model.external_lib=watch_held",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        f"trainer.save_freq={steps // 5}",
        "trainer.max_ckpt_to_keep=1",
        "actor_rollout_ref.actor.checkpoint.async_save=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "ray_kwargs.ray_init.num_cpus=2",
        "ray_kwargs.ray_init.object_store_memory=100000000",
    ]
    with RunningTrainer(merge_overrides(base_overrides, keys), tmp_path) as run:
        assert run.finish(timeout_s=400) == 0, run.text()[-3000:]
    records = metrics_by_step(tmp_path)
    fifth = steps // 5
    # the least of each window of five steps and more, since a save may be under way in any step
    early, late = range(2 * fifth, 3 * fifth + 2), range(4 * fifth, 5 * fifth + 1)

    def least(window: range, name: str) -> float:
        return min(records[step][f"held/{name}"] for step in window)

    assert least(late, "store_total") > least(early, "store_total") + 10_000 * fifth, "nothing went through the store"
    for name in ("store_objects", "references", "files"):
        assert least(late, name) <= least(early, name), name
    # what the last batch takes depends on the lengths of its responses
    assert least(late, "store_bytes") <= max(records[step]["held/store_bytes"] for step in early)
    if steps >= 50:
        # two processes of 540 MB whose allocators still grow: without saves by 2 MB here and by 2 MB more in the next
        # hundred steps; each thread that writes a checkpoint may get a part of the heap of its own
        assert least(late, "resident") <= least(early, "resident") + (10 << 20)

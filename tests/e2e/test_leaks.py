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

from verl.utils.tracking import FileTracker

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

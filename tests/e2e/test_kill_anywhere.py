"""A run that is killed at any moment and started again ends like one that was left alone, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.e2e.chaos import RunningTrainer, kill_once, metrics_by_step, saves, steps_logged
from tests.e2e.conftest import merge_overrides

pytestmark = pytest.mark.e2e

KEYS = [
    "trainer.controller=ray",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
    "trainer.resume_mode=auto",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "ray_kwargs.ray_init.num_cpus=2",
    "ray_kwargs.ray_init.object_store_memory=100000000",
]
BACKGROUND = ["actor_rollout_ref.actor.checkpoint.async_save=True"]


def result(directory: Path, steps: int) -> tuple[bytes, dict[int, object], dict[str, bytes]]:
    """Weights, metrics of every step, samples of every step in order."""
    exported = directory / "checkpoints" / f"global_step_{steps}" / "actor" / "huggingface" / "model.safetensors"
    samples = {path.name: path.read_bytes() for path in (directory / "samples").glob("*.jsonl")}
    return exported.read_bytes(), dict(metrics_by_step(directory)), samples


def left_alone(overrides: list[str], directory: Path) -> None:
    with RunningTrainer(overrides, directory) as run:
        assert run.finish() == 0, run.text()[-3000:]


def killed(overrides: list[str], directory: Path, moments: list[str], seed: int) -> int:
    """Start, kill, start again, and let the last start finish; returns how often something was killed."""
    rng = random.Random(seed)
    kills = 0
    for moment in moments:
        with RunningTrainer(overrides, directory) as run:
            if not kill_once(run, moment, rng):
                break
            kills += 1
    left_alone(overrides, directory)
    return kills


@pytest.fixture(scope="module")
def short(base_overrides: list[str]) -> list[str]:
    return merge_overrides(base_overrides, KEYS, ["trainer.total_training_steps=4"])


@pytest.fixture(scope="module")
def two(short: list[str]) -> list[str]:
    """The short run with two workers."""
    return merge_overrides(short, ["trainer.n_gpus_per_node=2"])


@pytest.fixture(scope="module")
def whole(short: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """What the short run gives when it is left alone; in one process, which is the same and starts sooner."""
    directory = tmp_path_factory.mktemp("whole")
    left_alone(merge_overrides(short, ["trainer.controller=local"]), directory)
    return result(directory, steps=4)


def test_a_worker_of_two_is_killed_then_the_controller_while_it_saves(two: list[str], tmp_path: Path) -> None:
    """The run replaces the workers by itself; after the controller's death the same command goes on."""
    left_alone(two, tmp_path / "whole")
    killed, overrides = tmp_path / "killed", [*two, *BACKGROUND, "trainer.max_restarts=1"]
    with RunningTrainer(overrides, killed) as run:
        assert run.wait_until(lambda: steps_logged(killed) and len(run.workers()) == 2)
        os.kill(run.workers()[1], signal.SIGKILL)
        assert run.wait_until(lambda: "restart 1 of trainer.max_restarts=1" in run.text())
        half_written = saves(killed)
        assert run.wait_until(lambda: saves(killed) - half_written), run.text()[-3000:]
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
    left_alone(overrides, killed)
    assert result(killed, steps=4) == result(tmp_path / "whole", steps=4)


@pytest.mark.slow
def test_killed_a_few_times(short: list[str], whole: tuple[object, ...], tmp_path: Path) -> None:
    moments = ["worker-step", "save", "step"]
    assert killed([*short, *BACKGROUND], tmp_path, moments, seed=1) == len(moments)
    assert result(tmp_path, steps=4) == whole


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("workers", "seed"), [(1, 1), (2, 2)])
def test_killed_again_and_again(base_overrides: list[str], tmp_path: Path, workers: int, seed: int) -> None:
    steps = 24
    keys = [*KEYS, f"trainer.total_training_steps={steps}", f"trainer.n_gpus_per_node={workers}"]
    overrides = merge_overrides(base_overrides, keys)
    left_alone(overrides, tmp_path / "whole")
    rng = random.Random(seed)
    moments = [rng.choice(["start", "step", "save", "worker-step", "worker-save"]) for _ in range(22)]
    kills = killed([*overrides, *BACKGROUND], tmp_path / "killed", moments, seed)
    assert kills >= 20
    assert result(tmp_path / "killed", steps) == result(tmp_path / "whole", steps)

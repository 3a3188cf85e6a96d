"""Every program, in every mode, with any process killed: it ends bit for bit the same and leaves nothing behind.

``make chaos`` runs it all. ``VERL_CHAOS_LOG`` names a file for one line about each kill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.chaos import RunningTrainer, left_behind, metrics_by_step
from tests.e2e.conftest import merge_overrides
from tests.e2e.misuse.conftest import misuse_task  # noqa: F401 - a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(7200)]

RAY = ["ray_kwargs.ray_init.num_cpus=2", "ray_kwargs.ray_init.object_store_memory=100000000"]
R = "actor_rollout_ref.rollout"
TRAIN = ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.total_training_steps=4", *RAY]
#: one sequence at a time: otherwise the moments at which requests arrive decide the last bit of log-probabilities
ASYNC = [
    "trainer.deterministic=True",
    f"{R}.mode=async",
    f"{R}.max_num_seqs=1",
    f"{R}.agent.num_workers=1",
    f"{R}.agent.default_agent_loop=single_turn_agent",
]
#: in the workers: which samples servers complete first depends on when requests reach them
PARTIAL = [
    "trainer.deterministic=True",
    f"{R}.max_num_seqs=1",
    f"{R}.over_sample_rate=0.5",
    f"{R}.partial_rollout=True",
    "data.train_batch_size=4",
]
FIXED = [
    "data.train_batch_size=8",
    "data.max_length=16",
    "optim.lr=1e-3",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
    "trainer.total_training_steps=6",
    "trainer.device=cpu",
    "trainer.logger=[file]",
]


#: metrics that measure time
CLOCKS = ("_seconds/max", "_seconds/mean", "_seconds/min", "agent/engine_idle_fraction")


@dataclass(frozen=True)
class Mode:
    """A program in a mode, and which of its processes are killed, one after the other."""

    program: str
    keys: list[str]
    victims: list[str]


SYNC_VICTIMS = ["controller", "worker", "raylet", "controller", "gcs", "worker"]
SERVED_VICTIMS = ["controller", "server", "agent", "worker", "raylet", "controller", "gcs", "agent", "server", "worker"]
MODES = {
    "sync": Mode("train", TRAIN, [*SYNC_VICTIMS, *SYNC_VICTIMS]),
    "agents": Mode("train", [*TRAIN, *ASYNC], [*SERVED_VICTIMS, "controller", "raylet"]),
    "partial": Mode("train", [*TRAIN, *PARTIAL], [*SYNC_VICTIMS, *SYNC_VICTIMS]),
    "sft": Mode("sft", ["data.train_files={task}/sft.jsonl", "model.path={model}", *FIXED], ["controller"] * 8),
    "preference": Mode(
        "preference",
        ["objective=dpo", "data.train_files={task}/pairs.jsonl", "model.path={model}", *FIXED],
        ["controller"] * 8,
    ),
    "generate": Mode(
        "generate",
        [
            "data.path={task}/train.parquet",
            "data.batch_size=1",
            "data.max_prompt_length=24",
            "data.max_response_length=200",  # 20 batches of a second each
            "model.path={model}",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            *RAY,
        ],
        ["controller", "worker", "raylet", "gcs", "controller", "worker", "controller", "raylet"],
    ),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for the runs of a test, with a path that is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="vk", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def result(mode: Mode, directory: Path) -> dict[str, object]:
    """All that a run has made, apart from clocks."""
    if mode.program == "generate":
        return {"answers": (directory / "answers.jsonl").read_bytes()}
    made: dict[str, object] = {
        "model": (directory / "checkpoints" / "huggingface" / "model.safetensors").read_bytes(),
        "metrics": metrics_by_step(directory),
    }
    return made | {path.name: path.read_bytes() for path in (directory / "samples").glob("*.jsonl")}


def same(ours: dict[str, object], theirs: dict[str, object]) -> None:
    """Bit for bit, clocks left out."""
    for result in (ours, theirs):
        records = result.get("metrics", {})
        assert isinstance(records, dict)
        for record in records.values():
            for name in [name for name in record if name.endswith(CLOCKS)]:
                del record[name]
    assert ours == theirs


def sign_of_life(run: RunningTrainer) -> int:
    """Grows while a run works: records of steps, and batches of answers."""
    directory = run.directory
    records = (directory / "metrics.jsonl").read_bytes().count(b"\n") if (directory / "metrics.jsonl").exists() else 0
    return records + len(list(directory.glob(".answers.parts/*.jsonl")))


def ready_for_kill(run: RunningTrainer, victim: str, signs: int) -> bool:
    """Whether the run has got so far, and has a process of that kind."""
    return sign_of_life(run) >= signs and bool(run.victims(victim))


def tell(line: dict[str, object]) -> None:
    """One line about a kill."""
    if path := os.environ.get("VERL_CHAOS_LOG"):
        with open(path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("name", MODES)
def test_any_process_killed(
    name: str,
    base_overrides: list[str],
    misuse_task: Path,  # noqa: F811 - the fixture
    tiny_model_dir: str,
    tmp_path: Path,
    folder: Path,
) -> None:
    mode, rng = MODES[name], random.Random(name)
    keys = [key.replace("{task}", str(misuse_task)).replace("{model}", tiny_model_dir) for key in mode.keys]
    overrides = merge_overrides(base_overrides, keys) if mode.program == "train" else keys
    environment = {"TMPDIR": str(folder)}

    def start(directory: Path) -> RunningTrainer:
        return RunningTrainer(overrides, directory, program=mode.program, environment=environment)

    def finish(directory: Path) -> None:
        with start(directory) as run:
            assert run.finish(timeout_s=600) == 0, run.text()[-3000:]
            assert left_behind(run, folder) == []

    finish(tmp_path / "whole")
    whole = result(mode, tmp_path / "whole")
    kill = number = starts = 0
    directory = tmp_path / "run0"
    while kill < len(mode.victims):
        starts += 1
        assert starts <= 2 * len(mode.victims), "most runs end before the kill"
        victim = mode.victims[kill]
        with start(directory) as run:
            before = sign_of_life(run)
            early = rng.random() < 0.2  # while it starts
            ready = run.wait_until(partial(ready_for_kill, run, victim, 0 if early else before + 1), 600)
            time.sleep(rng.uniform(0.0, 0.5))
            targets = run.victims(victim) if ready and run.process.poll() is None else []
            if targets:
                os.kill(rng.choice(targets), signal.SIGKILL)
            killed = time.monotonic()
            code = run.finish(timeout_s=600)
            ended = time.monotonic() - killed
            left = left_behind(run, folder)
            cleaned = time.monotonic() - killed - ended
            steps = sign_of_life(run)
            tell(
                {
                    "mode": name,
                    "kill": kill,
                    "victim": victim if targets else "none",
                    "while_starting": early,
                    "code": code,
                    "signs": steps,
                    "ended_s": round(ended, 1),
                    "clean_s": round(cleaned, 1),
                    "left": left,
                }
            )
            assert left == [], run.text()[-2000:]
            # a run ends with the signal, with an error, or finishes because the process could be replaced
            allowed = (-signal.SIGKILL if victim == "controller" else 1, 1, 0) if targets else (0,)
            assert code in allowed, run.text()[-3000:]
        kill += bool(targets)  # a run that ended before is no kill
        if code == 0:
            same(result(mode, directory), whole)
            number += 1
            directory = tmp_path / f"run{number}"
    finish(directory)
    same(result(mode, directory), whole)
    tell({"mode": name, "kills": kill, "identical": True})

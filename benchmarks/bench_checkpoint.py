"""What a checkpoint costs a training step: written at once, and in the background.

    OMP_NUM_THREADS=1 python benchmarks/bench_checkpoint.py

Trains a random model and saves it in turn in both ways, as a run does: staged, written, checksums, one rename, with
undisturbed steps between them. Compares how long a save holds up the training: a save at once altogether; a save in
the background by the call that copies the state, and by what the steps beside it take longer than undisturbed ones.
Wall-clock figures need idle cores; processor time of the training thread tells on any machine how far its own
instructions were slowed down. Prints a line per save, and one JSON line, last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "quickstart"))

import torch
from tiny_model import save_tiny_model

from verl.checkpoint import CheckpointManager
from verl.checkpoint.manager import StagedCheckpoint
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.utils.background import BackgroundTask
from verl.utils.fs import directory_bytes, format_bytes
from verl.utils.metrics import MetricSet, msum
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

CONTENTS = frozenset({"model", "optimizer", "extra"})
WANT = frozenset({"log_probs"})
PART = "actor"


def loss(outputs: Any, rows: Any, info: Any) -> tuple[torch.Tensor, MetricSet]:
    value = -(outputs["log_probs"] * rows["response_mask"]).sum() / info.batch_num_tokens
    return value, MetricSet({"loss": msum(value.detach())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="undisturbed steps before each save")
    parser.add_argument("--saves", type=int, default=8, help="of each kind; one more is made to warm up")
    parser.add_argument("--directory", type=Path, help="where to write; default: the directory for temporary files")
    arguments = parser.parse_args()
    if arguments.saves < 2:
        parser.error("--saves must be at least 2: one number has no spread")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as work:
        print(json.dumps(measure(arguments, Path(work))))


class Training:
    """A random model and one batch; what it does is timed in wall-clock and processor seconds."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        save_tiny_model(work / "model", hidden=arguments.hidden, layers=arguments.layers, heads=8, kv_heads=4, seed=0)
        self.engine = FSDPEngine(
            ModelConfig(path=str(work / "model"), enable_gradient_checkpointing=False),
            FSDPConfig(),
            OptimConfig(lr=1e-4),
            device="cpu",
        )
        self.engine.build()
        ids = torch.randint(5, 100, (arguments.rows, arguments.length))
        self.batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(arguments.length).expand_as(ids),
            "response_mask": torch.ones_like(ids[:, 1:]),
        }
        self.manager = CheckpointManager(work / "checkpoints", max_ckpt_to_keep=1)
        self.saves = 0

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    def step(self) -> Step:
        wall, thread = time.perf_counter(), time.thread_time()
        self.engine.train_batch(self.batch, loss, want=WANT, micro=MicroBatching())
        return Step(time.perf_counter() - wall, time.thread_time() - thread)

    def save_at_once(self) -> float:
        """Seconds that the training stands still."""
        started = time.perf_counter()
        staged = self._begin()
        self.engine.save(staged.path / PART, CONTENTS)
        staged.commit()
        return time.perf_counter() - started

    def save_in_background(self) -> BackgroundSave:
        """Save, and train until the checkpoint is there."""
        started, processor = time.perf_counter(), time.process_time()
        staged = self._begin()
        write = self.engine.start_save(staged.path / PART, CONTENTS)
        call = time.perf_counter() - started
        beside = []
        while not write.done():
            beside.append(self.step())
        commit = BackgroundTask(staged.commit)
        while not commit.done():
            beside.append(self.step())
        others = time.process_time() - processor - call - sum(step.processor for step in beside)
        return BackgroundSave(call, time.perf_counter() - started, others, beside)

    def _begin(self) -> StagedCheckpoint:
        self.saves += 1
        return self.manager.begin(self.saves)


@dataclass(frozen=True)
class Step:
    """Seconds on the clock, and of the processor in the thread that trains."""

    wall: float
    processor: float


@dataclass(frozen=True)
class BackgroundSave:
    """Seconds: of the call, until the checkpoint is complete, of processors in other threads; the steps meanwhile."""

    call: float
    until_complete: float
    other_threads: float
    beside: list[Step]

    def __str__(self) -> str:
        return f"call {self.call:.3f} s, complete after {self.until_complete:.2f} s and {len(self.beside)} steps"

    def lost(self, plain: list[Step], kind: str) -> float:
        """What the steps took longer than the median of undisturbed ones."""
        usual = statistics.median(getattr(step, kind) for step in plain)
        return sum(getattr(step, kind) - usual for step in self.beside)


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    training = Training(arguments, work)
    training.steps(3)
    first = (training.save_at_once(), training.save_in_background())[1]
    at_once, background, lost, lost_processor = [], [], [], []
    for number in range(1, arguments.saves + 1):
        plain = training.steps(arguments.steps)
        at_once.append(training.save_at_once())
        plain += training.steps(arguments.steps)
        background.append(training.save_in_background())
        plain += training.steps(arguments.steps)  # what drifts is the same before and after
        lost.append(background[-1].lost(plain, "wall"))
        lost_processor.append(background[-1].lost(plain, "processor"))
        print(f"save {number}: at once {at_once[-1]:.3f} s; {background[-1]}, which lost {lost[-1]:.3f} s")
    whole = statistics.mean(at_once)
    call, slower = statistics.mean(save.call for save in background), statistics.mean(lost)
    return {
        "checkpoint": format_bytes(directory_bytes(training.manager.step_dir(training.saves))),
        "step_s": round(statistics.median(step.wall for step in plain), 3),
        "synchronous_save_s": round(whole, 3),
        "background_first_call_s": round(first.call, 3),
        "background_call_s": round(call, 4),
        "background_until_complete_s": round(statistics.mean(save.until_complete for save in background), 3),
        "background_other_threads_cpu_s": round(statistics.mean(save.other_threads for save in background), 3),
        "steps_lost_s": round(slower, 4),
        "steps_lost_cpu_s": round(statistics.mean(lost_processor), 4),
        "steps_lost_standard_error_s": round(statistics.stdev(lost) / len(lost) ** 0.5, 4),
        "call_over_synchronous": round(call / whole, 4),
        "total_over_synchronous": round((call + slower) / whole, 4),
    }


if __name__ == "__main__":
    main()

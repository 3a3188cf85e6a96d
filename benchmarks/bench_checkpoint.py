"""What a checkpoint costs a training step: written at once, and in the background.

    python benchmarks/bench_checkpoint.py --hidden 512 --layers 8

Trains a random model, saves every few steps in each of the two ways, and compares how long saving held up the training
loop: the call that saves, and what the steps beside a background save take longer. Prints one JSON line, last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "quickstart"))

import torch
from tiny_model import save_tiny_model

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.utils.fs import directory_bytes, format_bytes
from verl.utils.metrics import MetricSet, msum
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import FSDPEngine

CONTENTS = frozenset({"model", "optimizer", "extra"})
WANT = frozenset({"log_probs"})


def loss(outputs: Any, rows: Any, info: Any) -> tuple[torch.Tensor, MetricSet]:
    value = -(outputs["log_probs"] * rows["response_mask"]).sum() / info.batch_num_tokens
    return value, MetricSet({"loss": msum(value.detach())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(measure(arguments, Path(work))))


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    save_tiny_model(work / "model", hidden=arguments.hidden, layers=arguments.layers, heads=8, kv_heads=4, seed=0)
    engine = FSDPEngine(
        ModelConfig(path=str(work / "model"), enable_gradient_checkpointing=False),
        FSDPConfig(),
        OptimConfig(lr=1e-4),
        device="cpu",
    )
    engine.build()
    ids = torch.randint(5, 100, (arguments.rows, arguments.length))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(arguments.length).expand_as(ids),
        "response_mask": torch.ones_like(ids[:, 1:]),
    }

    def step() -> float:
        started = time.perf_counter()
        engine.train_batch(batch, loss, want=WANT, micro=MicroBatching())
        return time.perf_counter() - started

    for _ in range(2):
        step()
    plain, at_once, copying, beside, writing = [], [], [], [], []
    for save in range(arguments.saves):
        plain += [step() for _ in range(arguments.steps)]
        started = time.perf_counter()
        engine.save(work / f"sync{save}", CONTENTS)
        at_once.append(time.perf_counter() - started)
        started = time.perf_counter()
        task = engine.start_save(work / f"async{save}", CONTENTS)
        copying.append(time.perf_counter() - started)
        while not task.done():
            beside.append(step())
        writing.append(time.perf_counter() - started)
    usual = statistics.median(plain)
    slower = sum(seconds - usual for seconds in beside) / arguments.saves
    result = {
        "checkpoint": format_bytes(directory_bytes(work / "sync0")),
        "step_s": round(usual, 3),
        "synchronous_save_s": round(statistics.median(at_once), 3),
        "background_copy_s": round(statistics.median(copying), 4),
        "background_write_s": round(statistics.median(writing), 3),
        "slower_steps_per_save_s": round(slower, 3),
    }
    copy, whole = result["background_copy_s"], result["synchronous_save_s"]
    result["copy_over_synchronous"] = round(copy / whole, 4)
    result["total_over_synchronous"] = round((copy + max(0.0, slower)) / whole, 4)
    return result


if __name__ == "__main__":
    main()

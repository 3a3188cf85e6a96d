"""What a training step costs besides the models: the controller's own work, Ray, and the batches on their way.

The real trainer drives real worker processes whose methods answer at once, with numbers of the right shape. What is
left of a step is overhead: splitting and joining batches, the object store, advantages, metrics. One size is changed at
a time, the others stay at the base case.

    python benchmarks/bench_scale.py [--prompts 16 64 256] [--n 2 8 16] [--length 64 256 1024] [--ranks 1 2 4]
                                     [--steps 8] [--plot scale.png]

Prints a table, and as last line JSON: for every case the median milliseconds of a step and of its phases, the
best step, the CPU-milliseconds of the controller and of all workers (what to go by on a busy machine), and the bytes
that went to the workers.
The base case (64 prompts x 8, 256 tokens, 2 ranks) is the overhead of a step of 512 samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch
from plots import saved_figure

from verl import DataProto
from verl.algorithms.kl import FixedKLController
from verl.config import PPOConfig, load_config
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.sources.base import SyncSource
from verl.utils.metrics import MetricSet, mmean

#: steps that are not counted: the first use of every path
WARM_UP = 2
PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


@dataclass(frozen=True)
class Case:
    """One size of a step: prompts x n samples of up to ``length`` tokens, a quarter of them prompt, on ``ranks``."""

    prompts: int = 64
    n: int = 8
    length: int = 256
    ranks: int = 2

    @property
    def prompt_length(self) -> int:
        return self.length // 4

    @property
    def response_length(self) -> int:
        return self.length - self.prompt_length


class Instant(Worker):
    """The actor, rollout and reference of a run without models."""

    def __init__(self, response_length: int) -> None:
        self.response_length = response_length
        self.made: tuple[torch.Tensor, torch.Tensor] | None = None
        for mesh in ("actor", "rollout", "ref"):
            self._register_dispatch_collect_info(mesh, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Random responses of random lengths, the same every time: making them is not what is measured."""
        ids, present = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        rows, width = len(ids), self.response_length
        if self.made is None:
            mask = (torch.arange(width) < torch.randint(1, width + 1, (rows, 1))).long()
            self.made = mask, torch.randint(1, 150_000, (rows, width)) * mask
        mask, responses = self.made
        attention = torch.cat([present, mask], 1)
        tensors = {
            "prompts": ids,
            "responses": responses,
            "input_ids": torch.cat([ids, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp_(min=0),
            "response_mask": mask,
            "rollout_log_probs": torch.full((rows, width), -1.0) * mask,
            "policy_version": torch.zeros(rows, 2, dtype=torch.int32),
        }
        return DataProto.from_dict(tensors)

    def _numbers(self, data: DataProto, *names: str) -> DataProto:
        mask = data.batch["response_mask"].float()
        return DataProto.from_dict(dict.fromkeys(names, -mask))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), reuse_fields=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self._numbers(data, "old_log_probs", "entropys")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"), reuse_fields=True)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._numbers(data, "ref_log_prob")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), auto_padding=False, reuse_fields=True)
    def update_actor(self, data: DataProto) -> MetricSet:
        return MetricSet({"actor/rows": mmean(float(len(data)), 1.0)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cpu_seconds(self) -> float:
        """CPU time of this process so far."""
        return time.process_time()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> dict[str, float]:
        return {}


class Prompts:
    """Batches of random prompts."""

    epoch = 0

    def __init__(self, case: Case) -> None:
        self.case = case

    def __iter__(self) -> Any:
        width = self.case.prompt_length
        while True:
            lengths = torch.randint(1, width + 1, (self.case.prompts, 1))
            mask = (torch.arange(width).flip(0) < lengths).long()
            yield {
                "input_ids": torch.randint(1, 150_000, mask.shape) * mask,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp_(min=0),
                "data_source": np.array(["none"] * self.case.prompts, dtype=object),
            }


class Recorder:
    """A tracker that keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.times: list[float] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append(metrics)
        self.times.append(time.perf_counter())


class NoCheckpoints:
    """Nothing to resume from."""

    def find(self, *_: Any) -> None:
        return None


def score(batch: DataProto) -> dict[str, float]:
    """A reward for every response, in the fields of the trainer's own scorer."""
    mask = batch.batch["response_mask"]
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(mask)), mask.sum(1) - 1] = torch.rand(len(mask))
    batch.batch["token_level_scores"] = scores
    batch.batch["has_score"] = torch.ones(len(mask), dtype=torch.bool)
    return {}


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Run a case on new worker processes; medians over ``steps``."""
    config = load_config(
        PPOConfig,
        "ppo_trainer",
        [
            f"data.train_batch_size={case.prompts}",
            f"data.max_prompt_length={case.prompt_length}",
            f"data.max_response_length={case.response_length}",
            "data.train_files=unused.parquet",
            "actor_rollout_ref.model.path=unused",
            f"actor_rollout_ref.rollout.n={case.n}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={case.prompts}",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "algorithm.adv_estimator=grpo",
            f"trainer.n_gpus_per_node={case.ranks}",
            "trainer.device=cpu",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.resume_mode=disable",
        ],
    )
    pool = RayResourcePool([case.ranks], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Instant, response_length=case.response_length))
    tracker = Recorder()
    total = steps + WARM_UP
    trainer = RayPPOTrainer(
        config=config,
        actor_rollout=group,
        rollout=group,
        source=SyncSource(Prompts(case), group, case.n, score),
        tracker=tracker,  # type: ignore[arg-type]
        checkpoints=NoCheckpoints(),  # type: ignore[arg-type]
        tokenizer=None,
        total_steps=WARM_UP,
        kl_ctrl=FixedKLController(0.0),
        ref=group,
    )
    trainer.fit()
    sent, reused = group.traffic.sent_bytes, group.traffic.reused_bytes
    workers, cpu = sum(group.cpu_seconds()), time.process_time()
    trainer.total_steps = total
    trainer.fit()
    cpu = time.process_time() - cpu
    workers = sum(group.cpu_seconds()) - workers
    seconds = np.diff(tracker.times)[WARM_UP:]  # with what is outside the timer: the step's metrics
    result = {
        **asdict(case),
        "samples": case.prompts * case.n,
        "step_ms": round(1e3 * float(np.median(seconds)), 2),
        "best_step_ms": round(1e3 * float(seconds.min()), 2),
        "controller_cpu_ms": round(1e3 * cpu / steps, 2),
        "workers_cpu_ms": round(1e3 * workers / steps, 2),
        "sent_mb": round((group.traffic.sent_bytes - sent) / steps / 1e6, 3),
        "reused_mb": round((group.traffic.reused_bytes - reused) / steps / 1e6, 3),
    }
    for phase in PHASES:
        values = [row[f"timing_s/{phase}"] for row in tracker.rows[WARM_UP:]]
        result[f"{phase}_ms"] = round(1e3 * statistics.median(values), 2)
    group.shutdown()
    pool.release()
    return result


def plot(path: Path, series: dict[str, list[dict[str, Any]]]) -> None:
    """One panel for each size that was changed: milliseconds of a step by phase."""
    with saved_figure(path, len(series), (4.0, 3.5)) as axes:
        for axis, (name, results) in zip(axes, series.items(), strict=True):
            places = range(len(results))
            bottom = np.zeros(len(results))
            for phase in PHASES:
                heights = np.array([result[f"{phase}_ms"] for result in results])
                axis.bar(places, heights, bottom=bottom, label=phase)
                bottom += heights
            axis.plot(places, [result["step_ms"] for result in results], "k.", label="whole step")
            axis.set_ylim(0, 1.1 * max(result["step_ms"] for group in series.values() for result in group))
            axis.set_xticks(list(places), [str(result[name]) for result in results])
            axis.set_xlabel(name)
        axes[0].set_ylabel("overhead of a step, ms")
        axes[-1].legend(fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    base = Case()
    parser.add_argument("--prompts", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--n", type=int, nargs="*", default=[2, 8, 16])
    parser.add_argument("--length", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    ray.init(
        num_cpus=max([2, *options.ranks]),
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**30,
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    done: dict[Case, dict[str, Any]] = {}
    series: dict[str, list[dict[str, Any]]] = {}
    for name in ("prompts", "n", "length", "ranks"):
        for value in getattr(options, name):
            case = replace(base, **{name: value})
            if case not in done:
                done[case] = measure(case, options.steps)
                print(" ".join(f"{key}={number}" for key, number in done[case].items()), flush=True)
            series.setdefault(name, []).append(done[case])
    if base not in done:
        done[base] = measure(base, options.steps)
    ray.shutdown()
    if options.plot is not None:
        plot(options.plot, series)
    whole = done[base]
    print(
        json.dumps(
            {
                "benchmark": "scale",
                "steps": options.steps,
                "overhead_ms_at_512_samples": whole["step_ms"],
                "best_overhead_ms_at_512_samples": whole["best_step_ms"],
                "controller_cpu_ms_at_512_samples": whole["controller_cpu_ms"],
                "workers_cpu_ms_at_512_samples": whole["workers_cpu_ms"],
                "cases": list(done.values()),
            }
        )
    )


if __name__ == "__main__":
    main()

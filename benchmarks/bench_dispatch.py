"""How fast a batch travels through Ray as a ``DataProto``, against the same tensors pickled by torch.

Both ways alternate within one run and each round gives one ratio, so a busy machine slows both alike. Timed are
putting the batch into the object store, the way from the controller to a worker's method, and the way back. Counted
are the bytes that the controller puts into the store in a step of PPO with a reference and a critic, against a step
that sends the whole batch to every stage.

    python benchmarks/bench_dispatch.py [--megabytes 64] [--rounds 7]

Prints one JSON line: the medians of the ratios (above 1: ``DataProto`` is faster), of the rates in GB/s, and
``ratio_step_bytes``, how many times less a step sends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch

from verl import DataProto
from verl.single_controller.ray.fields import FieldStore
from verl.trainer.ppo.fields import stage_batch

#: rounds that are not counted: they open the store and touch its pages for the first time
WARM_UP = 3


def tensors_of(megabytes: int) -> dict[str, torch.Tensor]:
    """The tensors of a rollout batch: 8 bytes a token of ids, 4 of log-probabilities, 2 of a bfloat16 field."""
    columns = 1024
    rows = max(1, megabytes * 2**20 // (columns * 22))
    return {
        "input_ids": torch.randint(0, 1000, (rows, columns)),
        "attention_mask": torch.ones(rows, columns, dtype=torch.int64),
        "old_log_probs": torch.randn(rows, columns),
        "hidden": torch.randn(rows, columns).bfloat16(),
    }


@ray.remote(num_cpus=0.01)
class Peer:
    """The other process."""

    def __init__(self, megabytes: int) -> None:
        self.tensors = tensors_of(megabytes)
        self.batch = DataProto.from_dict(self.tensors)

    def receive(self, batch: Any) -> int:
        """Values have arrived, in this process's own memory, when the method starts."""
        return len(batch)

    def give_batch(self) -> DataProto:
        return self.batch

    def give_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors


#: rows, prompt and response tokens of the step whose bytes are counted
STEP = (512, 256, 768)
#: after which stage which fields are there, and which it reads besides those of the sequences
STAGES = (
    ("log_prob", ("old_log_probs", "entropys")),
    ("log_prob", ("ref_log_prob",)),
    ("values", ("values",)),
    ("update_critic", ()),
    ("update_actor", ()),
)


def step_bytes() -> dict[str, int]:
    """Bytes that a step puts: all fields for every stage, or what a stage reads and has not been put before."""
    rows, prompt, response = STEP
    mask = (torch.arange(response) < torch.randint(1, response + 1, (rows, 1))).long()
    attention = torch.cat([torch.ones(rows, prompt, dtype=torch.int64), mask], 1)
    ids = torch.randint(0, 150_000, (rows, prompt + response))
    tensors = {
        "prompts": ids[:, :prompt].clone(),
        "responses": ids[:, prompt:].clone(),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp_(min=0),
        "response_mask": mask,
        **{name: torch.rand(rows, response) for name in ("rollout_log_probs", "token_level_scores")},
    }
    batch, store, everything = DataProto.from_dict(tensors), FieldStore(), 0
    for stage, made in STAGES:
        if stage == "update_critic":
            later = ("token_level_rewards", "advantages", "returns")
            batch = batch.union(DataProto.from_dict({name: torch.rand(rows, response) for name in later}))
        everything += sum(value.numel() * value.element_size() for value in batch.batch.values())
        for half in stage_batch(batch, stage).chunk(2):
            store.place(half)
        if made:
            parts = [DataProto.from_dict({name: torch.rand(rows // 2, response) for name in made}) for _ in range(2)]
            result = DataProto.concat(parts)
            store.remember_results(result, parts, [ray.put(part) for part in parts])
            batch = batch.union(result)
    return {"step_bytes_all_fields": everything, "step_bytes": store.traffic.sent_bytes}


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=max(512, options.megabytes * 8) * 2**20,
    )
    tensors = tensors_of(options.megabytes)
    batch = DataProto.from_dict(tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    peer = Peer.remote(options.megabytes)
    ways: dict[str, Callable[[], object]] = {
        "put/dataproto": lambda: ray.put(batch),
        "put/torch": lambda: ray.put(tensors),
        "to_worker/dataproto": lambda: ray.get(peer.receive.remote(batch)),
        "to_worker/torch": lambda: ray.get(peer.receive.remote(tensors)),
        "to_controller/dataproto": lambda: ray.get(peer.give_batch.remote()),
        "to_controller/torch": lambda: ray.get(peer.give_tensors.remote()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + WARM_UP):
        for name, action in ways.items():
            elapsed = seconds(action)
            if round_number >= WARM_UP:
                times[name].append(elapsed)
    result: dict[str, Any] = {"benchmark": "dispatch", "megabytes": round(size / 2**20, 1), "rounds": options.rounds}
    for direction in ("put", "to_worker", "to_controller"):
        ours, theirs = times[f"{direction}/dataproto"], times[f"{direction}/torch"]
        ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
        result[f"ratio_{direction}"] = round(statistics.median(ratios), 2)
        result[f"gb_per_s_{direction}"] = round(size / 1e9 / statistics.median(ours), 2)
        result[f"torch_gb_per_s_{direction}"] = round(size / 1e9 / statistics.median(theirs), 2)
    counted = step_bytes()
    result |= {**counted, "ratio_step_bytes": round(counted["step_bytes_all_fields"] / counted["step_bytes"], 2)}
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

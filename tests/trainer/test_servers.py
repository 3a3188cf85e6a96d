"""Rollout servers as the trainer uses them: weights again for one that died, sleep between uses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.workers.rollout.helpers import make_model, random_prompts, served_everywhere, weights_of
from tests.workers.rollout.served import replicas, server_spec
from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.trainer.ppo.placement import processes_per_slot, replica_count, shared_config, slots_of_replicas
from verl.trainer.ppo.servers import ServerRollout
from verl.workers.rollout.base import GenerationRequest, SamplingParams, run_blocking
from verl.workers.sharding_manager.link import WeightLink


@pytest.mark.parametrize(
    ("replicas", "parallel", "workers", "count", "per_slot", "slots"),
    [
        (None, 1, 4, 4, 1, [[0], [1], [2], [3]]),
        (None, 2, 4, 2, 1, [[0, 1], [2, 3]]),
        (3, 1, 2, 3, 2, [[0], [1], [0]]),
        (1, 1, 4, 1, 1, [[0]]),
    ],
)
def test_replicas_get_the_places_of_the_workers(
    replicas: int | None, parallel: int, workers: int, count: int, per_slot: int, slots: list[list[int]]
) -> None:
    config = RolloutConfig(mode="async", num_replicas=replicas, tensor_model_parallel_size=parallel)
    assert replica_count(config, workers) == count
    assert processes_per_slot(config, workers) == per_slot
    assert slots_of_replicas(count, parallel, workers) == slots
    assert shared_config(config, 4).gpu_memory_utilization == config.gpu_memory_utilization / 4


@ray.remote(num_cpus=0)
class Sender:
    """The worker that trains; always with the same weights."""

    def __init__(self) -> None:
        self.transports: list[Any] = []  # their memory is read when a call is over

    def send(self, version: int, links: dict[int, WeightLink], again: bool) -> None:
        weights = weights_of(make_model(served_everywhere(), spread=2.0))
        for link in links.values():
            self.transports.append(link.sender(most_bytes=1 << 20))
            self.transports[-1].send(version, weights.items())


class Trainers:
    """A worker group of one such worker."""

    def __init__(self) -> None:
        self.worker = Sender.remote()
        self.calls: list[tuple[int, bool]] = []

    @property
    def send_weights(self) -> Any:
        class Method:
            def options(_, blocking: bool) -> Any:
                return self.send

        return Method()

    def send(self, version: int, links: dict[int, WeightLink], again: bool) -> list[Any]:
        self.calls.append((version, again))
        return [self.worker.send.remote(version, links, again)]


@pytest.mark.dist
@pytest.mark.usefixtures("ray_local")
def test_a_server_that_dies_in_use_comes_back_with_the_weights(tmp_path: Path) -> None:
    model = make_model(served_everywhere(), spread=2.0)
    settings = {"mode": "async", "prompt_length": 28, "response_length": 60, "max_num_seqs": 64, "dtype": "float32"}
    with replicas(server_spec(model, tmp_path, **settings), 2) as group:
        trainers = Trainers()
        rollout = ServerRollout(
            group,
            [[0], [0]],
            trainers,  # type: ignore[arg-type]
            RolloutConfig(**settings),  # type: ignore[arg-type]
            seed=1,
            host="127.0.0.1",
            device="cpu",
            timeout_s=200,
        )
        metrics = rollout.sync_weights(3)
        assert metrics["weight_sync/version"] == 3
        prompts = torch.tensor(random_prompts([6, 6]))
        batch = DataProto.from_dict({"input_ids": prompts, "attention_mask": torch.ones_like(prompts)})
        batch.meta_info.update(step=1)
        first = rollout.generate_sequences(batch)
        assert [health.state for health in group.call("health")] == ["asleep", "asleep"]
        assert first.batch["policy_version"].unique().tolist() == [3]

        with rollout.serving() as client:
            os.kill(group.replicas[0].infos[0].pid, signal.SIGKILL)
            request = GenerationRequest([3, 4], SamplingParams(8, seed=1, ignore_eos=True), "r")
            assert len(run_blocking(client.generate_many([request, request]))) == 2
        assert [health.state for health in group.call("health")] == ["asleep", "asleep"]
        assert trainers.calls == [(3, False), (3, True)]
        again = rollout.generate_sequences(batch)
        assert torch.equal(again.batch["responses"], first.batch["responses"])
        rollout.sync_weights(4)
        assert [health.policy_version for health in group.call("health")] == [4, 4]

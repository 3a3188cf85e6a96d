"""Where rollout servers run among the training workers."""

from __future__ import annotations

import pytest

from verl.config import RolloutConfig
from verl.trainer.ppo.placement import processes_per_slot, replica_count, shared_config, slots_of_replicas


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

"""The roles without a controller: what they tell their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.workers.engine.reference import policy_batch
from verl.config import ActorRolloutRefConfig, PPOConfig, load_config
from verl.errors import WeightSyncError
from verl.protocol import DataProto
from verl.utils.distributed import destroy_process_group
from verl.workers import fsdp_workers, megatron_workers
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.roles import actor_rollout_ref

RUNTIME: dict[str, Any] = {"device": "cpu", "seed": 1, "timeout_s": 60.0}


def section(model_dir: str, *overrides: str) -> ActorRolloutRefConfig:
    config = load_config(
        PPOConfig,
        "ppo_trainer",
        [
            "data.train_files=x.parquet",
            "data.train_batch_size=8",
            "data.max_prompt_length=11",
            "data.max_response_length=10",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.optim.weight_decay=0",
            "trainer.device=cpu",
            *overrides,
        ],
    )
    return config.actor_rollout_ref


@pytest.fixture
def make_worker(tiny_model_dir: str) -> Iterator[Callable[..., Any]]:
    """A maker of workers that have an actor and a rollout, the weights synced as version 0."""

    def make(*overrides: str) -> Any:
        worker = ActorRolloutRefWorker(section(tiny_model_dir, *overrides), **RUNTIME)
        worker.init_model()
        worker.sync_weights(0)
        return worker

    yield make
    destroy_process_group()


def update(worker: Any, advantage: float) -> None:
    """One step on eight rows whose tokens all have this advantage."""
    batch = policy_batch()
    mask = batch["response_mask"]
    batch["advantages"] = torch.full(mask.shape, advantage)
    batch["old_log_probs"] = torch.zeros(mask.shape)
    worker.update_actor(DataProto.from_dict(batch))


def test_a_step_that_changes_weights_is_counted(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    update(worker, 1.0)
    metrics = worker.sync_weights(1)
    assert metrics["weight_sync/changed_tensors"] == len(worker.actor.hf_tensors())


def test_a_step_that_the_rollout_does_not_see_is_an_error(
    make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    monkeypatch.setattr(worker.actor.optimizer, "step", lambda: None)
    update(worker, 1.0)
    with pytest.raises(WeightSyncError, match="0 of .* tensors changed"):
        worker.sync_weights(1)
    assert worker.sync_weights(2)["weight_sync/changed_tensors"] == 0  # no step since then


@pytest.mark.parametrize(
    ("advantage", "overrides"),
    [
        (float("inf"), []),  # the step is skipped
        (0.0, []),  # there is nothing to learn
        (1.0, ["actor_rollout_ref.actor.optim.lr=0"]),
        (1.0, ["actor_rollout_ref.actor.optim.lr_warmup_steps=10"]),  # begins with a learning rate of 0
    ],
)
def test_steps_that_cannot_change_weights_are_no_error(
    make_worker: Callable[..., Any], advantage: float, overrides: list[str]
) -> None:
    worker = make_worker(*overrides)
    update(worker, advantage)
    assert worker.sync_weights(1)["weight_sync/changed_tensors"] in (0, len(worker.actor.hf_tensors()))


def test_nobody_looks_where_it_is_not_wanted(make_worker: Callable[..., Any]) -> None:
    worker = make_worker("actor_rollout_ref.rollout.on_unchanged_weights=ignore")
    update(worker, 1.0)
    assert "weight_sync/changed_tensors" not in worker.sync_weights(1)


@pytest.mark.parametrize(
    ("rollout", "size", "groups"),
    [
        ("vllm", "actor.fsdp_config.fsdp_size=-1", [(0, 2), (1, 3)]),
        ("vllm", "actor.fsdp_config.fsdp_size=2", [(0, 1), (2, 3)]),
        ("vllm", "actor.megatron.tensor_model_parallel_size=2", [(0, 1), (2, 3)]),  # also with two stages
        ("vllm", "actor.megatron.tensor_model_parallel_size=4", [(0, 2), (1, 3)]),
        ("vllm", "actor.megatron.tensor_model_parallel_size=1", None),  # whole layers: any two ranks
        ("sglang", "actor.fsdp_config.fsdp_size=-1", {}),  # neighbours share a server
        ("sglang", "actor.megatron.tensor_model_parallel_size=2", {}),
    ],
)
def test_ranks_generate_together_with_what_they_train(
    rollout: str, size: str, groups: Any, tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron = "megatron" in size
    config = section(
        tiny_model_dir,
        f"actor_rollout_ref.actor.strategy={'megatron' if megatron else 'fsdp'}",
        f"actor_rollout_ref.rollout.name={rollout}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"actor_rollout_ref.{size}",
        "trainer.n_gpus_per_node=4",
    )
    workers: Any = megatron_workers if megatron else fsdp_workers
    worker = workers.ActorRolloutRefWorker(config, **RUNTIME)
    for module in (actor_rollout_ref, fsdp_workers):
        monkeypatch.setattr(module, "get_world_size", lambda: 4)
    monkeypatch.setattr(actor_rollout_ref, "env_local_world_size", lambda: 4)
    try:
        assert worker.rollout_options() == (groups if groups == {} else {"groups": groups})
    finally:
        destroy_process_group()

"""The roles without a controller: what they tell their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.workers.engine.reference import policy_batch
from verl.config import PPOConfig, load_config
from verl.errors import WeightSyncError
from verl.protocol import DataProto
from verl.utils.distributed import destroy_process_group
from verl.workers.fsdp_workers import ActorRolloutRefWorker


@pytest.fixture
def make_worker(tiny_model_dir: str) -> Iterator[Callable[..., Any]]:
    """A maker of workers that have an actor and a rollout, the weights handed over as version 0."""

    def make(*overrides: str) -> Any:
        config = load_config(
            PPOConfig,
            "ppo_trainer",
            [
                "data.train_files=x.parquet",
                "data.train_batch_size=8",
                "data.max_prompt_length=11",
                "data.max_response_length=10",
                f"actor_rollout_ref.model.path={tiny_model_dir}",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "actor_rollout_ref.actor.optim.weight_decay=0",
                "trainer.device=cpu",
                *overrides,
            ],
        )
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, device="cpu", seed=1, timeout_s=60.0)
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

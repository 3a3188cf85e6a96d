"""GRPO with vLLM in the training processes: it samples from the policy that is trained, step after step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_over_sampling import check as check_carried
from tests.fixtures.tiny import make_tiny_model_dir
from tests.workers.rollout.adapted import adapter_mb
from tests.workers.rollout.helpers import missing_package

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or ""),
]


@pytest.fixture(scope="session")
def served_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose attention heads have a size that vLLM serves on CPUs."""
    return make_tiny_model_dir(tmp_path_factory.mktemp("models") / "served", hidden=64, heads=2, kv_heads=2)


@pytest.fixture
def train(
    run_training: Callable[..., list[dict[str, Any]]], served_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")

    def run(*overrides: str) -> list[dict[str, Any]]:
        return run_training(
            f"actor_rollout_ref.model.path={served_model_dir}", "actor_rollout_ref.rollout.name=vllm", *overrides
        )

    return run


def test_sampled_log_probs_are_the_trainers_after_every_update(train: Callable[..., list[dict[str, Any]]]) -> None:
    rows = train(
        "trainer.controller=local",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.temperature=0.8",
        "data.val_batch_size=6",
    )
    assert len([row for row in rows if "actor/pg_loss" in row["data"]]) == 3
    for row in rows:
        if "training/rollout_probs_diff_max" in row["data"]:
            assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
            assert row["data"]["actor/grad_norm"] > 0
    versions = [row["data"]["weight_sync/version"] for row in rows if "weight_sync/version" in row["data"]]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("parallel", [1, 2])
def test_two_ranks_on_ray(parallel: int, train: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = train(
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}",
    )
    assert len(rows) == 2
    for row in rows:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4


LORA = [
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr=1e-2",
]


def handed_over(rows: list[dict[str, Any]]) -> float:
    """Largest update, in MB, of a run in which the policy that samples was the one that trains."""
    for row in rows:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        assert row["data"]["actor/grad_norm"] > 0
    return max(row["data"]["weight_sync/copied_mb"] for row in rows)


def test_updates_hand_the_adapter_over_alone(train: Callable[..., list[dict[str, Any]]], served_model_dir: str) -> None:
    apart = train("trainer.controller=local", *LORA)
    assert handed_over(apart) == pytest.approx(adapter_mb(served_model_dir, rank=4))
    merged = train("trainer.controller=local", *LORA, "actor_rollout_ref.model.lora.merge=True")
    assert handed_over(merged) > 3 * handed_over(apart)
    for name in ("critic/score/mean", "actor/grad_norm"):  # the same run, up to rounding
        assert apart[0]["data"][name] == pytest.approx(merged[0]["data"][name], rel=1e-3)


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [pytest.param("shared_memory", 2, marks=pytest.mark.slow), ("broadcast", 1), ("disk", 1)],
)
def test_servers_get_the_adapter_alone(
    backend: str, ranks: int, train: Callable[..., list[dict[str, Any]]], served_model_dir: str, tmp_path: Path
) -> None:
    where = [f"actor_rollout_ref.rollout.checkpoint_engine.directory={tmp_path}"] if backend == "disk" else []
    rows = train(
        *LORA,
        *where,
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.mode=async",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}",
    )
    assert handed_over(rows) == pytest.approx(adapter_mb(served_model_dir, rank=4))


def test_samples_are_carried_to_the_next_step(train: Callable[..., list[dict[str, Any]]]) -> None:
    rows = train(
        "trainer.controller=local",
        "data.train_batch_size=4",
        "data.max_response_length=48",
        "trainer.total_training_steps=4",
        "actor_rollout_ref.rollout.over_sample_rate=0.5",
        "actor_rollout_ref.rollout.partial_rollout=True",
        "actor_rollout_ref.rollout.max_staleness=2",
    )
    check_carried(rows)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
@pytest.mark.parametrize("parallel", [1, 2])
def test_megatron_trains_what_vllm_samples_from(
    parallel: int, train: Callable[..., list[dict[str, Any]]], served_model_dir: str
) -> None:
    rows = train(
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}",
    )
    assert len(rows) == 2
    model_mb = (Path(served_model_dir) / "model.safetensors").stat().st_size / 2**20
    for row in rows:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        # half of the model is missing; next to nothing where the same halves generate
        received = row["data"]["weight_sync/received_mb"]
        assert received < (0.05 if parallel == 2 else 0.5) * model_mb
        assert received > 0


@pytest.mark.parametrize("parallel", [1, 2])
def test_servers(parallel: int, train: Callable[..., list[dict[str, Any]]]) -> None:
    rows = train(
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}",
    )
    assert [row["data"]["weight_sync/version"] for row in rows] == [1, 2]
    for row in rows:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        assert row["data"]["actor/grad_norm"] > 0


def test_low_rank_adapters_reach_vllm_merged(train: Callable[..., list[dict[str, Any]]]) -> None:
    rows = train(
        "trainer.controller=local",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    for row in rows:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        assert row["data"]["actor/grad_norm"] > 0
    assert rows[0]["data"]["actor/pg_loss"] != rows[2]["data"]["actor/pg_loss"]

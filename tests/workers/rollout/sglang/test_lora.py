"""Low-rank adapters that an SGLang server holds beside the base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout.adapted import (
    ALPHA,
    PROMPTS,
    RANK,
    SAMPLED,
    AdaptedModel,
    adapter_bytes,
    assert_served,
    change_adapter,
    make_adapted_model,
)
from tests.workers.rollout.helpers import generate, missing_package
from verl.config import ModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.workers.rollout.engine import run_blocking
from verl.workers.sharding_manager.lora_sync import AdapterSync

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(missing_package("sglang")), reason=missing_package("sglang") or ""),
]


@pytest.fixture
def model() -> torch.nn.Module:
    return make_adapted_model()


def make_engine(model: torch.nn.Module, directory: Path, **settings: Any) -> Any:
    from verl.workers.rollout.sglang.engine import SGLangRolloutEngine

    model.config.save_pretrained(directory)
    rollout = {"name": "sglang", "dtype": "float32", "prompt_length": 28, "response_length": 100, "max_num_seqs": 64}
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": settings.pop("target_modules", ["all-linear"])}
    return SGLangRolloutEngine(
        ModelConfig(path=str(directory), **lora), RolloutConfig(**{**rollout, **settings}), device="cpu"
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = make_engine(make_adapted_model(), tmp_path_factory.mktemp("sglang"))
    yield engine
    engine.close()


def copied(metrics: dict[str, float]) -> int:
    return round(metrics["weight_sync/copied_mb"] * 2**20)


def test_the_base_weights_come_once_and_the_adapter_at_every_update(
    engine: Any, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    assert engine.supports_lora_update
    assert engine.needs_base_weights
    sync = AdapterSync(AdaptedModel(model), engine, bucket_bytes=50_000, on_unchanged="error")
    version = engine.policy_version
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert copied(sync.sync(version + 1)) >= whole
    run_blocking(engine.wake())
    assert_served(model, engine, atol=1e-4)
    change_adapter(model, seed=2)
    assert copied(sync.sync(version + 2)) == adapter_bytes(model) < whole / 3
    assert_served(model, engine, atol=1e-4)
    # asleep: both are given back, and the base is read again where it is
    held = engine.memory().owned_weights
    run_blocking(engine.sleep())
    assert engine.memory().owned_weights == 0
    run_blocking(engine.wake())
    assert engine.memory().owned_weights == held
    assert_served(model, engine, atol=1e-4)
    run_blocking(engine.sleep())
    change_adapter(model, seed=3)
    assert copied(sync.sync(version + 3)) == adapter_bytes(model)
    run_blocking(engine.wake())
    assert_served(model, engine, atol=1e-4)


def test_an_update_needs_the_whole_adapter(engine: Any, model: torch.nn.Module) -> None:
    version = engine.policy_version
    AdapterSync(AdaptedModel(model, streams=True), engine).sync(version + 1)
    run_blocking(engine.wake())
    matrices = AdaptedModel(model).local_tensors("adapters")
    assert matrices is not None
    names = list(matrices)

    async def update(names: list[str]) -> None:
        await engine.begin_update(version + 2)
        await engine.load([(name, matrices[name]) for name in names])
        await engine.end_update()

    with pytest.raises(WeightSyncError, match=f"1 of 28 weights did not arrive: {names[0]}"):
        run_blocking(update(names[1:]))
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, PROMPTS, SAMPLED)
    assert not engine.needs_base_weights
    run_blocking(update(names))
    assert_served(model, engine, atol=1e-4)


def test_some_parts_of_a_fused_layer_have_an_adapter(tmp_path: Path) -> None:
    targets = (r"model\.layers\.1\..*(v_proj|down_proj|up_proj)",)
    model = make_adapted_model(targets=targets)
    engine = make_engine(model, tmp_path, target_modules=list(targets))
    try:
        AdapterSync(AdaptedModel(model), engine).sync(1)
        run_blocking(engine.wake())
        assert_served(model, engine, atol=1e-4)
    finally:
        engine.close()


def test_layers_without_a_place_come_merged_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.workers.rollout.sglang.engine.ADAPTED_LAYERS", frozenset({"q_proj"}))
    with pytest.raises(ConfigError, match="SGLang has no places for adapters on down_proj, gate_proj"):
        make_engine(make_adapted_model(), tmp_path, lora_merge=False)

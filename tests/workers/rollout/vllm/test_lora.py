"""Low-rank adapters that vLLM holds beside the base model."""

from __future__ import annotations

import logging
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
from tests.workers.rollout.helpers import (
    generate,
    missing_package,
)
from verl.config import ModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.workers.rollout.engine import run_blocking
from verl.workers.sharding_manager.lora_sync import AdapterSync

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or ""),
]


def make_engine(
    model: torch.nn.Module, directory: Path, *, adapter: dict[str, Any] | None = None, **rollout: Any
) -> Any:
    """A vLLM engine without weights for a model with an adapter."""
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    model.config.save_pretrained(directory)
    settings = {"name": "vllm", "dtype": "float32", "prompt_length": 28, "response_length": 100, "max_num_seqs": 64}
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA, **(adapter or {})}
    return VLLMRolloutEngine(
        ModelConfig(path=str(directory), **lora), RolloutConfig(**{**settings, **rollout}), device="cpu"
    )


@pytest.fixture
def model() -> torch.nn.Module:
    return make_adapted_model()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_engine(make_adapted_model(), tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def engine(shared: Any) -> Any:
    """An engine that is awake and has no weights."""
    run_blocking(shared.wake(["kv_cache"]))
    run_blocking(shared.sleep(level=2))
    run_blocking(shared.wake(["kv_cache"]))
    shared._version = -1
    assert shared.needs_base_weights
    return shared


def sync_of(model: torch.nn.Module, engine: Any, *, streams: bool = False) -> AdapterSync:
    return AdapterSync(AdaptedModel(model, streams=streams), engine, on_unchanged="error")


def copied(metrics: dict[str, float]) -> int:
    return round(metrics["weight_sync/copied_mb"] * 2**20)


# ---- updates


@pytest.mark.parametrize("streams", [False, True])
def test_the_base_weights_come_once_and_the_adapter_at_every_update(
    engine: Any, model: torch.nn.Module, streams: bool
) -> None:
    sync = sync_of(model, engine, streams=streams)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert copied(sync.sync(1)) >= whole
    assert_served(model, engine)
    before = generate(engine, PROMPTS, SAMPLED)
    change_adapter(model, seed=2)
    second = sync.sync(2)
    assert copied(second) == adapter_bytes(model) < whole / 3
    assert second["weight_sync/changed_tensors"] == 2 * 7 * 2  # A and B of seven layers in two blocks
    after = generate(engine, PROMPTS, SAMPLED)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert {c.policy_version for c in after} == {2}
    assert_served(model, engine)


def test_an_adapter_that_no_step_changed_is_an_error(engine: Any, model: torch.nn.Module) -> None:
    sync = sync_of(model, engine)
    sync.sync(1)
    change_adapter(model, seed=2)
    sync.sync(2)
    with pytest.raises(WeightSyncError, match="0 of 28 tensors changed"):
        sync.sync(3)


def test_checksums_cover_base_and_adapter(engine: Any, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    sync = sync_of(model, engine)
    sync.sync(1)
    change_adapter(model, seed=2)
    sync.sync(2)
    digests = run_blocking(engine.checksums())
    assert digests.keys() == {name for name, _ in model.named_parameters()}
    change_adapter(model, seed=3)
    (slots,) = [engine.engine.model_executor.driver_worker.worker._verl_slots]
    _, memory = slots._places["model.layers.1.mlp.up_proj.lora_B"][0]
    original = slots.load

    def load(bucket: Any) -> None:
        original(bucket)
        memory[0, 0, 0, 0] += 1.0

    monkeypatch.setattr(slots, "load", load)
    with pytest.raises(
        WeightSyncError, match=r"differ between training and rollout: model.layers.1.mlp.up_proj.lora_B"
    ):
        sync.sync(3)


def test_an_update_needs_the_whole_adapter(engine: Any, model: torch.nn.Module) -> None:
    sync_of(model, engine).sync(1)
    matrices = AdaptedModel(model).local_tensors("adapters")
    assert matrices is not None
    missing = matrices.pop("model.layers.0.self_attn.q_proj.lora_B")

    async def update() -> None:
        await engine.begin_update(2)
        await engine.load(matrices.items())
        await engine.end_update()

    with pytest.raises(
        WeightSyncError, match=r"1 of 28 weights did not arrive: model.layers.0.self_attn.q_proj.lora_B"
    ):
        run_blocking(update())
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, PROMPTS, SAMPLED)
    assert not engine.needs_base_weights  # which is as it was
    matrices["model.layers.0.self_attn.q_proj.lora_B"] = missing
    run_blocking(update())
    assert_served(model, engine)
    with pytest.raises(WeightSyncError, match="lora_A' has shape"):
        matrices["model.layers.0.self_attn.q_proj.lora_A"] = torch.zeros(RANK + 1, 64)
        run_blocking(update())


# ---- memory


def test_sleep_gives_base_and_adapter_back_and_waking_reads_them_again(engine: Any, model: torch.nn.Module) -> None:
    sync = sync_of(model, engine)
    sync.sync(1)
    held = engine.memory().owned_weights
    before = generate(engine, PROMPTS, SAMPLED)
    run_blocking(engine.sleep())
    assert engine.memory().owned_weights == 0
    run_blocking(engine.wake())
    assert engine.memory().owned_weights == held
    assert [c.token_ids for c in generate(engine, PROMPTS, SAMPLED)] == [c.token_ids for c in before]


def test_an_update_of_a_sleeping_engine_brings_the_adapter_alone(engine: Any, model: torch.nn.Module) -> None:
    sync = sync_of(model, engine)
    sync.sync(1)
    run_blocking(engine.sleep())
    change_adapter(model, seed=2)
    assert copied(sync.sync(2)) == adapter_bytes(model)  # the engine reads the base weights where they are
    run_blocking(engine.wake())
    assert_served(model, engine)
    run_blocking(engine.sleep(level=2))  # drops what it knows too
    change_adapter(model, seed=3)
    assert copied(sync.sync(3)) > adapter_bytes(model)
    run_blocking(engine.wake())
    assert_served(model, engine)


def test_an_adapter_that_changed_since_cannot_be_read_again(engine: Any, model: torch.nn.Module) -> None:
    sync_of(model, engine).sync(1)
    run_blocking(engine.sleep())
    change_adapter(model, seed=2)
    with pytest.raises(RolloutError, match="the training engine's have changed since"):
        run_blocking(engine.wake())


# ---- which models and ranks


def test_only_some_layers_have_an_adapter(tmp_path: Path) -> None:
    """One part of a fused projection, and layers that a regular expression leaves out."""
    targets = (r"model\.layers\.1\..*(k_proj|down_proj|up_proj)",)
    model = make_adapted_model(targets=targets, rank=8)
    engine = make_engine(model, tmp_path, adapter={"lora_rank": 8, "target_modules": list(targets)})
    assert engine.supports_lora_update
    sync_of(model, engine).sync(1)
    run_blocking(engine.wake())
    assert_served(model, engine)


def test_ranks_that_vllm_has_no_room_for_come_merged_or_are_refused(
    model: torch.nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"lora_merge=False, but .*lora_rank=600 is above vLLM's largest, 512"):
        make_engine(model, tmp_path, adapter={"lora_rank": 600}, lora_merge=False)
    with caplog.at_level(logging.WARNING, "verl"):
        engine = make_engine(model, tmp_path, adapter={"lora_rank": 600})
    assert not engine.supports_lora_update
    assert "Every update sends whole weights with the adapter added to them" in caplog.text


def test_a_merged_adapter_is_asked_for(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path, lora_merge=True)
    assert not engine.supports_lora_update
    with pytest.raises(WeightSyncError, match="unexpected weight 'model.layers.0.self_attn.q_proj.lora_A'"):
        sync_of(model, engine).sync(1)


def test_models_of_which_vllm_has_no_places_come_merged_or_are_refused(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.model_executor.models.interfaces.supports_lora", lambda kind: False)
    with pytest.raises(ConfigError, match="vLLM's Qwen2ForCausalLM has no places for adapters"):
        make_engine(model, tmp_path, lora_merge=False)
    with caplog.at_level(logging.WARNING, "verl"):
        engine = make_engine(model, tmp_path)
    assert not engine.supports_lora_update
    assert "has no places for adapters" in caplog.text

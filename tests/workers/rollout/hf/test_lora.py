"""Low-rank adapters in the built-in engine: read where they are trained, beside the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.fixtures.vision import make_vision_model_dir
from tests.models.images import image_prompt, make_images
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
from tests.workers.rollout.helpers import generate, reference_greedy
from verl.config import ModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.models.lora import LoraLinear, LoraSettings, add_adapters
from verl.workers.rollout.engine import run_blocking
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import SamplingParams
from verl.workers.sharding_manager.lora_sync import AdapterSync


@pytest.fixture
def model() -> torch.nn.Module:
    return make_adapted_model()


def make_engine(model: torch.nn.Module, directory: Path, **rollout: Any) -> HFRolloutEngine:
    model.config.save_pretrained(directory)
    return HFRolloutEngine(
        ModelConfig(path=str(directory), lora_rank=RANK, lora_alpha=ALPHA),
        RolloutConfig(**{"dtype": "float32", **rollout}),
        device="cpu",
    )


def sync_of(model: torch.nn.Module, engine: HFRolloutEngine, *, streams: bool = False) -> AdapterSync:
    return AdapterSync(AdaptedModel(model, streams=streams), engine, on_unchanged="error")


@pytest.mark.parametrize("pack", [False, True])
def test_base_and_adapter_are_the_training_engines_own_tensors(
    model: torch.nn.Module, tmp_path: Path, pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.workers.rollout.hf.packed_linears.PACKED_FROM", 1)
    engine = make_engine(model, tmp_path, pack_weights=pack)
    sync = sync_of(model, engine)
    assert sync.sync(1)["weight_sync/copied_mb"] == 0
    assert engine.memory().aliased_weights == sum(parameter.nbytes for parameter in model.parameters())
    assert_served(model, engine)
    if pack:
        assert engine.packed is not None
        assert sum(isinstance(layer, LoraLinear) for layer in engine.packed.layers) == 14
        assert engine.packed.nbytes > 0
    change_adapter(model, seed=2)
    assert sync.sync(2)["weight_sync/copied_mb"] == 0
    assert_served(model, engine)


def test_streamed_base_weights_come_once(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    engine = make_engine(model, tmp_path)
    sync = sync_of(model, engine, streams=True)
    sync.sync(1)
    whole = engine.memory().owned_weights
    assert whole == sum(parameter.nbytes for parameter in model.parameters())
    change_adapter(model, seed=2)
    run_blocking(engine.sleep())
    assert round(sync.sync(2)["weight_sync/copied_mb"] * 2**20) == adapter_bytes(model) < whole / 3
    run_blocking(engine.wake())
    assert_served(model, engine)


def test_a_copy_in_another_type_is_made_again_from_the_frozen_weights(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path, dtype="bfloat16")
    sync = sync_of(model, engine)
    sync.sync(1)
    run_blocking(engine.sleep())
    assert engine.memory().owned_weights == 0
    change_adapter(model, seed=2)
    sync.sync(2)
    run_blocking(engine.wake())
    assert engine.memory().owned_weights == sum(parameter.nbytes for parameter in model.parameters()) / 2
    again = make_engine(model, tmp_path, dtype="bfloat16")
    sync_of(model, again).sync(1)
    assert [c.token_ids for c in generate(engine, PROMPTS, SAMPLED)] == [
        c.token_ids for c in generate(again, PROMPTS, SAMPLED)
    ]


def test_an_update_needs_the_whole_adapter_and_a_base(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    matrices = AdaptedModel(model).local_tensors("adapters")
    assert matrices is not None

    async def update(version: int, names: list[str]) -> None:
        await engine.begin_update(version)
        await engine.load([(name, matrices[name]) for name in names])
        await engine.end_update()

    names = list(matrices)
    with pytest.raises(WeightSyncError, match="26 of 54 weights did not arrive: model.embed_tokens.weight"):
        run_blocking(update(1, names))
    sync_of(model, engine).sync(1)
    with pytest.raises(WeightSyncError, match=f"1 of 28 weights did not arrive: {names[0]}"):
        run_blocking(update(2, names[1:]))
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, PROMPTS, SAMPLED)
    assert not engine.needs_base_weights
    run_blocking(update(2, names))
    assert_served(model, engine)


def test_a_merged_adapter_is_asked_for(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path, lora_merge=True)
    assert not engine.supports_lora_update
    with pytest.raises(WeightSyncError, match="has no such parameter"):
        sync_of(model, engine).sync(1)


def test_images_and_adapters(tmp_path: Path) -> None:
    directory = make_vision_model_dir(tmp_path, hidden=64, heads=2, vision_width=32)
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    add_adapters(model, LoraSettings(RANK, ALPHA, ("all-linear",)), seed=0)  # of the vision tower too
    change_adapter(model, seed=1)
    engine = HFRolloutEngine(
        ModelConfig(path=directory, lora_rank=RANK, lora_alpha=ALPHA), RolloutConfig(dtype="float32"), device="cpu"
    )
    sync_of(model, engine).sync(1)
    config = model.config
    tokens = (config.image_token_id, config.vision_start_token_id, config.vision_end_token_id)
    image = make_images((4, 6), seed=1)
    prompt = image_prompt(image, (4, 3), 1, tokens)
    (completion,) = generate(engine, [prompt], SamplingParams(8, temperature=0.0), [image])
    assert completion.token_ids == reference_greedy(model, prompt, 8, image, config.image_token_id)


def test_layers_that_are_not_there_are_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="chooses no linear layer"):
        HFRolloutEngine(ModelConfig(path=str(tmp_path), lora_rank=4, target_modules=["wqkv"]), RolloutConfig())

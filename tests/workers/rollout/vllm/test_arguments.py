"""What vLLM is asked for; this does not need the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout.helpers import missing_package, served_everywhere
from verl.config import ModelConfig, RolloutConfig
from verl.config.rollout import EngineKwargsConfig
from verl.errors import ConfigError
from verl.workers.rollout.vllm.arguments import engine_arguments


def arguments(
    *,
    device: str = "cpu",
    ranks: int = 1,
    on_node: int = 1,
    model: ModelConfig | None = None,
    images: bool = False,
    **rollout: Any,
) -> dict[str, Any]:
    settings = {"name": "vllm", "prompt_length": 28, "response_length": 100, "max_num_seqs": 4, **rollout}
    return engine_arguments(
        model or ModelConfig(path="m"),
        RolloutConfig(**settings),
        directory=Path("m"),
        text_config=served_everywhere(),
        architecture=None,
        device=torch.device(device),
        dtype=torch.float32,
        world_size=ranks,
        local_world_size=on_node,
        reads_images=images,
    )


def test_keys_become_arguments() -> None:
    got = arguments(
        device="cuda",
        ranks=8,
        on_node=4,
        tensor_model_parallel_size=4,
        gpu_memory_utilization=0.7,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    assert got["distributed_executor_backend"] == "external_launcher"
    assert (got["tensor_parallel_size"], got["gpu_memory_utilization"], got["max_num_seqs"]) == (4, 0.7, 4)
    assert (got["max_model_len"], got["max_num_batched_tokens"]) == (128, 512)
    assert (got["enable_chunked_prefill"], got["enforce_eager"], got["enable_prefix_caching"]) == (True, False, False)
    assert got["enable_sleep_mode"] is True
    assert got["logprobs_mode"] == "processed_logprobs"
    assert "kv_cache_memory_bytes" not in got
    assert arguments(device="cuda", free_cache_engine=False)["enable_sleep_mode"] is False


def test_images_come_as_the_trainer_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    got = arguments(images=True)
    assert (got["skip_tokenizer_init"], got["mm_device_do_normalize"], got["mm_processor_cache_gb"]) == (
        False,
        False,
        0,
    )
    assert arguments()["skip_tokenizer_init"] is True
    more = {"mm_processor_cache_gb": 1}
    assert arguments(images=True, engine_kwargs=EngineKwargsConfig(vllm=more))["mm_processor_cache_gb"] == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="only beside torchvision.*rollout.name=hf"):
        arguments(images=True)


def test_on_a_cpu_prompts_stay_whole_and_the_cache_fits_the_sequences() -> None:
    got = arguments(max_num_batched_tokens=16)
    assert (got["enable_chunked_prefill"], got["enforce_eager"]) == (False, True)
    assert got["max_num_batched_tokens"] == 128  # a whole prompt must fit
    # (4 sequences + 1) x 1 block of 128 tokens x 2 layers x keys and values of 1 head x 32 values x 4 bytes
    assert got["kv_cache_memory_bytes"] == 5 * 128 * 2 * 2 * 32 * 4
    assert "distributed_executor_backend" not in got
    with pytest.raises(ConfigError, match="enable_chunked_prefill=True: on CPUs"):
        arguments(enable_chunked_prefill=True)


def test_settings_under_vllms_own_names_win() -> None:
    kwargs = EngineKwargsConfig(vllm={"block_size": 32, "kv_cache_memory_bytes": 1 << 20, "swap_space": None})
    got = arguments(engine_kwargs=kwargs)
    assert (got["block_size"], got["kv_cache_memory_bytes"]) == (32, 1 << 20)
    assert "swap_space" not in got


def test_the_models_overrides_reach_vllm() -> None:
    override = arguments(model=ModelConfig(path="m", override_config={"rms_norm_eps": 1e-3}))["hf_overrides"]
    assert override(served_everywhere()).rms_norm_eps == 1e-3


def test_ranks_that_share_a_model_are_on_one_machine() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=4: must divide the 2 ranks of a machine"):
        arguments(ranks=8, on_node=2, tensor_model_parallel_size=4)


def test_lengths_are_bounded_by_the_models_positions() -> None:
    assert arguments(prompt_length=100, response_length=100)["max_model_len"] == 128
    with pytest.raises(ConfigError, match="max_model_len=200: the model has 128 positions"):
        arguments(max_model_len=200)


@pytest.mark.skipif(missing_package("vllm") is None, reason="vllm is installed")
def test_without_the_package_the_message_says_what_to_install(tmp_path: Path) -> None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    with pytest.raises(ConfigError, match=r"the package vllm is not installed; install verl\[vllm\]"):
        VLLMRolloutEngine(ModelConfig(path=str(tmp_path)), RolloutConfig(name="vllm"))

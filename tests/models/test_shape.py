"""Bytes of a cached token: literal numbers for published models, and what the built-in engine really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.workers.rollout.helpers import served_everywhere
from verl.config import ModelConfig, RolloutConfig
from verl.config.rollout import EngineKwargsConfig
from verl.models.shape import CacheLayer, cache_layers, cached_token_bytes
from verl.workers.rollout.settings import cache_itemsize
from verl.workers.rollout.sglang.arguments import server_arguments
from verl.workers.rollout.vllm.arguments import engine_arguments


def config(kind: str, **values: Any) -> Any:
    return AutoConfig.for_model(kind, **values)


QWEN2_7B = (
    "qwen2",
    {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
)
LLAMA3_8B = (
    "llama",
    {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
)
QWEN3_30B = (
    "qwen3_moe",
    {
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_size": 2048,
        "head_dim": 128,
    },
)
GPT_OSS_20B = (
    "gpt_oss",
    {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
)
#: 61 layers with a latent vector of 512 numbers and 64 of the position
DEEPSEEK_V3 = ("deepseek_v3", {})
#: every fourth of 48 layers is attention, with 2 heads of 256
QWEN3_NEXT = ("qwen3_next", {})
#: keys of 192 and values of 128 numbers, 4 heads
MIMO_V2 = ("mimo_v2_flash", {})
#: the last 15 of 35 layers read what earlier ones keep
GEMMA3N = ("gemma3n_text", {})


@pytest.mark.parametrize(
    ("model", "itemsize", "parallel", "expected"),
    [
        (QWEN2_7B, 2, 1, 57_344),
        (QWEN2_7B, 2, 2, 28_672),
        (QWEN2_7B, 2, 8, 14_336),  # 4 heads for 8 ranks: one on each
        (QWEN2_7B, 4, 1, 114_688),
        (QWEN2_7B, 1, 1, 28_672),  # a cache of 8 bits
        (LLAMA3_8B, 2, 1, 131_072),
        (LLAMA3_8B, 2, 4, 32_768),
        (QWEN3_30B, 2, 1, 98_304),
        (GPT_OSS_20B, 2, 1, 49_152),  # half of the layers have a window
        (DEEPSEEK_V3, 2, 1, 70_272),
        (DEEPSEEK_V3, 2, 8, 70_272),  # every rank keeps the whole latent vector
        (QWEN3_NEXT, 2, 1, 24_576),
        (QWEN3_NEXT, 2, 8, 12_288),
        (MIMO_V2, 2, 1, 48 * 4 * (192 + 128) * 2),
        (GEMMA3N, 2, 1, 20 * 2 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_cached_token(
    model: tuple[str, dict[str, Any]], itemsize: int, parallel: int, expected: int
) -> None:
    kind, values = model
    assert cached_token_bytes(config(kind, **values), itemsize, parallel=parallel) == expected


def test_latent_attention_is_counted_alike_by_all_engines(tmp_path: Path) -> None:
    """4 layers x (512 + 64) numbers x 2 bytes; it was 4,608, 4,630 and 131,072."""
    latent = config(
        "deepseek_v3", num_hidden_layers=4, num_attention_heads=128, num_key_value_heads=128, hidden_size=64
    )
    assert cached_token_bytes(latent, 2) == 4_608
    assert cache_layers(latent) == (CacheLayer(1, 576),) * 4
    common: dict[str, Any] = {
        "directory": Path("m"), "text_config": latent, "architecture": None, "device": torch.device("cpu"),
        "dtype": torch.bfloat16, "local_world_size": 1,
    }  # fmt: skip
    keys: dict[str, Any] = {"prompt_length": 28, "response_length": 100, "max_num_seqs": 4}
    model = ModelConfig(path="m")
    vllm = engine_arguments(model, RolloutConfig(name="vllm", **keys), world_size=1, **common)
    assert vllm["kv_cache_memory_bytes"] == (4 + 1) * 128 * 4_608
    sglang = server_arguments(model, RolloutConfig(name="sglang", **keys), **common)
    assert sglang["max_total_tokens"] == 4 * 136


def test_type_of_the_cache() -> None:
    def itemsize(engine: str, **kwargs: Any) -> int:
        given = EngineKwargsConfig(**{engine: kwargs}) if engine != "hf" else EngineKwargsConfig()
        return cache_itemsize(RolloutConfig(name=engine, engine_kwargs=given), torch.bfloat16)

    assert itemsize("hf") == 2
    assert itemsize("vllm") == itemsize("sglang", kv_cache_dtype="auto") == 2
    assert itemsize("vllm", kv_cache_dtype="fp8") == itemsize("sglang", kv_cache_dtype="fp8_e5m2") == 1
    assert itemsize("sglang", kv_cache_dtype="float32") == 4


TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 16}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8}),
        (
            "deepseek_v3",
            {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
             "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
             "moe_intermediate_size": 16},
        ),
    ],
)  # fmt: skip
def test_the_built_in_engine_holds_what_is_counted(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from verl.workers.rollout.engine import run_blocking
    from verl.workers.rollout.hf.engine import HFRolloutEngine
    from verl.workers.rollout.types import GenerationRequest, SamplingParams

    built = config(kind, **{**TINY, **values})
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(built)
    source.save_pretrained(tmp_path)
    rollout = RolloutConfig(name="hf", prompt_length=8, response_length=24, free_cache_engine=False, dtype="float32")
    engine = HFRolloutEngine(ModelConfig(path=str(tmp_path)), rollout)

    async def generate() -> None:
        await engine.begin_update(0)
        await engine.load(list(source.state_dict().items()), live=False)
        await engine.end_update()
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
        await engine.generate_many([GenerationRequest([3, 4, 5], params, f"r{index}") for index in range(3)])

    run_blocking(generate())
    held = engine.memory().kv_cache
    assert held > 0
    assert held % cached_token_bytes(built, 4) == 0
    widths = [sum(t.shape[1] * t.shape[3] for t in pair) for pair in engine.cache._view if pair is not None]
    assert widths == [layer.heads * layer.width for layer in cache_layers(built)]


def test_a_model_that_is_served_everywhere() -> None:
    assert cached_token_bytes(served_everywhere(), 4) == 2 * 2 * 32 * 4

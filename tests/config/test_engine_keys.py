"""Settings that engines are given under their own names: refused, for correction only, unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl.config import PPOConfig, engine_keys, load_config
from verl.config.engine_keys import SGLANG_KEYS, VLLM_KEYS, engine_key_problems, known_arguments, rough_engine_keys
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is installed, so that names are not checked."""
    monkeypatch.setattr(engine_keys, "known_arguments", lambda engine: None)


REFUSED = [
    ("vllm", "speculative_config", {"method": "ngram", "num_speculative_tokens": 2}, "speculative decoding"),
    ("vllm", "spec_method", "ngram", "speculative decoding"),
    ("vllm", "data_parallel_size", 2, "every group of ranks is a replica already"),
    ("vllm", "pipeline_parallel_size", 2, "how ranks share the model"),
    ("vllm", "decode_context_parallel_size", 2, "how ranks share the model"),
    ("vllm", "enable_expert_parallel", True, "spreads experts over ranks"),
    ("vllm", "quantization", "fp8", "the weights are the policy's in rollout.dtype"),
    ("vllm", "cpu_offload_gb", 4, "updates write them in place"),
    ("vllm", "logprobs_mode", "raw_logprobs", "distribution that is sampled from"),
    ("vllm", "dtype", "float16", "use rollout.dtype"),
    ("vllm", "seed", 3, "every sample has its own seed"),
    ("vllm", "logits_processors", ["m:f"], "changes the distribution"),
    ("vllm", "override_generation_config", {"top_k": 3}, "rollout's own keys"),
    ("vllm", "generation_config", "auto", "rollout's own keys"),
    ("vllm", "hf_overrides", {"rope_theta": 1}, "use model.override_config"),
    ("vllm", "kv_transfer_config", {}, "keys and values of older weights"),
    ("vllm", "kv_offloading_size", 1.0, "keys and values of older weights"),
    ("sglang", "dp_size", 2, "every group of ranks is a replica already"),
    ("sglang", "pp_size", 2, "how ranks share the model"),
    ("sglang", "ep_size", 2, "spreads experts over ranks"),
    ("sglang", "speculative_algorithm", "NGRAM", "speculative decoding"),
    ("sglang", "quantization", "fp8", "the weights are the policy's in rollout.dtype"),
    ("sglang", "random_seed", 3, "every sample has its own seed"),
    ("sglang", "enable_custom_logit_processor", True, "changes the distribution"),
    ("sglang", "preferred_sampling_params", {"top_k": 3}, "rollout's own keys"),
    ("sglang", "sampling_defaults", "model", "rollout's own keys"),
    ("sglang", "enable_hierarchical_cache", True, "keys and values of older weights"),
    ("sglang", "enable_lmcache", True, "keys and values of older weights"),
    ("sglang", "enable_hisparse", True, "attention approximately"),
    ("sglang", "disaggregation_mode", "prefill", "how ranks share the model"),
]


@pytest.mark.parametrize(("engine", "key", "value", "reason"), REFUSED)
def test_keys_that_change_the_distribution_or_the_layout(
    engine: str, key: str, value: Any, reason: str, no_package: None
) -> None:
    (problem,) = engine_key_problems(engine, {key: value})
    assert problem.startswith(f"engine_kwargs.{engine}.{key}={value!r}: ")
    assert reason in problem
    assert ("leave it out" in problem) or ("use " in problem)


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("vllm", {"block_size": 32, "compilation_config": {}, "attention_backend": "FLASH_ATTN", "max_logprobs": 5}),
        ("vllm", {"speculative_config": None, "kv_cache_memory_bytes": 1 << 20, "kv_cache_dtype": "fp8"}),
        ("sglang", {"attention_backend": "fa3", "page_size": 16, "schedule_policy": None, "max_total_tokens": 1024}),
        ("sglang", {"disable_overlap_schedule": True, "watchdog_timeout": 9, "kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_other_keys_pass(engine: str, given: dict[str, Any], no_package: None) -> None:
    assert list(engine_key_problems(engine, given)) == []


def test_samples_that_are_not_the_policys_need_a_correction() -> None:
    assert rough_engine_keys("vllm", {"kv_cache_dtype": "fp8", "block_size": 32}, "auto") == ["kv_cache_dtype='fp8'"]
    assert rough_engine_keys("vllm", {"kv_cache_dtype": "auto"}, "auto") == []
    assert rough_engine_keys("sglang", {"kv_cache_dtype": "bfloat16"}, "bfloat16") == []
    assert rough_engine_keys("hf", {}, "auto") == []


def run_with(*overrides: str) -> PPOConfig:
    base = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=m", "data.train_batch_size=8", f"{ROLLOUT}.n=2"]
    sizes = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.n_gpus_per_node=1",
        "algorithm.adv_estimator=grpo",
    ]
    return load_config(PPOConfig, "ppo_trainer", [*base, *sizes, *overrides])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_cache_of_eight_bits_is_for_runs_with_a_correction(engine: str, no_package: None) -> None:
    keys = [f"{ROLLOUT}.name={engine}", f"+{ROLLOUT}.engine_kwargs.{engine}.kv_cache_dtype=fp8_e5m2"]
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{engine}\.kv_cache_dtype='fp8_e5m2'.*rollout_is=token"):
        run_with(*keys)
    corrected = run_with(*keys, "algorithm.rollout_correction.rollout_is=token")
    assert getattr(corrected.actor_rollout_ref.rollout.engine_kwargs, engine) == {"kv_cache_dtype": "fp8_e5m2"}
    run_with(*keys, "algorithm.rollout_correction.bypass_mode=True")


def test_names_that_the_installed_engine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_keys, "known_arguments", lambda engine: frozenset({"block_size", "max_logprobs"}))
    (problem,) = engine_key_problems("vllm", {"blok_size": 32})
    assert problem == (
        "engine_kwargs.vllm.blok_size=32: the installed vLLM has no such argument; did you mean 'block_size'?; correct "
        "or leave it out"
    )


def test_names_are_read_without_importing_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sglang"
    (package / "srt" / "arg_groups" / "fields").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "srt" / "server_args.py").write_text("class ServerArgs:\n    model_path: str = ''\n")
    names = "\n".join(f"    key_{number}: int = 0" for number in range(30))
    (package / "srt" / "arg_groups" / "fields" / "memory.py").write_text(f"class Memory:\n{names}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known_arguments.cache_clear()
    try:
        found = known_arguments("sglang")
        assert found is not None
        assert {"model_path", "key_29"} <= found
    finally:
        known_arguments.cache_clear()


@pytest.mark.parametrize(
    ("engine", "sample", "table"), [("vllm", "block_size", VLLM_KEYS), ("sglang", "page_size", SGLANG_KEYS)]
)
def test_names_of_the_installed_engine(engine: str, sample: str, table: dict[str, str]) -> None:
    found = known_arguments(engine)
    if found is None:
        pytest.skip(f"{engine} is not installed")
    assert sample in found
    assert len(found) > 150
    assert set(table) - found == set()

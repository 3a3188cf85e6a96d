"""What SGLang is asked for and how weights and random numbers reach it; none of this needs the package."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.rollout.helpers import missing_package, served_everywhere
from verl.config import ModelConfig, RolloutConfig
from verl.config.rollout import EngineKwargsConfig
from verl.errors import ConfigError
from verl.workers.rollout.sampler import SamplingBatch, sample
from verl.workers.rollout.sglang.arguments import server_arguments
from verl.workers.rollout.sglang.engine import _pieces
from verl.workers.rollout.sglang.sampler import seed_of_name, settings_of, stream_start, uniforms_at
from verl.workers.rollout.sglang.weights import address_towards, pickled, stage
from verl.workers.rollout.types import SamplingParams
from verl.workers.rollout.uniforms import uniforms


def arguments(*, device: str = "cpu", model: ModelConfig | None = None, **rollout: Any) -> dict[str, Any]:
    settings = {"name": "sglang", "prompt_length": 28, "response_length": 100, "max_num_seqs": 4, **rollout}
    return server_arguments(
        model or ModelConfig(path="m"),
        RolloutConfig(**settings),
        directory=Path("m"),
        text_config=served_everywhere(),
        architecture=None,
        device=torch.device(device),
        dtype=torch.float32,
        local_world_size=1,
    )


# ---- arguments


def test_keys_become_arguments() -> None:
    got = arguments(
        device="cuda",
        tensor_model_parallel_size=4,
        gpu_memory_utilization=0.7,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    assert (got["tp_size"], got["mem_fraction_static"], got["max_running_requests"]) == (4, 0.7, 4)
    assert (got["chunked_prefill_size"], got["max_prefill_tokens"], got["disable_radix_cache"]) == (512, 512, True)
    assert (got["disable_cuda_graph"], got["enable_memory_saver"], got["enable_weights_cpu_backup"]) == (
        False,
        True,
        True,
    )
    assert got["context_length"] > 128
    assert "max_total_tokens" not in got
    assert arguments(device="cuda", free_cache_engine=False)["enable_memory_saver"] is False
    whole = arguments(device="cuda", enable_chunked_prefill=False, max_num_batched_tokens=16)
    assert (whole["chunked_prefill_size"], whole["max_prefill_tokens"]) == (-1, 128)


def test_a_penalty_ends_work_ahead_of_the_last_token() -> None:
    assert arguments(device="cuda")["disable_overlap_schedule"] is False
    assert arguments(device="cuda", repetition_penalty=1.2)["disable_overlap_schedule"] is True


def test_on_a_cpu_the_cache_fits_the_sequences() -> None:
    got = arguments()
    assert got["max_total_tokens"] == 4 * got["context_length"]
    assert got["disable_cuda_graph"] is True
    with pytest.raises(ConfigError, match=r"the cache of one sequence of 128 tokens .*gpu_memory_utilization"):
        arguments(gpu_memory_utilization=1e-9)


def test_settings_under_sglangs_own_names_win() -> None:
    kwargs = EngineKwargsConfig(sglang={"attention_backend": "intel_amx", "schedule_policy": None})
    got = arguments(engine_kwargs=kwargs)
    assert got["attention_backend"] == "intel_amx"
    assert "schedule_policy" not in got


def test_the_models_overrides_reach_sglang() -> None:
    got = arguments(model=ModelConfig(path="m", override_config={"rms_norm_eps": 1e-3, "attn_implementation": "sdpa"}))
    assert json.loads(got["json_model_override_args"]) == {"rms_norm_eps": 1e-3}


@pytest.mark.skipif(missing_package("sglang") is None, reason="sglang is installed")
def test_without_the_package_the_message_says_what_to_install(tmp_path: Path) -> None:
    from verl.workers.rollout.sglang.engine import SGLangRolloutEngine

    served_everywhere().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the package sglang is not installed; install verl\[sglang\]"):
        SGLangRolloutEngine(ModelConfig(path=str(tmp_path)), RolloutConfig(name="sglang"))


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    from verl.workers.rollout.sglang.engine import SGLangRolloutEngine

    served_everywhere().save_pretrained(tmp_path)
    config = RolloutConfig(name="sglang", server_urls=["http://127.0.0.1:9"], prompt_length=28, response_length=100)
    with pytest.raises(ConfigError, match=r"rollout.server_urls: the SGLang server at http://127.0.0.1:9 does not"):
        SGLangRolloutEngine(ModelConfig(path=str(tmp_path)), config)


# ---- sampling


def test_the_random_numbers_are_those_of_the_built_in_engine() -> None:
    seeds = [0, 7, 2**63 + 5, 2**64 - 1]
    lengths = [1, 5, 900, 17]
    starts = torch.tensor([stream_start(seed, length) for seed, length in zip(seeds, lengths, strict=True)])
    expected = uniforms(seeds, 40)
    for token in range(40):
        positions = torch.tensor(lengths) - 1 + token  # of the token before
        np.testing.assert_array_equal(uniforms_at(starts, positions).numpy(), expected[:, token])


def test_settings_are_those_of_the_built_in_engine() -> None:
    params = [
        SamplingParams(1, temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(1, temperature=0.0, top_p=0.5),
        SamplingParams(1, temperature=1.3, min_p=0.05),
    ]
    info = SimpleNamespace(  # as SGLang writes the same requests: greedy is top-k 1 at temperature 1
        temperatures=torch.tensor([[0.7], [1.0], [1.3]]),
        top_ks=torch.tensor([9, 1, 1 << 30], dtype=torch.int32),
        top_ps=torch.tensor([0.8, 0.5, 1.0]),
        min_ps=torch.tensor([0.0, 0.0, 0.05]),
        is_all_greedy=False,
        is_any_greedy=True,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        max_top_k=None,
    )
    torch.manual_seed(0)
    logits = 3 * torch.randn(3, 61)
    for value in (0.1, 0.5, 0.9):
        uniform = torch.full((3,), value, dtype=torch.float64)
        mine = sample(logits, settings_of(info, 61), uniform)
        theirs = sample(logits, SamplingBatch.build(params, logits.device), uniform)
        assert torch.equal(mine[0], theirs[0])
        torch.testing.assert_close(mine[1], theirs[1])


def test_a_request_without_a_seed_gets_one_that_all_ranks_agree_on() -> None:
    assert seed_of_name("a") == seed_of_name("a") != seed_of_name("b")
    assert -(2**63) <= seed_of_name("a") < 2**63


# ---- weights


def _read(handles: str, answer: Any) -> None:
    import base64
    import pickle

    answer.put([(name, tensor.dtype, tensor.tolist()) for name, tensor in pickle.loads(base64.b64decode(handles))])


def test_another_process_reads_staged_weights_in_their_own_types() -> None:
    weights = [("a", torch.arange(6.0).view(2, 3).t()), ("b", torch.tensor([1.5, -2.0])), ("c", torch.tensor(3.0))]
    staged = stage(weights, [torch.float32, torch.bfloat16, torch.float32], torch.device("cpu"))
    handles = pickled(staged)
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_read, args=(handles, answer))
    process.start()
    try:
        got = answer.get(timeout=120)
    finally:
        process.join(timeout=60)
    assert got == [
        ("a", torch.float32, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]),
        ("b", torch.bfloat16, [1.5, -2.0]),
        ("c", torch.float32, 3.0),
    ]


def test_buckets_are_as_large_as_allowed() -> None:
    weights = [(str(number), torch.zeros(size)) for number, size in enumerate((10, 10, 30, 5, 5))]
    names = [[name for name, _ in piece] for piece in _pieces(weights, 80)]
    assert names == [["0", "1"], ["2"], ["3", "4"]]


def test_the_meeting_point_is_this_machines_address_as_the_server_sees_it() -> None:
    assert address_towards("http://127.0.0.1:30000") == "127.0.0.1"

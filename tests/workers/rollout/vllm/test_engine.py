"""vLLM as a rollout engine, beyond what every engine must do (``tests/contracts``)."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.workers.rollout.helpers import (
    generate,
    hand_over,
    make_model,
    make_vllm_engine,
    missing_package,
    random_prompts,
    reference_logits,
    served_everywhere,
    weights_of,
)
from verl.config.rollout import EngineKwargsConfig
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.workers.rollout.engine import run_blocking
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or ""),
]

LONG = SamplingParams(20, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(served_everywhere(), spread=2.0)


@pytest.fixture(scope="module")
def shared(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_vllm_engine(model, tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def engine(shared: Any, model: torch.nn.Module) -> Any:
    """An engine that is awake and has the model's weights."""
    run_blocking(shared.wake(["kv_cache"]))
    asyncio.run(hand_over(shared, model))
    run_blocking(shared.wake())
    return shared


def worst_difference(
    model: torch.nn.Module, prompts: list[list[int]], completions: list[Completion], temperature: float = 1.0
) -> float:
    """Largest difference between reported log-probabilities and those of Transformers' plain forward pass."""
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        table = (reference_logits(model, prompt, completion.token_ids) / temperature).log_softmax(-1)
        expected = table[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
        worst = max(worst, float((expected - torch.tensor(completion.log_probs)).abs().max()))
    return worst


# ---- a guest in the process


def test_start_and_generation_leave_the_process_as_it_was(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def state() -> dict[str, Any]:
        ours = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("VLLM_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "PYTEST_"))
        }
        return {
            **ours,
            "torch": torch.get_rng_state().tolist(),
            "random": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
            "threads": (torch.get_num_threads(), torch.set_num_threads),
            "dtype": torch.get_default_dtype(),
        }

    before = state()
    engine = make_vllm_engine(model, tmp_path)
    assert not {name for name, value in state().items() if before.get(name) != value}
    asyncio.run(hand_over(engine, model))
    generate(engine, random_prompts([5, 3]), SamplingParams(4))  # without a seed of its own
    assert not {name for name, value in state().items() if before.get(name) != value}
    del engine
    assert torch.distributed.is_initialized()  # the trainer's group outlives the engine


def test_models_that_vllm_cannot_serve_here_are_refused(tmp_path: Path) -> None:
    narrow = make_model("qwen2")
    with pytest.raises(ConfigError, match="attention heads have 8 values; on CPUs vLLM serves 32, 64"):
        make_vllm_engine(narrow, tmp_path / "narrow")
    borrowed = served_everywhere("smollm3", head_dim=32)
    with pytest.raises(ConfigError, match="vLLM has no implementation of its own for SmolLM3ForCausalLM"):
        make_vllm_engine(make_model(borrowed), tmp_path / "borrowed")


def test_arguments_that_vllm_does_not_know_are_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        make_vllm_engine(model, tmp_path, engine_kwargs=EngineKwargsConfig(vllm={"blok_size": 32}))


def test_a_cache_that_vllm_keeps_is_dropped_in_another_way_or_an_error(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_vllm_engine(model, tmp_path)
    asyncio.run(hand_over(engine, model))
    asked: list[bool] = []

    def reset(reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        asked.append(reset_running_requests)
        return reset_running_requests and agrees

    monkeypatch.setattr(engine.engine, "reset_prefix_cache", reset)
    agrees = True
    asyncio.run(hand_over(engine, model, version=2))
    assert asked[:2] == [False, True]
    agrees = False
    with pytest.raises(WeightSyncError, match="vLLM kept keys and values of older weights"):
        asyncio.run(hand_over(engine, model, version=3))
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, [[3]], SamplingParams(2))
    monkeypatch.undo()
    asyncio.run(hand_over(engine, model, version=3))
    assert generate(engine, [[3]], SamplingParams(2))[0].policy_version == 3


def test_the_cache_that_is_reserved_is_the_one_that_is_predicted(engine: Any) -> None:
    from verl.models.shape import cached_token_bytes
    from verl.workers.rollout.settings import vllm_cpu_cache_bytes

    sequences, length = engine.engine.vllm_config.scheduler_config.max_num_seqs, engine.max_model_len
    token = cached_token_bytes(served_everywhere(), 4)
    reserved = engine._rpc("verl_memory")[0]
    assert reserved == pytest.approx(vllm_cpu_cache_bytes(sequences, token, length), rel=0.01)


# ---- sampling


def test_a_temperature_that_vllm_would_change_is_refused(engine: Any) -> None:
    with pytest.raises(RolloutError, match=r"temperature=0.005 is below vLLM's smallest, 0.01"):
        generate(engine, [[3]], SamplingParams(2, temperature=0.005))


def test_requests_beyond_the_positions_are_refused(engine: Any) -> None:
    with pytest.raises(RolloutError, match="exceed max_model_len=128"):
        generate(engine, random_prompts([60]), SamplingParams(90))


def test_min_p_drops_unlikely_tokens(engine: Any, model: torch.nn.Module) -> None:
    prompts = random_prompts([6] * 6)
    for prompt, completion in zip(
        prompts, generate(engine, prompts, SamplingParams(16, min_p=0.5, seed=1)), strict=True
    ):
        probs = reference_logits(model, prompt, completion.token_ids).softmax(-1)
        kept = torch.where(probs >= 0.5 * probs.amax(-1, keepdim=True), probs, 0.0)
        index = torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)
        expected = (kept / kept.sum(-1, keepdim=True))[index].log()
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_too_small_a_cache_changes_no_sample(
    engine: Any, model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that lose their cache to others go on exactly where they were."""
    block = 32 * 2 * 2 * 32 * 4  # tokens x layers x keys and values x head x bytes
    tight = make_vllm_engine(
        model,
        tmp_path,
        engine_kwargs=EngineKwargsConfig(vllm={"block_size": 32, "kv_cache_memory_bytes": 9 * block}),
    )
    asyncio.run(hand_over(tight, model))
    prompts = random_prompts([20] * 6)
    params = [SamplingParams(60, seed=number, ignore_eos=True) for number in range(6)]
    scheduler = tight.engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args, **kwargs: preempted.append("") or preempt(*args, **kwargs)
    )
    got = generate(tight, prompts, params)
    assert preempted
    assert [item.token_ids for item in got] == [item.token_ids for item in generate(engine, prompts, params)]


def test_abort_answers_waiting_and_running_requests(model: torch.nn.Module, tmp_path: Path) -> None:
    engine: Any = make_vllm_engine(model, tmp_path, max_num_seqs=2)
    asyncio.run(hand_over(engine, model))
    generate(engine, [[3]], SamplingParams(2))  # compiles what is compiled at first use
    whole = generate(engine, [[3, 4]], SamplingParams(90, ignore_eos=True, seed=0))[0]

    async def run() -> list[Completion]:
        tasks = [
            asyncio.create_task(
                engine.generate(
                    GenerationRequest([3, 4], SamplingParams(90, ignore_eos=True, seed=number), f"r{number}")
                )
            )
            for number in range(4)
        ]
        while not engine.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.abort(["r1", "r3"])  # one runs, one waits
        return [await task for task in tasks]

    completions = asyncio.run(run())
    assert [item.finish_reason for item in completions] == ["length", "abort", "length", "abort"]
    assert completions[0] == whole
    assert 0 < len(completions[1].token_ids) == len(completions[1].log_probs) < 90
    assert completions[3].token_ids == []


def test_a_cancelled_call_ends_its_requests(engine: Any) -> None:
    async def run() -> None:
        call = asyncio.create_task(engine.generate_many([GenerationRequest([3], SamplingParams(100), "long")]))
        while not engine.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert len((await engine.generate(GenerationRequest([3], LONG, "next"))).token_ids) == 20

    asyncio.run(run())
    assert not engine.engine.has_unfinished_requests()


# ---- weights


@pytest.mark.parametrize(
    "settings", [{"tie_word_embeddings": False}, {"family": "llama"}, {"family": "qwen3", "head_dim": 32}]
)
def test_updates_reach_every_layer_the_head_included(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(settings)
    config = served_everywhere(settings.pop("family", "qwen2"), **settings)
    engine: Any = make_vllm_engine(make_model(config), tmp_path)
    prompts = random_prompts([6, 9])
    for version, seed in enumerate((1, 2)):
        policy = make_model(config, seed=seed, spread=3.0)
        asyncio.run(hand_over(engine, policy, version, live=bool(version)))
        assert worst_difference(policy, prompts, generate(engine, prompts, LONG)) < 1e-5
        assert run_blocking(engine.checksums()) == run_blocking(engine.checksums(weights_of(policy)))


def test_bfloat16_rollout_of_a_float32_policy(model: torch.nn.Module, tmp_path: Path) -> None:
    engine: Any = make_vllm_engine(model, tmp_path, dtype="bfloat16")
    asyncio.run(hand_over(engine, model))
    assert run_blocking(engine.checksums()) == run_blocking(engine.checksums(weights_of(model)))
    prompts = random_prompts([6, 9])
    assert worst_difference(model, prompts, generate(engine, prompts, LONG)) < 0.1


def test_a_changed_packed_matrix_is_noticed(engine: Any, model: torch.nn.Module) -> None:
    before = run_blocking(engine.checksums())
    weights = {name: tensor.detach().clone() for name, tensor in weights_of(model).items()}
    weights["model.layers.1.self_attn.k_proj.weight"][5, 7] += 1e-5
    run_blocking(engine.begin_update(2))
    run_blocking(engine.load(weights.items(), live=False))
    run_blocking(engine.end_update())
    after = run_blocking(engine.checksums())
    assert [name for name in before if before[name] != after[name]] == ["model.layers.1.self_attn.k_proj.weight"]


def test_a_stale_head_of_a_tied_model_is_noticed(engine: Any, model: torch.nn.Module) -> None:
    head = engine._rpc("get_model").lm_head
    fresh, stale = head.cpu_linear, torch.randn(*head.weight.shape)
    head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, stale, bias)
    try:
        mine, expected = run_blocking(engine.checksums()), run_blocking(engine.checksums(weights_of(model)))
    finally:
        head.cpu_linear = fresh
    assert [name for name in mine if mine[name] != expected[name]] == ["model.embed_tokens.weight"]


def test_cached_beginnings_do_not_outlive_their_weights(engine: Any, model: torch.nn.Module, tmp_path: Path) -> None:
    small: Any = make_vllm_engine(model, tmp_path, engine_kwargs=EngineKwargsConfig(vllm={"block_size": 32}))
    prompts = random_prompts([70])
    asyncio.run(hand_over(small, model))
    generate(small, prompts, LONG)
    other = make_model(served_everywhere(), seed=9, spread=2.0)
    asyncio.run(hand_over(small, other, 2))
    assert worst_difference(other, prompts, generate(small, prompts, LONG)) < 1e-5


def test_reloaded_models_get_the_same_weights(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of models whose weights vLLM converts, walked by one whose weights it does not."""
    from verl.workers.rollout.vllm import weights as vllm_weights

    engine: Any = make_vllm_engine(model, tmp_path)
    monkeypatch.setattr(vllm_weights, "_is_converted", lambda module: True)
    engine._rpc("verl_begin_update")  # gives the plain matrices memory
    assert engine._rpc("verl_attach", engine.manifest, engine.dtype, True) is False
    prompts = random_prompts([6, 9])
    for version, seed in enumerate((1, 2), start=1):
        policy = make_model(served_everywhere(), seed=seed, spread=3.0)

        async def update(version: int = version, policy: torch.nn.Module = policy) -> None:
            await engine.begin_update(version)
            weights = weights_of(policy)
            weights.pop("lm_head.weight")  # the embedding under its second name
            buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
            for name, tensor in weights.items():  # a source that reuses its memory after each call
                piece = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor.detach())
                await engine.load([(name, piece)], live=False)
                buffer.fill_(float("nan"))
            await engine.end_update()

        asyncio.run(update())
        assert worst_difference(policy, prompts, generate(engine, prompts, LONG)) < 1e-5


# ---- memory


def test_sleep_gives_memory_back(tmp_path: Path) -> None:
    config = served_everywhere(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, intermediate_size=2048)
    policy = make_model(config, spread=1.0)
    engine: Any = make_vllm_engine(policy, tmp_path, max_num_seqs=128)
    rss = psutil.Process().memory_info
    asyncio.run(hand_over(engine, policy))
    prompts = random_prompts([20] * 128)
    first = generate(engine, prompts, LONG)
    held, memory = rss().rss, engine.memory()
    assert memory.kv_cache > 120 << 20
    assert memory.owned_weights > 30 << 20
    run_blocking(engine.sleep())
    asleep = engine.memory()
    assert (asleep.kv_cache, asleep.owned_weights) == (0, 0)
    freed = held - rss().rss
    # the cache is filled with sequences of 40 tokens in blocks of 128
    assert freed > 0.8 * (memory.kv_cache * 40 / 128 + memory.owned_weights)
    run_blocking(engine.wake())
    assert [item.token_ids for item in generate(engine, prompts, LONG)] == [item.token_ids for item in first]


def test_weights_come_back_before_the_cache(engine: Any, model: torch.nn.Module) -> None:
    first = generate(engine, [[3, 4]], LONG)
    run_blocking(engine.sleep())
    run_blocking(engine.wake(["weights"]))
    memory = engine.memory()
    assert memory.kv_cache == 0
    assert memory.owned_weights > 0
    with pytest.raises(RolloutError, match="asleep"):
        generate(engine, [[3, 4]], LONG)
    run_blocking(engine.wake(["kv_cache"]))
    assert generate(engine, [[3, 4]], LONG) == first


def test_an_update_wakes_the_weights_alone(engine: Any, model: torch.nn.Module) -> None:
    run_blocking(engine.sleep())
    asyncio.run(hand_over(engine, model, 4))
    memory = engine.memory()
    assert memory.kv_cache == 0
    assert memory.owned_weights > 0
    run_blocking(engine.wake())
    assert generate(engine, [[3, 4]], LONG)[0].policy_version == 4


def test_dropped_weights_are_not_replaced_by_newer_ones(shared: Any) -> None:
    policy = make_model(served_everywhere(), seed=4, spread=2.0)
    asyncio.run(hand_over(shared, policy, 5))
    run_blocking(shared.wake())
    run_blocking(shared.sleep())
    assert shared.memory().owned_weights == 0
    with torch.no_grad():
        policy.model.norm.weight.add_(0.5)  # an optimizer step
    with pytest.raises(RolloutError, match="weights of version 5 were given back .* sync the new ones"):
        run_blocking(shared.wake())
    asyncio.run(hand_over(shared, policy, 6))
    run_blocking(shared.wake())
    assert generate(shared, [[3]], LONG)[0].policy_version == 6


def test_sleep_levels(engine: Any, model: torch.nn.Module) -> None:
    first = generate(engine, [[3, 4]], LONG)
    run_blocking(engine.sleep(level=1))
    run_blocking(engine.wake())
    assert generate(engine, [[3, 4]], LONG) == first
    run_blocking(engine.sleep(level=2))
    run_blocking(engine.wake())
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, [[3, 4]], LONG)
    asyncio.run(hand_over(engine, model))
    assert generate(engine, [[3, 4]], LONG) == first


def test_the_cache_stays_where_it_is_not_to_be_freed(model: torch.nn.Module, tmp_path: Path) -> None:
    engine: Any = make_vllm_engine(model, tmp_path, free_cache_engine=False)
    assert engine.memory().kv_cache > 0

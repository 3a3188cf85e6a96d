"""SGLang as a rollout engine, beyond what every engine must do (``tests/contracts``)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.workers.rollout.adapted import ALPHA, RANK, AdaptedModel, change_adapter
from tests.workers.rollout.helpers import (
    generate,
    hand_over,
    loaded_engine,
    make_model,
    make_sglang_engine,
    missing_package,
    random_prompts,
    reference_logits,
    served_everywhere,
    weights_of,
)
from verl.config import ModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.models.lora import LoraSettings, add_adapters
from verl.utils.distributed import free_port
from verl.workers.rollout.engine import run_blocking
from verl.workers.rollout.sglang.connection import Connection
from verl.workers.rollout.sglang.engine import SGLangRolloutEngine
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams
from verl.workers.sharding_manager.lora_sync import AdapterSync

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(missing_package("sglang")), reason=missing_package("sglang") or ""),
]

LONG = SamplingParams(20, seed=3, ignore_eos=True)
CONFIG = served_everywhere(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(CONFIG, spread=2.0)


@pytest.fixture(scope="module")
def shared(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = make_sglang_engine(model, tmp_path_factory.mktemp("sglang"))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Any, model: torch.nn.Module) -> Any:
    """An engine that is awake and has the model's weights."""
    run_blocking(shared.wake(["kv_cache"]))
    asyncio.run(hand_over(shared, model))
    run_blocking(shared.wake())
    return shared


def worst_difference(model: torch.nn.Module, prompts: list[list[int]], completions: list[Completion]) -> float:
    """Largest difference between reported log-probabilities and those of Transformers' plain forward pass."""
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        table = reference_logits(model, prompt, completion.token_ids).log_softmax(-1)
        expected = table[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
        worst = max(worst, float((expected - torch.tensor(completion.log_probs)).abs().max()))
    return worst


# ---- sampling


def test_tokens_are_those_of_the_built_in_engine(engine: Any, model: torch.nn.Module, tmp_path: Path) -> None:
    prompts = random_prompts([6, 9, 2, 14])
    params = [
        SamplingParams(20, seed=1, ignore_eos=True),
        SamplingParams(20, seed=2, temperature=0.7, top_k=9, top_p=0.9),
        SamplingParams(20, temperature=0.0, ignore_eos=True),
        SamplingParams(20, seed=2**63 + 1, min_p=0.1, repetition_penalty=3.0),
    ]
    mine = generate(engine, prompts, params)
    theirs = generate(loaded_engine(model, tmp_path), prompts, params)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0)


def test_the_only_token_left_is_certain(engine: Any) -> None:
    completion = generate(engine, [[3, 4]], SamplingParams(5, top_k=1, temperature=0.7, ignore_eos=True))[0]
    assert completion.log_probs == [0.0] * 5


def test_the_longest_sequence_is_served_whole(engine: Any) -> None:
    assert len(generate(engine, random_prompts([28]), SamplingParams(100, ignore_eos=True))[0].token_ids) == 100
    with pytest.raises(RolloutError, match="exceed max_model_len=128"):
        generate(engine, random_prompts([29]), SamplingParams(100))


def test_a_cancelled_call_ends_its_requests(engine: Any) -> None:
    async def run() -> None:
        call = asyncio.create_task(engine.generate_many([GenerationRequest([3], SamplingParams(100), "long")]))
        while not engine._running:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not engine._running
        assert len((await engine.generate(GenerationRequest([3], LONG, "next"))).token_ids) == 20

    asyncio.run(run())
    run_blocking(engine.sleep())  # waits until the server has nothing left to do
    run_blocking(engine.wake())


# ---- weights and memory


def test_updates_reach_every_layer_the_head_included(engine: Any) -> None:
    prompts = random_prompts([6, 9])
    for version, seed in enumerate((1, 2), start=2):
        policy = make_model(CONFIG, seed=seed, spread=3.0)
        asyncio.run(hand_over(engine, policy, version, live=bool(version % 2)))
        assert worst_difference(policy, prompts, generate(engine, prompts, LONG)) < 1e-5
        assert run_blocking(engine.checksums()) == run_blocking(engine.checksums(weights_of(policy)))


def test_cached_beginnings_do_not_outlive_their_weights(engine: Any) -> None:
    prompts = random_prompts([28])
    generate(engine, prompts, LONG)
    other = make_model(CONFIG, seed=9, spread=2.0)
    asyncio.run(hand_over(engine, other, 5))
    assert worst_difference(other, prompts, generate(engine, prompts, LONG)) < 1e-5


def test_weights_come_back_before_the_cache(engine: Any) -> None:
    first = generate(engine, [[3, 4]], LONG)
    run_blocking(engine.sleep())
    assert (engine.memory().kv_cache, engine.memory().owned_weights) == (0, 0)
    run_blocking(engine.wake(["weights"]))
    assert engine.memory().kv_cache == 0
    whole = sum(tensor.nbytes for tensor in weights_of(make_model(CONFIG)).values())
    assert whole <= engine.memory().owned_weights < 1.2 * whole  # SGLang rounds the vocabulary up
    with pytest.raises(RolloutError, match="asleep"):
        generate(engine, [[3, 4]], LONG)
    run_blocking(engine.wake(["kv_cache"]))
    assert generate(engine, [[3, 4]], LONG) == first


def test_dropped_weights_are_not_replaced_by_newer_ones(engine: Any) -> None:
    policy = make_model(CONFIG, seed=4, spread=2.0)
    asyncio.run(hand_over(engine, policy, 5))
    run_blocking(engine.sleep())
    with torch.no_grad():
        policy.model.norm.weight.add_(0.5)  # an optimizer step
    with pytest.raises(RolloutError, match="weights of version 5 were given back .* sync the new ones"):
        run_blocking(engine.wake())
    asyncio.run(hand_over(engine, policy, 6))
    run_blocking(engine.wake())
    assert generate(engine, [[3]], LONG)[0].policy_version == 6


def test_the_server_gives_its_memory_back(engine: Any) -> None:
    scheduler = max(
        psutil.Process(engine.process.pid).children(recursive=True), key=lambda process: process.memory_info().rss
    )
    generate(engine, random_prompts([28] * 64), SamplingParams(100, ignore_eos=True))
    before = scheduler.memory_info().rss
    held = engine.memory().kv_cache
    run_blocking(engine.sleep())
    freed = before - scheduler.memory_info().rss
    run_blocking(engine.wake())
    assert held > 4 << 20
    assert freed > held / 2


# ---- a server elsewhere


@pytest.fixture(scope="module")
def remote(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    """A server for training that nobody's worker started."""
    directory = tmp_path_factory.mktemp("remote")
    model.save_pretrained(directory)
    port = free_port("127.0.0.1")
    options = [f"--model-path={directory}", "--host=127.0.0.1", f"--port={port}"]
    options += ["--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--max-total-tokens=2048"]
    options += ["--enable-lora", "--max-lora-rank=8", "--max-loras-per-batch=2", "--lora-backend=torch_native"]
    options += ["--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    process = subprocess.Popen(
        [sys.executable, "-m", "verl.workers.rollout.sglang.server", *options, "--disable-overlap-schedule"],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    connection = Connection(url, death=lambda: None if process.poll() is None else "it ended")
    try:
        connection.wait_until_ready(400)
        yield url, directory, process
    finally:
        connection.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _adapter_elsewhere(directory: Path, settings: dict[str, Any]) -> None:
    """Adapters travel through the process group too; a server without room for them is told how to start."""
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA}
    policy = make_model(CONFIG, seed=4, spread=3.0)
    add_adapters(policy, LoraSettings(RANK, ALPHA, ("all-linear",)), seed=0)
    change_adapter(policy, seed=1)
    engine = SGLangRolloutEngine(ModelConfig(path=str(directory), **lora), RolloutConfig(name="sglang", **settings))
    sync = AdapterSync(AdaptedModel(policy, streams=True), engine)
    prompts = random_prompts([6, 9])
    for version in (1, 2):
        change_adapter(policy, seed=version)
        sync.sync(version)
        run_blocking(engine.wake())
        assert worst_difference(policy, prompts, generate(engine, prompts, LONG)) < 1e-4
    wide = ModelConfig(path=str(directory), lora_rank=16)
    with pytest.raises(ConfigError, match="start it with --enable-lora --max-lora-rank 16 --max-loras-per-batch 2"):
        SGLangRolloutEngine(wide, RolloutConfig(name="sglang", lora_merge=False, **settings))


def test_a_server_elsewhere_gets_weights_and_dies_loudly(remote: tuple[str, Path, Any], model: torch.nn.Module) -> None:
    url, directory, process = remote
    settings = {"dtype": "float32", "prompt_length": 20, "response_length": 80, "server_urls": [url]}
    engine = SGLangRolloutEngine(ModelConfig(path=str(directory)), RolloutConfig(name="sglang", **settings))
    prompts = random_prompts([6, 9])
    for version, policy in enumerate((model, make_model(CONFIG, seed=2, spread=3.0))):
        asyncio.run(hand_over(engine, policy, version, live=False))
        run_blocking(engine.wake())
        assert worst_difference(policy, prompts, generate(engine, prompts, LONG)) < 1e-5
        assert run_blocking(engine.checksums()) == run_blocking(engine.checksums(weights_of(policy)))
    _adapter_elsewhere(directory, settings)
    too_long = RolloutConfig(name="sglang", **{**settings, "response_length": 200})
    with pytest.raises(ConfigError, match=r"serves \d+ tokens, sequences may have"):
        SGLangRolloutEngine(
            ModelConfig(path=str(directory), override_config={"max_position_embeddings": 512}), too_long
        )

    async def die() -> float:
        engine.connection.start(engine.connection.post("/slow_down", {"forward_sleep_time": 0.2}))
        await asyncio.sleep(0.5)
        call = asyncio.create_task(engine.generate(GenerationRequest([3], SamplingParams(80, ignore_eos=True), "long")))
        await asyncio.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RolloutError, match=f"the SGLang server at {url} does not answer"):
            await call
        return time.monotonic() - started

    assert asyncio.run(die()) < 60
    engine.close()


# ---- the end of a server; these come last


def test_a_dead_scheduler_is_an_error_with_its_last_words(shared: Any, model: torch.nn.Module) -> None:
    asyncio.run(hand_over(shared, model, 9))
    run_blocking(shared.wake())

    async def die() -> None:
        await shared.connection.call("/slow_down", {"forward_sleep_time": 0.2})
        call = asyncio.create_task(shared.generate(GenerationRequest([3], SamplingParams(90, ignore_eos=True), "long")))
        await asyncio.sleep(0.5)
        server = psutil.Process(shared.process.pid)
        max(server.children(recursive=True), key=lambda process: process.memory_info().rss).kill()
        with pytest.raises(RolloutError, match=r"the SGLang server .*(ended|does not answer)"):
            await asyncio.wait_for(call, 120)

    asyncio.run(die())
    with pytest.raises(RolloutError, match="the SGLang server"):
        generate(shared, [[3]], LONG)


def test_a_closed_engine_leaves_no_process(shared: Any) -> None:
    pid = shared.process.pid
    shared.close()
    assert not psutil.pid_exists(pid)

"""vLLM on several ranks: side by side, and with its weights split over them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.ranks import run_ranks
from tests.workers.rollout.adapted import ALPHA, RANK, AdaptedModel, adapter_bytes, change_adapter, make_adapted_model
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
from verl.config import ModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.workers.rollout.engine import run_blocking
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams
from verl.workers.sharding_manager.lora_sync import AdapterSync

pytestmark = [
    pytest.mark.dist,
    pytest.mark.vllm,
    pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or ""),
]


def check(
    model: torch.nn.Module, prompts: list[list[int]], completions: list[Completion], *, atol: float = 1e-5
) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        table = reference_logits(model, prompt, completion.token_ids).log_softmax(-1)
        expected = table[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=atol, rtol=0)


def _generate(rank: int, folder: str, parallel: int) -> None:
    config = served_everywhere(num_key_value_heads=2, tie_word_embeddings=False)
    policy = make_model(config, spread=2.0)
    engine: Any = make_vllm_engine(policy, Path(folder) / str(rank), tensor_model_parallel_size=parallel)
    for version, seed in enumerate((0, 1)):
        policy = make_model(config, seed=seed, spread=2.0)
        asyncio.run(hand_over(engine, policy, version, live=False))
        assert run_blocking(engine.checksums()) == run_blocking(engine.checksums(weights_of(policy)))
        whole = sum(tensor.nbytes for tensor in weights_of(policy).values())
        held = engine.memory().owned_weights
        assert held < whole * (0.6 if parallel == 2 else 1.1)
        # each rank has its own requests, a different number of them
        prompts = random_prompts([5, 11, 3][: 1 + 2 * rank], seed=10 + rank)
        params = [SamplingParams(8 + 8 * rank, seed=rank * 10 + number) for number in range(len(prompts))]
        completions = generate(engine, prompts, params)
        check(policy, prompts, completions)
    # what was sampled does not depend on who sampled beside it
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (prompts, params, [item.token_ids for item in completions]))
    if parallel == 2 or rank == 0:
        asked, how, tokens = everyone[1]
        again = generate(engine, asked if rank == 0 else [], how if rank == 0 else [])
        assert rank == 1 or [item.token_ids for item in again] == tokens
    dist.barrier()
    if parallel == 2:
        _bad_request_and_abort(rank, engine)


def _bad_request_and_abort(rank: int, engine: Any) -> None:
    """A rank's trouble is its own: the other one gets its completions."""
    good = GenerationRequest([3, 4], SamplingParams(6, seed=1, ignore_eos=True), "good")
    if rank == 0:
        with pytest.raises(RolloutError, match="empty prompt"):
            asyncio.run(engine.generate_many([GenerationRequest([], SamplingParams(2), "bad")]))
    else:
        assert len(asyncio.run(engine.generate_many([good]))[0].token_ids) == 6

    async def run() -> Completion:
        task = asyncio.create_task(engine.generate(GenerationRequest([3], SamplingParams(90, ignore_eos=True), "long")))
        for _ in range(4):
            await asyncio.sleep(0)
        if rank == 1:
            await engine.abort()
        return await task

    completion = asyncio.run(run())
    assert (completion.finish_reason == "abort", len(completion.token_ids) < 90) == (rank == 1, rank == 1)
    _pause(rank, engine)


def _pause(rank: int, engine: Any) -> None:
    """Ranks pause and resume together, also one without requests; nobody is left waiting."""
    request = GenerationRequest([3, 5], SamplingParams(90, ignore_eos=True, seed=4), "long")
    mine = [request] if rank == 0 else []
    whole = asyncio.run(engine.generate_many(mine))

    async def run() -> list[Completion]:
        task = asyncio.create_task(engine.generate_many(mine))
        for _ in range(4 + rank):
            await asyncio.sleep(0)
        await engine.pause()
        assert not task.done()
        await engine.sleep(level=1)
        await engine.wake()
        await engine.resume()
        return await task

    paused = asyncio.run(run())
    assert [item.token_ids for item in paused] == [item.token_ids for item in whole]


@pytest.mark.parametrize("parallel", [1, 2])
def test_two_ranks_sample_from_the_policy(parallel: int, tmp_path: Path) -> None:
    run_ranks(2, _generate, str(tmp_path), parallel)


def _adapter(rank: int, folder: str) -> None:
    """Ranks that split the weights hold their parts of base and adapter; one that lost its base brings it for all."""
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    model = make_adapted_model(num_key_value_heads=2, tie_word_embeddings=False)
    model.config.save_pretrained(Path(folder) / str(rank))
    engine = VLLMRolloutEngine(
        ModelConfig(path=f"{folder}/{rank}", lora_rank=RANK, lora_alpha=ALPHA),
        RolloutConfig(
            name="vllm",
            dtype="float32",
            prompt_length=28,
            response_length=100,
            max_num_seqs=64,
            tensor_model_parallel_size=2,
        ),
        device="cpu",
    )
    sync = AdapterSync(AdaptedModel(model, streams=True), engine, bucket_bytes=2000, on_unchanged="error")
    prompts = random_prompts([5, 11, 3], seed=10 + rank)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for version in range(3):
        change_adapter(model, seed=version)
        if version == 2 and rank == 1:
            engine._values, engine._live = False, None
        sync.sync(version)
        assert sync.last_report is not None
        with_base = version != 1
        assert (sync.last_report.bytes_copied == adapter_bytes(model)) != with_base
        assert engine.memory().owned_weights < 0.7 * whole
        run_blocking(engine.wake())
        completions = generate(engine, prompts, SamplingParams(12, seed=rank, ignore_eos=True))
        check(model, prompts, completions, atol=1e-4)


def test_ranks_that_share_the_weights_share_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    run_ranks(2, _adapter, str(tmp_path))


def _experts(rank: int, folder: str) -> None:
    config = served_everywhere(
        "qwen3_moe", head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    )
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM has layers .*rollout.name=hf"):
        make_vllm_engine(make_model(config), Path(folder))


def test_experts_are_refused_on_cpus(tmp_path: Path) -> None:
    run_ranks(1, _experts, str(tmp_path))

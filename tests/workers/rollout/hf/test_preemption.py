"""Samples that leave a full key-value cache and go on later are those of an engine with room for all."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.images import image_prompt, make_images
from tests.workers.rollout.helpers import (
    generate,
    hand_over,
    hf_rollout,
    loaded_engine,
    make_engine,
    make_model,
    random_prompts,
)
from verl.errors import ConfigError, RolloutError
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams

LENGTHS = (4, 19, 19, 2, 8, 30)
#: samples of each prompt
N = 3


@pytest.fixture(scope="module")
def qwen() -> torch.nn.Module:
    return make_model("qwen2", spread=3.0)


def limited(engine: HFRolloutEngine, tokens: int | None) -> HFRolloutEngine:
    """The engine with a cache of so many tokens; None: as many as memory allows."""
    limit = type(engine)._cached_tokens_limit.__get__(engine) if tokens is None else lambda: tokens
    engine._cached_tokens_limit = limit  # type: ignore[method-assign]
    return engine


def prompts_of_groups() -> list[list[int]]:
    return [prompt for prompt in random_prompts(LENGTHS) for _ in range(N)]


def mixed_settings() -> list[SamplingParams]:
    """Greedy and sampled, with and without penalty, filters and stop tokens, of different lengths."""
    return [
        SamplingParams(
            20 + 7 * number % 31,
            temperature=(1.0, 0.0, 0.8)[number % 3],
            top_k=(-1, 20)[number % 2],
            repetition_penalty=(1.0, 1.3)[number % 4 == 0],
            seed=number,
            ignore_eos=number % 5 != 0,
            stop_token_ids=(7,) if number % 6 == 0 else (),
        )
        for number in range(N * len(LENGTHS))
    ]


def assert_same(ours: list[Completion], theirs: list[Completion], atol: float = 1e-5) -> None:
    """Equal tokens and reasons; log-probabilities up to the rounding of sums in another order."""
    assert [(item.token_ids, item.finish_reason) for item in ours] == [
        (item.token_ids, item.finish_reason) for item in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=atol, rtol=0)


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen2_sliding", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen2_vl"]
)
def test_completions_are_those_of_a_run_with_room(family: str, tmp_path: Path) -> None:
    """Grouped queries, windows, soft caps, sinks, latent attention, experts and positions in three parts."""
    model = make_model(family, spread=3.0)
    engine = loaded_engine(model, tmp_path)
    prompts, settings = prompts_of_groups(), mixed_settings()
    expected = generate(engine, prompts, settings)
    assert engine.counters() == {"preemptions": 0, "recomputed_tokens": 0}
    assert_same(generate(limited(engine, 100), prompts, settings), expected)
    assert engine.counters()["preemptions"] >= 3


@pytest.mark.parametrize("tokens", [81, 100, 150, 333])
@pytest.mark.parametrize("max_num_seqs", [3, 64])
def test_any_budget_that_holds_one_sample_gets_to_the_end(
    qwen: torch.nn.Module, tmp_path: Path, tokens: int, max_num_seqs: int
) -> None:
    """81 tokens are the longest sample alone."""
    engine = loaded_engine(qwen, tmp_path, max_num_seqs=max_num_seqs)
    prompts, settings = prompts_of_groups(), mixed_settings()
    settings[-1] = replace(settings[-1], max_tokens=51)
    expected = generate(engine, prompts, settings)
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    assert_same(generate(limited(engine, tokens), prompts, settings), expected)
    per_token = engine.memory().kv_cache / tokens
    assert per_token <= engine._bytes_per_token, "the cache has no more tokens than it may have"
    with pytest.raises(RolloutError, match=r"'request-1' may have 401 tokens.*cache holds.*gpu_memory_utilization"):
        generate(engine, [[3], [3]], [SamplingParams(5), SamplingParams(400)])
    assert len(generate(engine, [[3]], SamplingParams(5, ignore_eos=True))[0].token_ids) == 5


def test_bfloat16_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    """Keys and values that are computed again are rounded from sums in another order, to 8 bits.

    A token may then fall on the other side of a border, seldom; up to there everything is equal.
    """
    model = make_model("llama", spread=2.0)
    engine = make_engine(model, tmp_path, dtype="bfloat16")
    asyncio.run(hand_over(engine, model))
    prompts, settings = prompts_of_groups(), mixed_settings()
    expected = generate(engine, prompts, settings)
    found = generate(limited(engine, 100), prompts, settings)
    assert engine.counters()["preemptions"] >= 3
    equal = [one.token_ids == other.token_ids for one, other in zip(found, expected, strict=True)]
    assert sum(equal) >= 0.8 * len(equal)
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
        torch.testing.assert_close(
            torch.tensor(one.log_probs[:same]), torch.tensor(other.log_probs[:same]), atol=0.05, rtol=0
        )


def test_samples_without_a_seed_keep_their_random_stream(
    qwen: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded_engine(qwen, tmp_path)
    prompts, params = prompts_of_groups(), SamplingParams(40, ignore_eos=True)

    def run(tokens: int | None) -> list[Completion]:
        counted = iter(range(1, 100))
        real = np.random.SeedSequence
        with monkeypatch.context() as patch:
            patch.setattr(np.random, "SeedSequence", lambda: real(next(counted)))
            return generate(limited(engine, tokens), prompts, params)

    expected = run(None)
    assert len({tuple(item.token_ids) for item in expected}) == len(prompts)
    assert_same(run(240), expected)
    assert engine.counters()["preemptions"] > 0


def test_images_are_seen_by_samples_that_go_on(tmp_path: Path) -> None:
    engine = loaded_engine(make_model("qwen2_vl"), tmp_path)
    shown = [make_images((4, 4), seed=number) for number in range(2)]
    prompts = [image_prompt(images, (3, 4)) for images in shown for _ in range(N)]
    images = [item for item in shown for _ in range(N)]
    settings = [SamplingParams(30, seed=number, ignore_eos=True) for number in range(len(prompts))]
    expected = generate(engine, prompts, settings, images)
    longest = max(map(len, prompts)) + 30
    assert_same(generate(limited(engine, 3 * longest), prompts, settings, images), expected)
    assert engine.counters()["preemptions"] > 0


def run_until_preempted(engine: HFRolloutEngine, requests: list[GenerationRequest], then: Any) -> list[Completion]:
    """Serve requests and do something when one of them waits with tokens."""

    async def run() -> list[Completion]:
        task = asyncio.create_task(engine.generate_many(requests))
        while not any(sequence.token_ids for sequence in engine.scheduler):
            assert not task.done(), "nothing was preempted"
            await asyncio.sleep(0)
        await then()
        return await task

    return asyncio.run(run())


def answers_and_requests(engine: HFRolloutEngine) -> tuple[list[Completion], list[GenerationRequest]]:
    """What an engine with room for all answers, and the requests that it answers so."""
    settings = [SamplingParams(40, seed=number, ignore_eos=True) for number in range(N * len(LENGTHS))]
    expected = generate(engine, prompts_of_groups(), settings)
    requests = [
        GenerationRequest(prompt, one, str(number))
        for number, (prompt, one) in enumerate(zip(prompts_of_groups(), settings, strict=True))
    ]
    return expected, requests


def test_aborted_while_waiting_it_has_its_tokens_and_can_be_continued(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded_engine(qwen, tmp_path)
    expected, requests = answers_and_requests(engine)
    waited: list[int] = []

    async def abort() -> None:
        waited.extend(int(s.request.request_id) for s in engine.scheduler if s.token_ids)
        await engine.abort()

    stopped = run_until_preempted(limited(engine, 240), requests, abort)
    assert waited
    for number in waited:
        count = len(stopped[number].token_ids)
        assert stopped[number].finish_reason == "abort"
        assert count > 0
        assert stopped[number].token_ids == expected[number].token_ids[:count]
        assert len(stopped[number].log_probs) == count
    partial = [replace(request, partial=item) for request, item in zip(requests, stopped, strict=True)]
    assert_same(asyncio.run(engine.generate_many(partial)), expected)


def test_paused_while_one_waits_all_go_on(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded_engine(qwen, tmp_path)
    expected, requests = answers_and_requests(engine)

    async def pause_and_resume() -> None:
        await engine.pause()
        await asyncio.sleep(0)
        await engine.sleep()
        await engine.wake()
        await engine.resume()

    found = run_until_preempted(limited(engine, 240), requests, pause_and_resume)
    assert_same(found, [replace(item, policy_version=1) for item in expected])


def test_the_last_admitted_leaves_and_the_first_never(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = limited(loaded_engine(qwen, tmp_path), 240)
    left: list[int] = []
    take = engine.scheduler.put_back

    def put_back(sequences: Any) -> None:
        for sequence in sequences:
            running = [row.ticket for row in engine.runner.rows if row is not None]
            assert sequence.ticket > max(running)
            left.append(sequence.ticket)
        take(sequences)

    engine.scheduler.put_back = put_back  # type: ignore[method-assign]
    settings = [SamplingParams(40, seed=number, ignore_eos=True) for number in range(N * len(LENGTHS))]
    generate(engine, prompts_of_groups(), settings)
    assert left
    assert 0 not in left


def test_what_is_computed_again_is_counted_and_told_once(
    qwen: torch.nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two samples of a prompt of 10 tokens in a cache of 60: 30 columns for both, and 50 tokens to sample for each."""
    engine = limited(loaded_engine(qwen, tmp_path), 60)
    engine.runner.forward_cost = 0.0  # no row runs on when it has ended
    prompt = random_prompts([10])[0]
    settings = [SamplingParams(50, seed=number, ignore_eos=True) for number in range(2)]
    before = engine.runner.forward_tokens
    with caplog.at_level(logging.INFO, logger="verl.workers.rollout.hf.engine"):
        generate(engine, [prompt, prompt], settings)
    counters = engine.counters()
    assert counters["preemptions"] == 1
    again = counters["recomputed_tokens"]
    # nobody has the prompt when the first one has ended: prompt and sampled tokens are computed again
    assert engine.runner.forward_tokens - before == 10 + 2 * 49 + again - 1
    assert again == 30, "both had 20 tokens when 30 columns were full"
    told = [record.getMessage() for record in caplog.records if "was full" in record.getMessage()]
    assert told == [
        "the key-value cache of 60 tokens was full: 1 samples made room for others and were continued later, for which "
        f"{again} tokens were computed again. rollout.gpu_memory_utilization gives it more memory"
    ]


def test_continued_samples_of_a_prompt_share_it(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded_engine(qwen, tmp_path)
    engine.runner.forward_cost = 0.0
    prompt = random_prompts([40])[0]
    settings = [SamplingParams(20, seed=number, ignore_eos=True) for number in range(4)]
    whole = generate(engine, [prompt] * 4, settings)
    requests = [
        GenerationRequest(
            prompt, one, str(number), Completion(item.token_ids[: 3 + number], item.log_probs[: 3 + number], "abort")
        )
        for number, (one, item) in enumerate(zip(settings, whole, strict=True))
    ]
    before = engine.runner.forward_tokens
    assert_same(
        [
            replace(i, policy_version=1, last_policy_version=None, version_runs=())
            for i in asyncio.run(engine.generate_many(requests))
        ],
        whole,
    )
    sampled = sum(20 - 3 - number - 1 for number in range(4))
    # equal numbers of tokens are needed for one forward without padding; these four have 3 to 6
    assert engine.runner.forward_tokens - before == 40 + (3 + 4 + 5 + 6) + sampled


def test_samples_that_enter_later_take_the_prompt_from_a_row_that_has_it(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded_engine(qwen, tmp_path, max_num_seqs=2)
    engine.runner.forward_cost = 0.0
    prompt = random_prompts([30])[0]
    settings = [SamplingParams(5 + 6 * number, seed=number, ignore_eos=True) for number in range(3)]
    before = engine.runner.forward_tokens
    found = generate(engine, [prompt] * 3, settings)
    # the third one computes the prompt's last token once more, to know what follows it
    assert engine.runner.forward_tokens - before == 30 + 1 + (4 + 10 + 16)
    assert_same(found, generate(loaded_engine(qwen, tmp_path), [prompt] * 3, settings))


def test_a_cache_without_room_for_one_sample_is_refused_at_the_start(tiny_model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.gpu_memory_utilization=1e-11.*prompt_length \+ response_length"):
        hf_rollout(tiny_model_dir, gpu_memory_utilization=1e-11)

"""What every rollout engine must do. A new engine adds itself to ``ENGINES`` and passes the same tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout.helpers import (
    make_engine,
    make_model,
    make_sglang_engine,
    make_vllm_engine,
    missing_package,
    random_prompts,
    reference_greedy,
    reference_logits,
    served_everywhere,
    weights_of,
)
from tests.workers.rollout.served import ServedEngine, replicas, server_spec
from verl.errors import RolloutError, WeightSyncError
from verl.workers.rollout import ROLLOUT_ENGINES
from verl.workers.rollout.engine import RolloutEngine, run_blocking
from verl.workers.rollout.sglang.engine import SGLangRolloutEngine
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams

ENGINES: dict[str, Callable[[torch.nn.Module, Path], RolloutEngine]] = {
    "hf": make_engine,
    "sglang": make_sglang_engine,
    "vllm": make_vllm_engine,
}
#: in processes of their own, behind a client; SGLang's works that way by itself
SERVED = {f"{name}, served": name for name in ENGINES if name != "sglang"}
INSTALLED = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(bool(why := missing_package(SERVED.get(name, name))), reason=why or ""),
            *([pytest.mark.dist] if name in SERVED else []),
        ],
    )
    for name in sorted([*ENGINES, *SERVED])
]
EOS = 2


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(served_everywhere(), spread=2.0)


@contextmanager
def running(name: str, model: torch.nn.Module, directory: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    if name not in SERVED:
        yield ENGINES[name](model, directory)
        return
    request.getfixturevalue("ray_local")
    # slow enough that a message from another process finds requests in flight
    spec = server_spec(model, directory, name=SERVED[name], external_lib="tests.workers.rollout.slow_steps")
    with replicas(spec) as group:
        yield ServedEngine(group)


@pytest.fixture(params=INSTALLED)
def engine(request: pytest.FixtureRequest, model: torch.nn.Module, tmp_path: Path) -> Iterator[RolloutEngine]:
    """An engine that has no weights yet."""
    with running(request.param, model, tmp_path, request) as engine:
        yield engine


@pytest.fixture(scope="module", params=INSTALLED)
def used_engine(
    request: pytest.FixtureRequest, model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    """An engine for all tests that begin with an update; some take seconds to start."""
    with running(request.param, model, tmp_path_factory.mktemp("model"), request) as engine:
        yield engine


async def update(
    engine: RolloutEngine, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, live: bool = True
) -> None:
    await engine.begin_update(version)
    for item in weights:  # one tensor a bucket
        await engine.load([item], live=live)
    await engine.end_update()


@pytest.fixture
def ready(used_engine: RolloutEngine, model: torch.nn.Module) -> RolloutEngine:
    if isinstance(used_engine, SGLangRolloutEngine):
        used_engine.connection.call_blocking("/slow_down", {"forward_sleep_time": None})
    run_blocking(used_engine.wake())
    run_blocking(update(used_engine, weights_of(model).items(), 7))
    return used_engine


def requests(prompts: list[list[int]], **sampling: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, SamplingParams(**{"max_tokens": 8, "seed": number, **sampling}), f"r{number}")  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts)
    ]


def expected_log_probs(model: torch.nn.Module, prompt: list[int], completion: Completion) -> torch.Tensor:
    logits = reference_logits(model, prompt, completion.token_ids)
    return logits.log_softmax(-1)[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]


def penalised(logits: torch.Tensor, prompt: list[int], completion: Completion, penalty: float) -> torch.Tensor:
    """Logits (T,V) before each token, with the repetition penalty for what stands before it."""
    rows = []
    for number, row in enumerate(logits.clone()):
        for token in {*prompt, *completion.token_ids[:number]}:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        rows.append(row)
    return torch.stack(rows)


def test_every_registered_engine_is_tested_here() -> None:
    assert set(ENGINES) == set(ROLLOUT_ENGINES)


def test_completions_come_in_order_with_their_log_probs_and_version(
    ready: RolloutEngine, model: torch.nn.Module
) -> None:
    prompts = random_prompts([9, 2, 14, 2])
    completions = asyncio.run(ready.generate_many(requests(prompts)))
    assert len(completions) == 4
    for prompt, completion in zip(prompts, completions, strict=True):
        assert 1 <= len(completion.token_ids) <= 8
        assert completion.policy_version == 7
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
        torch.testing.assert_close(
            torch.tensor(completion.log_probs), expected_log_probs(model, prompt, completion), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "penalty"),
    [(0.7, -1, 1.0, 1.0), (1.4, 5, 1.0, 1.0), (0.8, -1, 0.7, 1.0), (0.6, 7, 0.8, 1.3), (1.0, -1, 1.0, 0.8)],
)
def test_log_probs_are_those_of_the_distribution_that_is_sampled_from(
    ready: RolloutEngine, model: torch.nn.Module, temperature: float, top_k: int, top_p: float, penalty: float
) -> None:
    prompts = random_prompts([9, 2, 14, 5])
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": penalty}
    batch = requests(prompts, max_tokens=12, ignore_eos=True, **settings)
    for prompt, completion in zip(prompts, asyncio.run(ready.generate_many(batch)), strict=True):
        logits = penalised(reference_logits(model, prompt, completion.token_ids), prompt, completion, penalty)
        logits = logits / temperature
        if top_k > 0:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        probs, order = logits.softmax(-1).sort(descending=True)
        kept = torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, probs.cumsum(-1) - probs < top_p)
        expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
        index = torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected[index], atol=1e-5, rtol=0)


def test_greedy_is_what_transformers_gives_with_log_probs_at_temperature_1(
    ready: RolloutEngine, model: torch.nn.Module
) -> None:
    prompts = random_prompts([7, 3])
    sampled = requests(random_prompts([4]), max_tokens=12, ignore_eos=True)  # a neighbour that is not greedy
    greedy = requests(prompts, temperature=0.0, max_tokens=12)
    *completions, _ = asyncio.run(ready.generate_many([*greedy, *sampled]))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference_greedy(model, prompt, 12)
        torch.testing.assert_close(
            torch.tensor(completion.log_probs), expected_log_probs(model, prompt, completion), atol=1e-5, rtol=0
        )


def test_samples_of_one_prompt_differ_and_do_not_depend_on_their_neighbours(ready: RolloutEngine) -> None:
    prompt = random_prompts([6])[0]
    batch = requests([prompt] * 8, max_tokens=16, ignore_eos=True)
    together = [item.token_ids for item in asyncio.run(ready.generate_many(batch))]
    assert len({tuple(tokens) for tokens in together}) == 8
    alone = [asyncio.run(ready.generate(request)).token_ids for request in batch[:3]]
    assert alone == together[:3]


def test_generate_and_generate_many_agree(ready: RolloutEngine) -> None:
    batch = requests(random_prompts([9, 2, 14]))

    async def one_by_one() -> list[Completion]:
        return list(await asyncio.gather(*(ready.generate(request) for request in batch)))

    single = asyncio.run(one_by_one())
    many = asyncio.run(ready.generate_many(batch))
    assert [item.token_ids for item in single] == [item.token_ids for item in many]


def test_no_requests_give_no_completions(ready: RolloutEngine) -> None:
    assert asyncio.run(ready.generate_many([])) == []


def test_seeds_decide_and_greedy_ignores_them(ready: RolloutEngine) -> None:
    prompt = random_prompts([6])

    def run(seed: int, temperature: float) -> list[int]:
        batch = requests(prompt, seed=seed, temperature=temperature, max_tokens=20, ignore_eos=True)
        return asyncio.run(ready.generate_many(batch))[0].token_ids

    assert run(1, 1.0) == run(1, 1.0)
    assert run(1, 1.0) != run(2, 1.0)
    assert run(1, 0.0) == run(2, 0.0)


def test_limits_and_stops(ready: RolloutEngine) -> None:
    prompt = random_prompts([6])
    free = asyncio.run(ready.generate_many(requests(prompt, max_tokens=30, ignore_eos=True)))[0]
    assert (len(free.token_ids), free.finish_reason) == (30, "length")
    stop = free.token_ids[7]
    batch = requests(prompt, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    stopped = asyncio.run(ready.generate_many(batch))[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    shortest = asyncio.run(ready.generate_many(requests(prompt, max_tokens=1, ignore_eos=True)))[0]
    assert shortest.token_ids == free.token_ids[:1]


def test_new_weights_change_what_is_generated(ready: RolloutEngine, model: torch.nn.Module) -> None:
    prompt = random_prompts([6])[0]
    other = make_model(served_everywhere(), seed=5, spread=2.0)
    run_blocking(update(ready, weights_of(other).items(), 8, live=False))
    completion = asyncio.run(ready.generate_many(requests([prompt])))[0]
    assert completion.policy_version == ready.policy_version == 8
    torch.testing.assert_close(
        torch.tensor(completion.log_probs), expected_log_probs(other, prompt, completion), atol=1e-5, rtol=0
    )


def test_it_refuses_to_generate_without_complete_weights(engine: RolloutEngine, model: torch.nn.Module) -> None:
    assert engine.policy_version == -1
    with pytest.raises(RolloutError):
        asyncio.run(engine.generate_many(requests([[3]])))
    with pytest.raises(WeightSyncError):
        run_blocking(update(engine, list(weights_of(model).items())[:-3], 1))
    with pytest.raises(RolloutError):
        asyncio.run(engine.generate_many(requests([[3]])))
    run_blocking(update(engine, weights_of(model).items(), 1))
    assert asyncio.run(engine.generate_many(requests([[3]])))[0].token_ids


def test_asleep_it_holds_nothing_and_awake_it_continues(ready: RolloutEngine) -> None:
    batch = requests(random_prompts([6, 3]))
    first = asyncio.run(ready.generate_many(batch))
    assert ready.memory().kv_cache > 0
    run_blocking(ready.sleep())
    assert ready.memory().kv_cache == 0
    if not isinstance(ready, ServedEngine):  # on a CPU, in a process without the trainer, they can be nowhere else
        assert ready.memory().owned_weights == 0
    with pytest.raises(RolloutError):
        asyncio.run(ready.generate_many(batch))
    run_blocking(ready.wake())
    assert [item.token_ids for item in asyncio.run(ready.generate_many(batch))] == [item.token_ids for item in first]


def test_a_repetition_penalty_changes_what_is_most_likely(ready: RolloutEngine, model: torch.nn.Module) -> None:
    prompt = random_prompts([7])[0]
    free, held = (
        asyncio.run(ready.generate_many(requests([prompt], temperature=0.0, max_tokens=40, repetition_penalty=value)))[
            0
        ]
        for value in (1.0, 1e4)
    )
    assert len(set(held.token_ids)) > len(set(free.token_ids))
    expected = penalised(reference_logits(model, prompt, held.token_ids), prompt, held, 1e4).log_softmax(-1)
    assert held.token_ids == expected.argmax(-1).tolist()
    chosen = expected[torch.arange(len(held.token_ids)), torch.tensor(held.token_ids)]
    torch.testing.assert_close(torch.tensor(held.log_probs), chosen, atol=1e-5, rtol=0)


LONG = 60
SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.02, "repetition_penalty": 1.5},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


def long_requests() -> list[GenerationRequest]:
    """Every kind of sampling, with prompts of different lengths, some of them the same."""
    prompts = random_prompts([9, 2, 14])
    return [
        GenerationRequest(
            prompts[number % 3],
            SamplingParams(LONG, seed=number, ignore_eos=True, **settings),  # type: ignore[arg-type]
            f"long-{number}",
        )
        for number, settings in enumerate(SETTINGS * 2)
    ]


#: seconds that SGLang is told to take for a token
STEP_S = 0.04


async def turns(engine: RolloutEngine, count: int) -> None:
    """Let the engine make about this many tokens; a few at least."""
    if isinstance(engine, ServedEngine):
        await engine.turns(count)
    if isinstance(engine, SGLangRolloutEngine):  # its server does not wait for our event loop
        await engine.connection.call("/slow_down", {"forward_sleep_time": STEP_S})
        await asyncio.sleep(count * STEP_S)
    for _ in range(count):
        await asyncio.sleep(0)


async def interrupted(engine: RolloutEngine, batch: list[GenerationRequest], after: int) -> list[Completion]:
    task = asyncio.create_task(engine.generate_many(batch))
    await turns(engine, after)
    await engine.abort()
    return await asyncio.wait_for(task, 20)


def assert_same(got: list[Completion], want: list[Completion]) -> None:
    assert [item.token_ids for item in got] == [item.token_ids for item in want]
    for one, other in zip(got, want, strict=True):
        assert one.finish_reason == other.finish_reason
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0)


def test_abort_completes_requests_early(ready: RolloutEngine) -> None:
    async def run() -> list[Completion]:
        task = asyncio.create_task(ready.generate_many(long_requests()))
        await turns(ready, 12)
        await ready.abort(["long-3"])
        return await task

    completions = asyncio.run(run())
    early = completions.pop(3)
    assert early.finish_reason == "abort"
    assert 0 < len(early.token_ids) == len(early.log_probs) < LONG
    assert all(math.isfinite(value) for value in early.log_probs)
    assert {(item.finish_reason, len(item.token_ids)) for item in completions} == {("length", LONG)}


@pytest.mark.parametrize("stops", [(12,), (1, 7, 25)], ids=str)
def test_an_aborted_completion_continues_exactly(ready: RolloutEngine, stops: tuple[int, ...]) -> None:
    batch = long_requests()
    whole = asyncio.run(ready.generate_many(batch))
    again = batch
    for after in stops:
        partial = asyncio.run(interrupted(ready, again, after))
        assert {item.finish_reason for item in partial} == {"abort"}
        for one, other in zip(partial, whole, strict=True):
            assert one.token_ids == other.token_ids[: len(one.token_ids)]
        again = [replace(request, partial=item) for request, item in zip(batch, partial, strict=True)]
    assert 0 < max(len(item.token_ids) for item in partial) < LONG
    continued = asyncio.run(ready.generate_many(again))
    assert_same(continued, whole)
    assert {(item.policy_version, item.last_policy_version) for item in continued} == {(7, None)}


def test_a_completion_continues_under_newer_weights(ready: RolloutEngine, model: torch.nn.Module) -> None:
    prompt = random_prompts([6])[0]
    request = GenerationRequest(prompt, SamplingParams(40, seed=3, ignore_eos=True), "long")
    (partial,) = asyncio.run(interrupted(ready, [request], 12))
    kept = len(partial.token_ids)
    other = make_model(served_everywhere(), seed=5, spread=2.0)
    run_blocking(update(ready, weights_of(other).items(), 9, live=False))
    completion = asyncio.run(ready.generate(replace(request, partial=partial)))
    assert (completion.policy_version, completion.last_policy_version) == (7, 9)
    assert (completion.token_ids[:kept], completion.log_probs[:kept]) == (partial.token_ids, partial.log_probs)
    values, sampled = torch.tensor(completion.log_probs), len(completion.token_ids)
    assert (kept > 0, sampled) == (True, 40)
    torch.testing.assert_close(values[:kept], expected_log_probs(model, prompt, completion)[:kept], atol=1e-5, rtol=0)
    torch.testing.assert_close(values[kept:], expected_log_probs(other, prompt, completion)[kept:], atol=1e-5, rtol=0)


def test_a_partial_completion_must_be_one(ready: RolloutEngine) -> None:
    batch = requests([[3, 4]], max_tokens=4, ignore_eos=True)
    done = asyncio.run(ready.generate_many(batch))[0]
    with pytest.raises(RolloutError, match=r"'r0': its partial completion ended with 'length'"):
        replace(batch[0], partial=done)
    with pytest.raises(RolloutError, match=r"partial completion of 4 tokens .* fewer than max_tokens=4"):
        replace(batch[0], partial=replace(done, finish_reason="abort"))


def test_paused_requests_wait_and_go_on_exactly(ready: RolloutEngine, model: torch.nn.Module) -> None:
    batch = long_requests()
    late = GenerationRequest([5, 6], SamplingParams(4, seed=1, ignore_eos=True), "late")
    whole = asyncio.run(ready.generate_many([*batch, late]))

    async def run() -> list[Completion]:
        task = asyncio.create_task(ready.generate_many(batch))
        await turns(ready, 12)
        await ready.pause()
        other = asyncio.create_task(ready.generate(late))
        await turns(ready, 30)
        assert not task.done()
        assert not other.done()
        await ready.sleep()  # nothing is in flight
        assert ready.memory().kv_cache == 0
        await ready.wake()
        await ready.resume()
        return [*await asyncio.wait_for(task, 60), await asyncio.wait_for(other, 20)]

    assert_same(asyncio.run(run()), whole)


def test_weights_may_change_during_a_pause(ready: RolloutEngine) -> None:
    other = make_model(served_everywhere(), seed=5, spread=2.0)
    request = GenerationRequest([5, 6], SamplingParams(LONG, seed=1, ignore_eos=True), "long")

    async def run() -> Completion:
        task = asyncio.create_task(ready.generate(request))
        await turns(ready, 12)
        await ready.pause()
        await update(ready, weights_of(other).items(), 11, live=False)
        await ready.resume()
        return await asyncio.wait_for(task, 20)

    completion = asyncio.run(run())
    assert (completion.policy_version, completion.last_policy_version) == (7, 11)
    assert len(completion.token_ids) == LONG


def test_paused_requests_can_be_aborted(ready: RolloutEngine) -> None:
    request = GenerationRequest([5, 6], SamplingParams(LONG, seed=1, ignore_eos=True), "long")

    async def run() -> Completion:
        task = asyncio.create_task(ready.generate(request))
        await turns(ready, 12)
        await ready.pause()
        await ready.abort(["long"])
        try:
            return await asyncio.wait_for(task, 20)
        finally:
            await ready.resume()

    partial = asyncio.run(run())
    assert (partial.finish_reason, 0 < len(partial.token_ids) < LONG) == ("abort", True)
    assert_same(
        [asyncio.run(ready.generate(replace(request, partial=partial)))], [asyncio.run(ready.generate(request))]
    )


def test_checksums_tell_weights_apart(ready: RolloutEngine, model: torch.nn.Module) -> None:
    mine = asyncio.run(ready.checksums())
    assert mine == asyncio.run(ready.checksums(weights_of(model)))
    changed = {name: tensor.detach().clone() for name, tensor in weights_of(model).items()}
    changed["model.norm.weight"][3] += 1e-6
    different = asyncio.run(ready.checksums(changed))
    assert [name for name in mine if mine[name] != different[name]] == ["model.norm.weight"]


def test_a_bad_request_is_refused_and_the_next_one_served(ready: RolloutEngine) -> None:
    with pytest.raises(RolloutError):
        asyncio.run(ready.generate_many(requests([[]])))
    with pytest.raises(RolloutError):
        asyncio.run(ready.generate_many(requests([[10_000]])))
    assert asyncio.run(ready.generate_many(requests([[3]])))[0].token_ids

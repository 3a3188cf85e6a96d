"""The built-in engine against Transformers, and its own promises."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.models.families import ATTENTION_FAMILIES, make_config
from tests.workers.rollout.helpers import (
    generate,
    hand_over,
    loaded_engine,
    make_engine,
    make_model,
    random_prompts,
    reference_greedy,
    reference_logits,
    weights_of,
)
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import GenerationRequest, SamplingParams

RAGGED = (3, 17, 9, 17, 1, 5, 12)


@pytest.fixture(scope="module")
def qwen() -> torch.nn.Module:
    return make_model("qwen2")


@pytest.fixture
def engine(qwen: torch.nn.Module, tmp_path: Path) -> HFRolloutEngine:
    return loaded_engine(qwen, tmp_path)


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_greedy_equals_transformers_generate(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    prompts = random_prompts(RAGGED)
    completions = generate(loaded_engine(model, tmp_path), prompts, SamplingParams(12, temperature=0.0))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference_greedy(model, prompt, 12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_layers_give_the_same_tokens(tmp_path: Path) -> None:
    model = make_model("qwen2")
    engine = loaded_engine(model, tmp_path, enforce_eager=False)
    assert engine.packed is None
    prompts = random_prompts(RAGGED)
    for prompt, completion in zip(prompts, generate(engine, prompts, SamplingParams(6, temperature=0.0)), strict=True):
        assert completion.token_ids == reference_greedy(model, prompt, 6)


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_sampled_log_probs_equal_a_plain_forward(family: str, tmp_path: Path) -> None:
    model = make_model(family, spread=3.0)
    prompts = random_prompts(RAGGED)
    settings = [SamplingParams(10, seed=number, ignore_eos=True) for number in range(len(prompts))]
    for prompt, completion in zip(prompts, generate(loaded_engine(model, tmp_path), prompts, settings), strict=True):
        logits = reference_logits(model, prompt, completion.token_ids)
        expected = logits.log_softmax(-1)[torch.arange(10), torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, -1, 1.0, 0.0), (1.3, 7, 1.0, 0.0), (1.0, -1, 0.8, 0.0), (0.9, 20, 0.7, 0.0), (1.0, -1, 1.0, 0.1)],
)
def test_filtered_log_probs_are_of_the_filtered_distribution(
    qwen: torch.nn.Module, engine: HFRolloutEngine, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    prompts = random_prompts(RAGGED)
    settings = [
        SamplingParams(10, temperature, top_p, top_k, min_p, seed=number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    for prompt, completion in zip(prompts, generate(engine, prompts, settings), strict=True):
        logits = warpers(None, reference_logits(qwen, prompt, completion.token_ids))
        expected = logits.log_softmax(-1)[torch.arange(10), torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_a_sample_does_not_depend_on_its_batch(engine: HFRolloutEngine) -> None:
    prompts = random_prompts(RAGGED)
    settings = [
        SamplingParams(9, temperature=temperature, top_k=top_k, seed=100 + number)
        for number, (temperature, top_k) in enumerate(
            [(1.0, -1), (0.7, -1), (1.0, 5), (0.0, -1), (1.5, 30), (1.0, -1), (1.0, -1)]
        )
    ]
    together = generate(engine, prompts, settings)
    reverse = generate(engine, prompts[::-1], settings[::-1])[::-1]
    for prompt, one, batched, reversed_ in zip(prompts, settings, together, reverse, strict=True):
        alone = generate(engine, [prompt], one)[0]
        assert alone.token_ids == batched.token_ids == reversed_.token_ids
        torch.testing.assert_close(torch.tensor(alone.log_probs), torch.tensor(batched.log_probs), atol=1e-5, rtol=0)


def test_penalties_follow_rows_that_come_go_and_move(qwen: torch.nn.Module, tmp_path: Path) -> None:
    """Few places and ragged lengths: rows with and without a penalty are admitted late, moved and laid out again."""
    prompts = random_prompts([4, 9, 3, 12, 6, 5, 2, 8])
    params = [
        SamplingParams(4 + 5 * (number % 4), seed=number, ignore_eos=True, repetition_penalty=(1.0, 1.6)[number % 2])
        for number in range(8)
    ]
    together = generate(loaded_engine(qwen, tmp_path, max_num_seqs=3), prompts, params)
    alone = loaded_engine(qwen, tmp_path)
    for prompt, one, completion in zip(prompts, params, together, strict=True):
        assert generate(alone, [prompt], one)[0].token_ids == completion.token_ids


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 64])
def test_admission_does_not_change_completions(qwen: torch.nn.Module, tmp_path: Path, max_num_seqs: int) -> None:
    """Rows come and go while others run: lengths, budgets and prompts of all kinds, in small and large batches."""
    prompts = random_prompts([4, 19, 19, 2, 8, 30, 8, 1, 12, 25, 6, 6])
    prompts[5] = prompts[8]
    settings = [
        SamplingParams(1 + 5 * number % 14, seed=number, ignore_eos=number % 2 == 0) for number in range(len(prompts))
    ]
    engine = loaded_engine(qwen, tmp_path, max_num_seqs=max_num_seqs)
    completions = generate(engine, prompts, settings)
    for prompt, one, completion in zip(prompts, settings, completions, strict=True):
        logits = reference_logits(qwen, prompt, completion.token_ids)
        index = torch.arange(len(completion.token_ids))
        expected = logits.log_softmax(-1)[index, torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == one.max_tokens
        else:
            assert completion.token_ids[-1] == 2
    alone = [generate(engine, [prompt], one)[0].token_ids for prompt, one in zip(prompts, settings, strict=True)]
    assert [completion.token_ids for completion in completions] == alone


def test_requests_that_arrive_later_join_the_running_batch(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded_engine(qwen, tmp_path, max_num_seqs=16)
    engine.runner.forward_cost = 0.0  # finished rows are moved out at once
    prompts = random_prompts([5, 3, 40, 11])
    settings = [SamplingParams(20, seed=number, ignore_eos=True) for number in range(4)]

    async def later(number: int) -> list[int]:
        for _ in range(4 * number):
            await asyncio.sleep(0)
        request = GenerationRequest(prompts[number], settings[number], f"late-{number}")
        return (await engine.generate(request)).token_ids

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(later(number) for number in range(4)))

    before = engine.runner.forward_tokens
    together = asyncio.run(run())
    joined = engine.runner.forward_tokens - before
    alone = [generate(engine, [prompt], one)[0].token_ids for prompt, one in zip(prompts, settings, strict=True)]
    assert together == alone
    # 59 prompt tokens and 4 * 19 decode tokens: nothing was computed twice
    assert joined == 59 + 76


def test_equal_prompts_are_prefilled_once(engine: HFRolloutEngine) -> None:
    first, second = random_prompts([20, 20])
    prompts = [first, second, first, second, first, second]  # not adjacent
    before = engine.runner.forward_tokens
    completions = generate(engine, prompts, [SamplingParams(4, seed=s, ignore_eos=True) for s in range(6)])
    assert engine.runner.forward_tokens - before == 2 * 20 + 6 * 3
    assert len({tuple(c.token_ids) for c in completions}) > 2  # samples of a prompt differ


@pytest.mark.parametrize(("forward_cost", "wasted"), [(0.0, 0), (40.0, 12), (1e9, 12 * 28)])
def test_finished_rows_leave_when_they_have_cost_more_than_moving(
    qwen: torch.nn.Module, tmp_path: Path, forward_cost: float, wasted: int
) -> None:
    engine = loaded_engine(qwen, tmp_path)
    engine.runner.forward_cost = forward_cost
    settings = [SamplingParams(2 if number < 12 else 30, seed=number, ignore_eos=True) for number in range(16)]
    prompts = random_prompts([10]) * 16
    before = engine.runner.forward_tokens
    completions = generate(engine, prompts, settings)
    assert [len(completion.token_ids) for completion in completions] == [2] * 12 + [30] * 4
    assert engine.runner.forward_tokens - before == 10 + 16 + 4 * 28 + wasted


def test_stops_at_end_of_sequence_and_at_stop_tokens(qwen: torch.nn.Module, engine: HFRolloutEngine) -> None:
    prompt = random_prompts([8])[0]
    free = generate(engine, [prompt], SamplingParams(40, seed=3, ignore_eos=True))[0]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == len(free.log_probs) == 40
    stop = free.token_ids[10]
    at = free.token_ids.index(stop)
    stopped = generate(engine, [prompt], SamplingParams(40, seed=3, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.finish_reason == "stop"
    both = generate(
        engine,
        [prompt] * 2,
        [
            SamplingParams(40, seed=3, ignore_eos=True, stop_token_ids=(stop,)),
            SamplingParams(40, seed=3, ignore_eos=True),
        ],
    )
    assert [len(item.token_ids) for item in both] == [at + 1, 40]
    assert engine.eos_token_ids == frozenset({2})


def test_end_of_sequence_tokens_come_from_all_places(tiny_model_dir: str, tmp_path: Path) -> None:
    import json
    import shutil

    from verl.config import ModelConfig, RolloutConfig

    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "pad_token_id": 0}))
    engine = HFRolloutEngine(ModelConfig(path=str(tmp_path / "model")), RolloutConfig(), device="cpu")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert {7, 9, tokenizer.eos_token_id} <= engine.eos_token_ids
    assert engine.pad_token_id == tokenizer.pad_token_id


def test_weights_are_the_sources_own_memory(qwen: torch.nn.Module, engine: HFRolloutEngine) -> None:
    mine = dict(engine.module.named_parameters(remove_duplicate=False))
    assert set(mine) == set(dict(qwen.named_parameters(remove_duplicate=False)))
    for name, parameter in qwen.named_parameters(remove_duplicate=False):
        assert mine[name].data_ptr() == parameter.data_ptr()
    memory = engine.memory()
    assert memory.owned_weights == 0
    assert memory.aliased_weights == sum(parameter.nbytes for parameter in qwen.parameters())


def test_optimizer_steps_on_the_source_are_visible(tmp_path: Path) -> None:
    model = make_model("qwen2")
    engine = loaded_engine(model, tmp_path)
    prompt = random_prompts([6])[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(input_ids=torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
    optimizer.step()
    completion = generate(engine, [prompt], SamplingParams(6, seed=1, ignore_eos=True))[0]
    logits = reference_logits(model, prompt, completion.token_ids)
    expected = logits.log_softmax(-1)[torch.arange(6), torch.tensor(completion.token_ids)]
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("live", [True, False])
def test_another_dtype_is_cast_into_the_same_memory_every_time(tmp_path: Path, live: bool) -> None:
    model = make_model("qwen2")
    engine = make_engine(model, tmp_path, dtype="bfloat16")
    asyncio.run(hand_over(engine, model, 1, live=live))
    before = {name: parameter.data_ptr() for name, parameter in engine.module.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    asyncio.run(hand_over(engine, model, 2, live=live))
    for name, parameter in engine.module.named_parameters():
        assert parameter.data_ptr() == before[name]
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, model.get_parameter(name).bfloat16())
    assert engine.policy_version == 2
    assert engine.memory().aliased_weights == 0
    assert engine.memory().owned_weights == sum(2 * parameter.numel() for parameter in model.parameters())
    logits_free = generate(engine, random_prompts([5, 9]), SamplingParams(5, seed=1))
    assert all(math.isfinite(value) for completion in logits_free for value in completion.log_probs)


def test_weights_may_be_written_where_they_are_read(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded_engine(make_model("qwen2", seed=5), tmp_path)
    names = [name for name, _ in qwen.named_parameters()]  # tied ones once
    with pytest.raises(WeightSyncError, match="outside of an update"):
        engine.shard_views(names)
    held = []
    for version in (2, 3):
        asyncio.run(engine.begin_update(version))
        with pytest.raises(WeightSyncError, match="unexpected weight 'model.nothing'"):
            engine.shard_views(["model.nothing"])
        parts = engine.shard_views(names)
        for name, parameter in qwen.named_parameters():
            (part,) = parts[name]
            assert (part.start, part.stop) == ((0,) * parameter.dim(), tuple(parameter.shape))
            part.tensor.copy_(parameter.detach())
        engine.mark_loaded(names)
        asyncio.run(engine.end_update())
        held.append({name: part.tensor.data_ptr() for name, (part,) in parts.items()})
    assert held[0] == held[1], "the same memory every time"
    assert asyncio.run(engine.checksums()) == asyncio.run(engine.checksums(weights_of(qwen)))
    assert engine.memory().aliased_weights == 0
    (prompt,) = random_prompts([6])
    (completion,) = generate(engine, [prompt], SamplingParams(8, temperature=0.0))
    assert completion.token_ids == reference_greedy(qwen, prompt, 8)
    asyncio.run(engine.begin_update(4))
    engine.shard_views(names)
    engine.mark_loaded(names[1:])
    with pytest.raises(WeightSyncError, match="1 of .* weights did not arrive"):
        asyncio.run(engine.end_update())
    with pytest.raises(RolloutError, match="weights"):
        generate(engine, [prompt], SamplingParams(8))


def test_sleep_gives_memory_back_and_wake_restores(tmp_path: Path) -> None:
    model = make_model("qwen2")
    engine = make_engine(model, tmp_path, dtype="bfloat16")
    asyncio.run(hand_over(engine, model))
    prompts = random_prompts([5, 9])
    first = generate(engine, prompts, SamplingParams(5, seed=1))
    assert engine.memory().kv_cache > 0
    asyncio.run(engine.sleep())
    assert engine.memory().kv_cache == 0
    assert engine.memory().owned_weights == 0
    with pytest.raises(RolloutError, match="asleep"):
        generate(engine, prompts, SamplingParams(5, seed=1))
    asyncio.run(engine.wake())
    assert generate(engine, prompts, SamplingParams(5, seed=1)) == first


def test_an_update_while_asleep_needs_no_cache(qwen: torch.nn.Module, engine: HFRolloutEngine) -> None:
    asyncio.run(engine.sleep())
    asyncio.run(hand_over(engine, qwen, 2))
    assert engine.memory().kv_cache == 0
    with pytest.raises(RolloutError, match="kv_cache"):
        generate(engine, random_prompts([3]), SamplingParams(2))
    asyncio.run(engine.wake(("kv_cache",)))
    assert generate(engine, random_prompts([3]), SamplingParams(2))[0].policy_version == 2


def test_incomplete_or_foreign_weights_are_refused(qwen: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(qwen, tmp_path)
    prompt = random_prompts([4])
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, prompt, SamplingParams(1))

    async def update(weights: dict[str, torch.Tensor], version: int = 1) -> None:
        await engine.begin_update(version)
        await engine.load(weights.items())
        await engine.end_update()

    weights = weights_of(qwen)
    missing = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(WeightSyncError, match=r"1 of .* did not arrive: model.layers.1.mlp.up_proj.weight"):
        asyncio.run(update(missing))
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, prompt, SamplingParams(1))
    with pytest.raises(WeightSyncError, match=r"unexpected weight 'model.layers.7.mlp.up_proj.weight'"):
        asyncio.run(update({**weights, "model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}))
    with pytest.raises(WeightSyncError, match=r"shape \(3, 32\)"):
        asyncio.run(update({**weights, "model.embed_tokens.weight": torch.zeros(3, 32)}))
    without_head = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    asyncio.run(update(without_head))  # tied: one name is enough
    assert engine.module.lm_head.weight.data_ptr() == qwen.model.embed_tokens.weight.data_ptr()
    with pytest.raises(WeightSyncError, match="tied in the rollout but arrived with different values"):
        asyncio.run(update({**weights, "lm_head.weight": torch.zeros(61, 32)}, 2))
    with pytest.raises(WeightSyncError, match="outside of an update"):
        asyncio.run(engine.load(weights.items()))
    asyncio.run(update(weights, 3))
    assert engine.policy_version == 3


def test_nothing_may_be_in_flight_during_an_update_or_sleep(engine: HFRolloutEngine) -> None:
    prompt = random_prompts([4])[0]

    async def run() -> None:
        task = asyncio.create_task(engine.generate(GenerationRequest(prompt, SamplingParams(50, ignore_eos=True), "a")))
        await asyncio.sleep(0.01)
        with pytest.raises(WeightSyncError, match="1 requests are in flight"):
            await engine.begin_update(2)
        with pytest.raises(RolloutError, match="1 requests are in flight"):
            await engine.sleep()
        assert len((await task).token_ids) == 50
        await engine.sleep()

    asyncio.run(run())


def test_abort_returns_what_there_is(engine: HFRolloutEngine) -> None:
    prompts = random_prompts([4, 6, 5])

    async def run() -> list[tuple[str, int]]:
        tasks = [
            asyncio.create_task(
                engine.generate(GenerationRequest(prompt, SamplingParams(60, seed=1, ignore_eos=True), f"r{number}"))
            )
            for number, prompt in enumerate(prompts)
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        await engine.abort(["r1"])
        aborted = await tasks[1]
        rest = [await tasks[0], await tasks[2]]
        return [(item.finish_reason, len(item.token_ids)) for item in (aborted, *rest)]

    (reason, length), *rest = asyncio.run(run())
    assert reason == "abort"
    assert 0 < length < 60
    assert rest == [("length", 60), ("length", 60)]


def test_a_cancelled_call_leaves_nothing_behind(engine: HFRolloutEngine) -> None:
    prompt = random_prompts([4])[0]

    async def run() -> None:
        task = asyncio.create_task(
            engine.generate(GenerationRequest(prompt, SamplingParams(500, ignore_eos=True), "a"))
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.sleep()  # idle again

    asyncio.run(run())


def test_weights_that_are_not_finite_raise_and_do_not_poison_the_cache(tmp_path: Path) -> None:
    model = make_model("qwen2")
    engine = loaded_engine(model, tmp_path)
    prompts = random_prompts([3, 12])
    expected = generate(engine, prompts, SamplingParams(4, seed=1))
    good = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite"):
        generate(engine, prompts, SamplingParams(4, seed=1))
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    assert generate(engine, prompts, SamplingParams(4, seed=1)) == expected


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], None, "empty prompt"),
        ([3, 61], None, "token id 61"),
        ([3, -1], None, "token id -1"),
        ([3] * 9, 16, "max_model_len=16"),
    ],
)
def test_bad_requests_are_refused(
    qwen: torch.nn.Module, tmp_path: Path, prompt: list[int], limit: int | None, message: str
) -> None:
    engine = loaded_engine(qwen, tmp_path, max_model_len=limit)
    with pytest.raises(RolloutError, match=message):
        generate(engine, [prompt], SamplingParams(8))
    assert generate(engine, [[3, 4]], SamplingParams(2, ignore_eos=True))[0].finish_reason == "length"


@pytest.mark.parametrize(
    "values",
    [{"max_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2.0}],
)
def test_sampling_parameters_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(RolloutError, match=next(iter(values))):
        SamplingParams(**{"max_tokens": 4, **values})


def test_architectures_without_a_cache_of_keys_and_values_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3_next", num_hidden_layers=4, hidden_size=32, vocab_size=61).save_pretrained(tmp_path)
    from verl.config import ModelConfig, RolloutConfig

    with pytest.raises(ConfigError, match="linear_attention"):
        HFRolloutEngine(ModelConfig(path=str(tmp_path)), RolloutConfig(), device="cpu")


def test_bfloat16_log_probs_are_close_to_a_bfloat16_forward(tmp_path: Path) -> None:
    model = make_model("llama", spread=2.0)
    engine = make_engine(model, tmp_path, dtype="bfloat16")
    asyncio.run(hand_over(engine, model))
    prompts = random_prompts(RAGGED)
    settings = [SamplingParams(8, seed=number, ignore_eos=True) for number in range(len(prompts))]
    half = make_model(make_config("llama"), spread=2.0).bfloat16()
    for prompt, completion in zip(prompts, generate(engine, prompts, settings), strict=True):
        logits = reference_logits(half, prompt, completion.token_ids)
        expected = logits.log_softmax(-1)[torch.arange(8), torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=0.05, rtol=0)

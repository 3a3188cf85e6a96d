"""Trajectories that are stopped and go on later: nothing that was sampled is lost, changed or given another version."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agent_loop.script import TOKENIZER, Scripted, config, row
from tests.agent_loop.ticking import Ticking, length_of, log_prob_of, token_of
from verl.agent_loop import AgentLoopBase, AgentLoopOutput, EngineGenerator, register
from verl.agent_loop.base import AGENT_LOOPS
from verl.agent_loop.batch import Row
from verl.agent_loop.partial_rollouts import CutOff, RecordedCompletion
from verl.agent_loop.runner import AgentLoopRunner
from verl.config import ModelConfig
from verl.errors import RolloutError
from verl.tools import function_tool
from verl.tools.parsers import PARSERS, ParsedTurn, ToolCall, ToolParser, register_parser
from verl.trajectories import Sample
from verl.utils.tokenizer import load_tokenizer
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.pausing import with_partial
from verl.workers.rollout.serving.packed_requests import PackedCompletions, PackedRequests
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams


@function_tool("echo")
def echo(text: str) -> str:
    """Repeat."""
    return f"[{text}]"


class EveryTurnCalls(ToolParser):
    """A random model calls no tool; here everything it says is a call."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn("", [ToolCall("echo", {"text": text[:3]})])


@pytest.fixture(scope="module", autouse=True)
def every_turn() -> Any:
    register_parser("every_turn_here")(EveryTurnCalls)
    yield
    PARSERS._items.pop("every_turn_here")


def rows_of(count: int, **fields: Any) -> list[Row]:
    return [Row(str(i), {"temperature": 1.0, "seed": i}, row(content=f"{i}", **fields).fields) for i in range(count)]


def going_on(rows: Sequence[Row], trajectories: Sequence[Sample]) -> list[Row]:
    """The rows of the next step: their recorded completions have been through a checkpoint."""
    out = []
    for one, trajectory in zip(rows, trajectories, strict=True):
        if trajectory.unfinished is None:
            out.append(replace(one, ended=True))
        else:
            recorded = tuple(map(RecordedCompletion.from_plain, trajectory.unfinished))
            out.append(replace(one, recorded=recorded))
    return out


def carried(
    runner: AgentLoopRunner, rows: Sequence[Row], generators: Sequence[Any], group_size: int = 1
) -> list[Sample]:
    """Run rows over several steps, each with its generator and one more complete group, the last one to the end."""
    ended: dict[str, Sample] = {}
    waiting = list(rows)
    for number, generator in enumerate(generators, start=1):
        last = number == len(generators)
        groups = len(rows) // group_size
        cut = CutOff([False] * len(rows), group_size, groups if last else number)
        got = asyncio.run(asyncio.wait_for(runner.run(waiting, generator, cut=cut), 60))
        for one, trajectory in zip(waiting, got, strict=True):
            if trajectory.unfinished is None and not one.ended:
                ended[one.session] = trajectory
        waiting = going_on(waiting, got)
    return [ended[one.session] for one in rows]


# ---- versions of tokens ------------------------------------------------------------------------------------------


def test_every_token_keeps_the_version_that_sampled_it() -> None:
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=20), "one")
    first = Completion([5, 6, 7], [-0.5] * 3, "abort", 3)
    second = with_partial(replace(request, partial=first), Completion([8, 9], [-0.25] * 2, "abort", 4))
    third = with_partial(replace(request, partial=second), Completion([10], [-0.125], "stop", 9))
    assert third.token_versions == [3, 3, 3, 4, 4, 9]
    assert (third.policy_version, third.last_policy_version) == (3, 9)
    same = with_partial(replace(request, partial=first), Completion([8], [-0.25], "stop", 3))
    assert same.version_runs == ()
    assert same.token_versions == [3] * 4
    assert Completion([], [], "abort", 3).token_versions == []
    packed = PackedCompletions.pack([first, third]).unpack()
    assert packed == [first, third]
    sent = PackedRequests.pack([replace(request, partial=second)]).unpack()[0].partial
    assert sent is not None
    assert sent.version_runs == ((3, 3), (4, 2))
    assert RecordedCompletion.from_plain(RecordedCompletion(2, "key", third).to_plain()) == RecordedCompletion(
        2, "key", third
    )


# ---- stopping and going on ---------------------------------------------------------------------------------------


def single_turns(**agent: Any) -> AgentLoopRunner:
    given = {"default_agent_loop": "single_turn_agent", **agent}
    return AgentLoopRunner(config(agent=given, response_length=40), TOKENIZER)


def test_a_sample_stopped_several_times_has_all_versions() -> None:
    rows = rows_of(8)
    steps = [Ticking(version) for version in range(5)]
    trajectories = carried(single_turns(), rows, steps)
    several = 0
    for seed, trajectory in enumerate(trajectories):
        output = trajectory.trajectory.last
        count = length_of(seed, 40)
        assert output.response_ids == [token_of(seed, place) for place in range(count)]
        assert output.token_versions == sorted(output.token_versions or [])
        expected = [log_prob_of(version, place) for place, version in enumerate(output.token_versions or [])]
        assert output.log_probs == pytest.approx(expected)
        several += len(set(output.token_versions or [])) > 2
    assert several, "some samples must have been stopped twice"
    assert sum(step.sampled for step in steps) == sum(length_of(seed, 40) for seed in range(8)), "nothing is lost"


def test_groups_that_must_be_complete_are_waited_for_and_others_are_not_begun() -> None:
    lengths = [length_of(seed, 40) for seed in range(8)]
    longest = lengths.index(max(lengths))
    waited_for = [number // 2 == longest // 2 for number in range(8)]
    cut = CutOff(waited_for, 2, 1)
    got = asyncio.run(single_turns().run(rows_of(8), Ticking(), cut=cut))
    assert got[longest].unfinished is None
    few = asyncio.run(single_turns(max_concurrent=2).run(rows_of(8), Ticking(), cut=CutOff([False] * 8, 2, 1)))
    begun = [trajectory for trajectory in few if trajectory.unfinished is None or trajectory.unfinished]
    assert len(begun) < 8
    assert [trajectory.unfinished for trajectory in few].count([]) == 8 - len(begun)
    with pytest.raises(RolloutError, match="7 rows are no whole number of groups of 2"):
        CutOff([False] * 7, 2, 1)


def test_no_row_is_begun_when_enough_are_complete_already() -> None:
    rows = [replace(one, ended=number < 2) for number, one in enumerate(rows_of(4))]
    engine = Ticking()
    got = asyncio.run(single_turns().run(rows, engine, cut=CutOff([False] * 4, 2, 1)))
    assert engine.sampled == 0
    assert [trajectory.unfinished for trajectory in got] == [None, None, [], []]


def test_a_slow_tool_is_not_waited_for_and_is_released() -> None:
    released = []

    @function_tool("nap")
    async def nap(seconds: float) -> str:
        """Sleep."""
        await asyncio.sleep(seconds)
        return "woken"

    class Held(type(nap)):  # type: ignore[misc]
        async def release(self, instance_id: str, **kwargs: Any) -> None:
            released.append(instance_id)

    call = '<tool_call>{"name": "nap", "arguments": {"seconds": 30}}</tool_call><|end|>'

    class Script(Scripted):
        async def abort(self, request_ids: Sequence[str] | None = None) -> None:
            raise AssertionError("no request is on its way")

    def script(text: str) -> str:
        return call if "slow" in text and "<|tool|>" not in text else "ok<|end|>"

    runner = AgentLoopRunner(config(), TOKENIZER, tools={"nap": Held(nap.function, "nap")})
    rows = [row("slow", "slow"), row("fast", "fast")]
    started = time.monotonic()
    got = asyncio.run(runner.run(rows, Script(script, seconds=0.01), cut=CutOff([False, False], 1, 1)))
    assert time.monotonic() - started < 5
    assert "slow" in released
    assert got[1].unfinished is None
    (done,) = got[0].unfinished or ()
    assert TOKENIZER.decode(done["token_ids"]) == call, "the turn before the tool is kept"


def test_a_tool_that_answers_differently_the_second_time_is_answered_afresh() -> None:
    calls = iter(range(100))

    @function_tool("count")
    def count() -> str:
        """Count."""
        return f"number {next(calls)}"

    slow = {"on": True}

    class Script(Scripted):
        """The second turn hangs until it is aborted, the first time."""

        async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
            text = TOKENIZER.decode(request.prompt_ids)
            if slow["on"] and "<|tool|>" in text and session == "slow":
                self.requests.append(request)
                while slow["on"]:
                    await asyncio.sleep(0.01)
                return Completion([20, 21], [-0.1, -0.2], "abort", 1)
            if session == "fast":
                await asyncio.sleep(0.5)
            return await super().generate(request, session=session)

        async def abort(self, request_ids: Sequence[str] | None = None) -> None:
            slow["on"] = False

    def script(text: str) -> str:
        if "<|tool|>" in text:
            return "after " + text[text.rindex("number") :][:8] + "<|end|>"
        return '<tool_call>{"name": "count", "arguments": {}}</tool_call><|end|>' if "slow" in text else "ok<|end|>"

    runner = AgentLoopRunner(config(), TOKENIZER, tools={"count": count})
    rows = [row("slow", "slow"), row("fast", "fast")]
    generator = Script(script, seconds=0.05)
    got = asyncio.run(runner.run(rows, generator, cut=CutOff([False, False], 1, 1)))
    assert [done["finish_reason"] for done in got[0].unfinished or ()] == ["stop", "abort"]
    asked = len(generator.requests)
    again = asyncio.run(runner.run(going_on(rows, got), generator, cut=CutOff([False, False], 1, 2)))
    assert TOKENIZER.decode(again[0].trajectory.last.response_ids).endswith("after number 1<|end|>")
    assert "number 0" not in TOKENIZER.decode(again[0].trajectory.last.response_ids)
    assert again[0].info["counts"]["replays_diverged"] == 1
    assert len(generator.requests) == asked + 1, "the first turn is played back, the second sampled"
    assert generator.requests[-1].partial is None


def test_a_loop_that_hides_that_it_was_stopped_is_stopped_all_the_same() -> None:
    class Hiding(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            try:
                completion = await self.generate(kwargs["raw_prompt_ids"], sampling_params)
            except Exception:  # what a careless loop does
                completion = Completion([1], [0.0], "stop")
            return AgentLoopOutput([1], completion.token_ids, [1] * len(completion.token_ids), completion.log_probs)

    AGENT_LOOPS._items.pop("hiding", None)
    register("hiding")(Hiding)
    rows = rows_of(8, agent_name="hiding")
    got = asyncio.run(single_turns().run(rows, Ticking(), cut=CutOff([False] * 8, 1, 1)))
    lengths = [length_of(seed, 40) for seed in range(8)]
    for length, trajectory in zip(lengths, got, strict=True):
        if length == min(lengths):
            assert trajectory.unfinished is None
        elif length > min(lengths) + 2:  # a token or two may come before the requests have ended
            assert trajectory.unfinished


def test_a_loop_that_does_not_end_when_stopped_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    if not monkeypatched:  # the end of the event loop is respected
                        raise

    AGENT_LOOPS._items.pop("stubborn", None)
    register("stubborn")(Stubborn)
    monkeypatched = [True]
    monkeypatch.setattr("verl.agent_loop.partial_rollouts._GRACE_S", 0.2)
    rows = [*rows_of(1, agent_name="stubborn"), *rows_of(1)]

    async def run() -> list[Sample]:
        got = await single_turns().run(rows, Ticking(), cut=CutOff([False] * 2, 1, 1))
        monkeypatched.clear()
        return got

    started = time.monotonic()
    stubborn, other = asyncio.run(run())
    assert time.monotonic() - started < 10
    assert stubborn.unfinished == []
    assert other.unfinished is None
    assert "it is left to itself" in caplog.text


def test_requests_that_cannot_be_ended_are_an_error() -> None:
    class Unstoppable(Ticking):
        async def abort(self, request_ids: Sequence[str] | None = None) -> None:
            raise RolloutError("the server is gone")

    with pytest.raises(RolloutError, match="the server is gone"):
        asyncio.run(single_turns().run(rows_of(8), Unstoppable(), cut=CutOff([False] * 8, 1, 1)))


def test_two_generations_at_the_same_time_are_both_kept() -> None:
    class Twice(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            prompt = kwargs["raw_prompt_ids"]
            one, other = await asyncio.gather(*(self.generate(prompt, sampling_params) for _ in range(2)))
            ids = [*one.token_ids, *other.token_ids]
            versions = [*one.token_versions, *other.token_versions]
            return AgentLoopOutput(
                prompt, ids, [1] * len(ids), [*one.log_probs, *other.log_probs], token_versions=versions
            )

    AGENT_LOOPS._items.pop("twice_at_once", None)
    register("twice_at_once")(Twice)
    rows = rows_of(6, agent_name="twice_at_once")
    whole = asyncio.run(single_turns().run(rows, Ticking()))
    pieces = carried(single_turns(), rows, [Ticking(version) for version in range(4)])
    for one, other in zip(whole, pieces, strict=True):
        assert one.trajectory.last.response_ids == other.trajectory.last.response_ids
        assert all(v < 4 for v in other.trajectory.last.token_versions or [])


# ---- with a real engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tiny_model_dir: str) -> list[Any]:
    """Three policies, a step apart."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    out = [policy]
    torch.manual_seed(3)
    for _ in range(2):
        policy = copy.deepcopy(policy)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        out.append(policy)
    return out


class Short(EngineGenerator):
    """Turns end after a number of tokens that depends on their seed."""

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        sampling = request.sampling
        limit = min(sampling.max_tokens, 4 + (sampling.seed or 0) % 37)
        return await super().generate(replace(request, sampling=replace(sampling, max_tokens=limit)), session=session)


def engines(model_dir: str, models: Sequence[Any]) -> Any:
    """The same engine, with the weights of one model after the other."""
    engine = HFRolloutEngine(ModelConfig(path=model_dir), config(dtype="float32"), device="cpu")

    async def load(version: int, model: Any) -> None:
        await engine.begin_update(version)
        await engine.load(model.state_dict(keep_vars=True).items())
        await engine.end_update()

    for version, model in enumerate(models):
        asyncio.run(load(version, model))
        yield Short(engine)


class Steps:
    """The engines as a sequence that is made as it is used."""

    def __init__(self, made: Any, count: int) -> None:
        self.made, self.count = made, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(self.made)


@torch.no_grad()
@pytest.mark.parametrize("loop", ["single_turn_agent", "tool_agent"])
def test_log_probs_of_carried_rows_are_those_of_the_recorded_weights(
    tiny_model_dir: str, models: list[Any], loop: str
) -> None:
    limits = {"format": "every_turn_here", "max_assistant_turns": 3, "enable": loop == "tool_agent"}
    made = config(multi_turn=limits, agent={"default_agent_loop": loop}, response_length=120)
    runner = AgentLoopRunner(made, load_tokenizer(tiny_model_dir), tools={"echo": echo})
    rows = rows_of(8)
    trajectories = carried(runner, rows, Steps(engines(tiny_model_dir, models), 3), group_size=2)  # type: ignore[arg-type]
    mixed = 0
    for trajectory in trajectories:
        output = trajectory.trajectory.last
        ids = torch.tensor([output.prompt_ids + output.response_ids])
        fresh = [model(input_ids=ids).logits[0].float().log_softmax(-1) for model in models]
        start = len(output.prompt_ids)
        assert output.token_versions is not None
        assert output.log_probs is not None
        for column, version in enumerate(output.token_versions):
            if not output.response_mask[column]:
                assert version == -1
                continue
            expected = fresh[version][start + column - 1, output.response_ids[column]].item()
            assert abs(expected - output.log_probs[column]) < 1e-4
        mixed += len({version for version in output.token_versions if version >= 0}) > 1
    assert mixed, "some rows must have tokens of several policies"


def test_under_the_same_weights_a_carried_sample_is_the_uninterrupted_one(
    tiny_model_dir: str, models: list[Any]
) -> None:
    made = config(agent={"default_agent_loop": "single_turn_agent"}, response_length=120)
    runner = AgentLoopRunner(made, load_tokenizer(tiny_model_dir))
    rows = rows_of(8)
    (engine,) = engines(tiny_model_dir, models[:1])
    whole = asyncio.run(runner.run(rows, engine))
    pieces = carried(runner, rows, [engine] * 4, group_size=2)
    for one, other in zip(whole, pieces, strict=True):
        assert one.trajectory.last.response_ids == other.trajectory.last.response_ids
        assert one.trajectory.last.log_probs == pytest.approx(other.trajectory.last.log_probs, abs=1e-4)

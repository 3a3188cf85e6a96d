"""Agents that are programs with OpenAI's own client: what they say becomes one training row."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, AutoModelForCausalLM

from tests.agent_loop.script import TOKENIZER, Script, Scripted, config, ids_of, row, text_of
from tests.agent_loop.script import run as run_rows
from tests.fixtures.tiny import make_tokenizer
from verl.agent_loop import EngineGenerator, proxy_server, proxy_session
from verl.agent_loop.batch import Row
from verl.agent_loop.metrics import agent_metrics
from verl.agent_loop.runner import AgentLoopRunner
from verl.config import AgentConfig, ModelConfig
from verl.config.multi_turn import OpenAIAgentConfig
from verl.errors import ConfigError
from verl.tools.parsers import PARSERS
from verl.trajectories import Sample
from verl.utils.dynamic_import import load_module
from verl.utils.tokenizer import load_tokenizer
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import Completion, GenerationRequest

openai = pytest.importorskip("openai", reason="the package openai is not installed (requirements/dev.txt)")
pytest.importorskip("aiohttp", reason="the package aiohttp is not installed (requirements/dev.txt)")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
Agent = Callable[[str, str, dict[str, Any]], Any]
_numbers = itertools.count()


class Programs:
    """Agent functions, as the files that users have them in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def runner(self, program: Agent, tokenizer: Any = TOKENIZER, **settings: Any) -> AgentLoopRunner:
        """A runner whose agent is ``program``."""
        path = self.directory / f"agent_{next(_numbers)}.py"
        path.write_text("run = None\n")
        load_module(str(path)).run = program  # type: ignore[attr-defined]
        limits = {"timeout_s": 20.0, **settings.pop("agent", {}), "openai_agent": OpenAIAgentConfig(path=str(path))}
        return AgentLoopRunner(config(agent=limits, **settings), tokenizer)

    def run(
        self, program: Agent, script: Script | Scripted, rows: Sequence[Row] | None = None, **settings: Any
    ) -> list[Sample]:
        """Run rows, one if none are given."""
        return run_rows(self.runner(program, **settings), script, rows)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def one(*messages: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": message} for message in messages]


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    answer = await client.chat.completions.create(model="any-name", messages=messages, **more)
    return answer.choices[0]


def sum_with_tool(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """A program of the ordinary kind, blocking."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = list(row["raw_prompt"])
    while True:
        message = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return 1.0 if message.content == "it is 5" else 0.0
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})


def test_a_blocking_program_with_tools(programs: Programs) -> None:
    said = f"let me see {CALL}<|end|>"
    script = Scripted(lambda text: "it is 5<|end|>" if "<|tool|>5" in text else said)
    (trajectory,) = programs.run(sum_with_tool, script)
    output = trajectory.trajectory.last
    assert trajectory.aborted is None
    assert text_of(trajectory) == f"{said}<|tool|>5<|end|><|assistant|>it is 5<|end|>"
    given = len(ids_of("<|tool|>5<|end|><|assistant|>"))
    assert output.response_mask == [1] * len(ids_of(said)) + [0] * given + [1] * len(ids_of("it is 5<|end|>"))
    assert output.log_probs == [-0.1 if mask else 0.0 for mask in output.response_mask]
    assert trajectory.trajectory.score == 1.0
    assert trajectory.trajectory.num_turns == 4
    assert output.policy_versions == (4, 4)
    assert script.requests[0].sampling.seed == 5
    assert len({request.sampling.seed for request in script.requests}) == 2
    assert script.requests[1].prompt_ids == output.prompt_ids + output.response_ids[: len(ids_of(said)) + given]
    assert len(set(script.sessions)) == 1


def test_the_prompt_shows_the_tools(programs: Programs) -> None:
    shown = TOKENIZER.apply_chat_template(
        one("go"), tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    (trajectory,) = programs.run(sum_with_tool, lambda text: "no<|end|>")
    assert trajectory.trajectory.last.prompt_ids == shown
    assert trajectory.trajectory.score == 0.0


def test_many_at_a_time_and_streams(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = list(row["raw_prompt"])
            for _ in range(3):
                stream = await client.chat.completions.create(
                    model="m", messages=messages, stream=True, tools=TOOLS, stream_options={"include_usage": True}
                )
                text, calls, usage = "", [], None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        calls += choice.delta.tool_calls or []
                assert usage is not None
                assert usage.completion_tokens == len(ids_of(f"so {CALL}<|end|>"))
                answered = [{"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls]
                messages.append({"role": "assistant", "content": text, "tool_calls": answered})
                messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": row["extra_info"]["say"]})
            return {"reward": 0.5, "calls": len(messages) // 2}

    rows = [row(str(i), content=f"{i}", extra_info={"say": f"r{i}"}) for i in range(12)]
    trajectories = programs.run(agent, Scripted(lambda text: f"so {CALL}<|end|>", seconds=0.01), rows)
    for number, trajectory in enumerate(trajectories):
        delta = f"<|tool|>r{number}<|end|><|assistant|>"
        assert trajectory.aborted is None, trajectory.info
        assert text_of(trajectory) == delta.join([f"so {CALL}<|end|>"] * 3)
        assert (trajectory.trajectory.score, trajectory.info["calls"]) == (0.5, 3.0)


def test_an_agent_of_a_framework(programs: Programs) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed (requirements/dev.txt)")

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        own = agents.Agent(name="sums", instructions="Do sums.", tools=[add], model=model)
        quiet = agents.RunConfig(tracing_disabled=True)
        result = await agents.Runner.run(own, row["raw_prompt"][-1]["content"], run_config=quiet)
        return float(result.final_output == "it is 5")

    said = f"{CALL}<|end|>"
    (trajectory,) = programs.run(agent, lambda text: "it is 5<|end|>" if "<|tool|>5" in text else said)
    assert trajectory.aborted is None, trajectory.info
    assert text_of(trajectory) == f"{said}<|tool|>5<|end|><|assistant|>it is 5<|end|>"
    assert trajectory.trajectory.score == 1.0


def test_a_reward_over_http(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        await ask(openai.AsyncOpenAI(base_url=base_url, api_key=api_key), row["raw_prompt"])
        for reward in (0.25, 0.75):
            head = {"Authorization": f"Bearer {api_key}"}
            post = urllib.request.Request(f"{base_url}/reward", json.dumps({"reward": reward}).encode(), head)
            await asyncio.to_thread(lambda: urllib.request.urlopen(post, timeout=10).close())  # noqa: B023

    (trajectory,) = programs.run(agent, lambda text: "ok<|end|>")
    assert trajectory.trajectory.score == 0.75


def test_without_a_reward_the_reward_function_decides(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        await ask(openai.AsyncOpenAI(base_url=base_url, api_key=api_key), row["raw_prompt"])

    (trajectory,) = programs.run(agent, lambda text: "ok<|end|>")
    assert trajectory.aborted is None
    assert trajectory.trajectory.score is None


REWRITES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "the model's words": lambda m: [m[0], {"role": "assistant", "content": "I said else"}, *one("more")],
    "the prompt": lambda m: [*one("other"), m[1], *one("more")],
    "dropped": lambda m: one("more"),
    "nothing new": lambda m: m,
    "words put in its mouth": lambda m: [*m, {"role": "assistant", "content": "x"}, *one("more")],
}


@pytest.mark.parametrize("kind", REWRITES)
def test_a_rewritten_history_is_refused(programs: Programs, kind: str) -> None:
    told: list[str] = []

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        first = await ask(client, row["raw_prompt"])
        try:
            said = {"role": "assistant", "content": first.message.content}
            await ask(client, REWRITES[kind]([*row["raw_prompt"], said]))
        except openai.BadRequestError as error:
            told.append(str(error))
        return 1.0

    (trajectory,) = programs.run(agent, lambda text: "ok<|end|>")
    assert "a request must repeat the conversation so far and add to it" in told[0]
    assert trajectory.aborted == "history_rewrite"  # also when the agent does not mind
    assert "agent/aborted/history_rewrite" in agent_metrics([trajectory.info])


def test_a_rewritten_history_is_kept_as_sampled_where_the_run_says_so(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await ask(client, row["raw_prompt"])
        await ask(client, [*row["raw_prompt"], {"role": "assistant", "content": "k"}, *one("more")])

    (trajectory,) = programs.run(agent, lambda text: "ok<|end|>", multi_turn={"on_history_rewrite": "append"})
    assert text_of(trajectory) == "ok<|end|><|user|>more<|end|><|assistant|>ok<|end|>"
    assert trajectory.info["counts"] == {"history_rewrites": 1}


def test_a_rewritten_history_begins_another_row_where_the_run_says_so(programs: Programs) -> None:
    """A program that sums up what was said, with other tools, and one that begins another conversation."""

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = list(row["raw_prompt"])
        first = await ask(client, messages)
        said = {"role": "assistant", "content": first.message.content}
        await ask(client, [*messages, said, *one("more")])
        await ask(client, [*one("in short")], tools=TOOLS)
        await ask(client, [*messages, {"role": "assistant", "content": "k"}, *one("else")])
        return 1.0

    script = Scripted(lambda text: "ok<|end|>")
    (trajectory,) = programs.run(agent, script, multi_turn={"on_history_rewrite": "fork"})
    assert trajectory.aborted is None, trajectory.info
    rows = trajectory.trajectory.segments
    assert len(rows) == 3
    said = ids_of("ok<|end|>")
    trained = []
    for output in rows:
        context = output.prompt_ids + output.response_ids
        start = len(output.prompt_ids)
        for place, mask in enumerate(output.response_mask):
            if mask and not (place and output.response_mask[place - 1]):
                trained.append((context[: start + place], context[start + place : start + place + len(said)]))
    assert trained == [(request.prompt_ids, said) for request in script.requests], "what the model saw, and wrote, once"
    assert "in short" in TOKENIZER.decode(rows[1].prompt_ids + rows[1].response_ids)
    assert text_of(trajectory).endswith("k<|end|><|user|>else<|end|><|assistant|>ok<|end|>")
    assert trajectory.info["counts"] == {"history_rewrites": 1, "forked_rows": 2}


def test_the_runs_own_sampling_is_used_which_is_said_once(
    programs: Programs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_session, "_told", set())

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await ask(client, row["raw_prompt"], temperature=0.2, top_p=1.0, max_tokens=7)

    script = Scripted(lambda text: "ok<|end|>")
    programs.run(agent, script, [row("a"), row("b")])
    assert [(r.sampling.temperature, r.sampling.max_tokens) for r in script.requests] == [(1.0, 7)] * 2
    assert caplog.text.count("an agent asks for temperature=0.2") == 1
    assert "top_p" not in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tools": [{"type": "function"}]}, "must be a list of function schemas"),
        ({"n": 2}, "a trajectory has one continuation"),
        ({"extra_body": {"stop_token_ids": [3]}}, "turns end where the run says"),
        ({"response_format": {"type": "json_object"}}, "is not served here"),
    ],
)
def test_what_cannot_be_recorded_is_refused(programs: Programs, more: dict[str, Any], message: str) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        with pytest.raises(openai.APIStatusError, match=message):
            await ask(client, row["raw_prompt"], **more)
        await ask(client, row["raw_prompt"])  # and does no harm

    (trajectory,) = programs.run(agent, lambda text: "ok<|end|>")
    assert trajectory.aborted is None


def test_a_stop_text_ends_the_turn_where_it_stands(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        choice = await ask(client, row["raw_prompt"], stop=["Observation:"])
        assert (choice.message.content, choice.finish_reason) == ("act ", "stop")
        said = {"role": "assistant", "content": choice.message.content}
        await ask(client, [*row["raw_prompt"], said, *one("Observation: 3")])

    told = "act Observation: I guess 7<|end|>"
    (trajectory,) = programs.run(agent, lambda text: "fine<|end|>" if "Observation: 3" in text else told)
    assert text_of(trajectory).startswith("act Observation:<|end|><|user|>Observation: 3<|end|><|assistant|>")
    sampled = len(ids_of("act Observation:"))
    assert trajectory.trajectory.last.response_mask[: sampled + 1] == [1] * sampled + [0]


async def endless(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    """Ask until it is cut off, and say what came."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["raw_prompt"])
    reasons = row["extra_info"]["reasons"]
    while not reasons or reasons[-1] != "length":
        choice = await ask(client, messages)
        reasons.append(choice.finish_reason)
        messages += [{"role": "assistant", "content": choice.message.content}, *one("more")]
    with pytest.raises(openai.BadRequestError, match="used up its turns or tokens"):
        await ask(client, messages)
    return {"reward": 1}


@pytest.mark.parametrize("limit", [{"multi_turn": {"max_assistant_turns": 3}}, {"response_length": 40}])
def test_turns_and_tokens_run_out(programs: Programs, limit: dict[str, Any]) -> None:
    reasons: list[str] = []
    (trajectory,) = programs.run(endless, lambda text: "ok<|end|>", [row(extra_info={"reasons": reasons})], **limit)
    assert trajectory.aborted is None, trajectory.info
    assert trajectory.info["counts"] == {"truncated": 1}
    assert reasons[-1] == "length"
    assert text_of(trajectory).endswith("<|assistant|>ok<|end|>")
    assert len(trajectory.trajectory.last.response_ids) <= 40 or len(reasons) == 4


def test_an_agent_that_does_not_know_limits_ends_with_what_it_has(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = list(row["raw_prompt"])
        await client.post("/reward", body={"reward": 0.5}, cast_to=object)
        while True:
            choice = await ask(client, messages)
            messages += [{"role": "assistant", "content": choice.message.content}, *one("more")]

    (trajectory,) = programs.run(agent, lambda text: "ok<|end|>", multi_turn={"max_assistant_turns": 2})
    assert trajectory.aborted is None, trajectory.info
    assert trajectory.info["counts"] == {"truncated": 1}
    assert text_of(trajectory) == "ok<|end|><|user|>more<|end|><|assistant|>ok<|end|>"
    assert trajectory.trajectory.score == 0.5


def test_agents_that_raise_hang_or_do_nothing(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> Any:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        kind = row["extra_info"]["kind"]
        if kind == "idle":
            return 1.0
        await ask(client, row["raw_prompt"])
        if kind == "raise":
            raise ValueError("oh no")
        if kind == "hang":
            await asyncio.sleep(60)
        return {"nan": float("nan"), "fine": 2.0}[kind]

    kinds = ["fine", "raise", "hang", "idle", "nan"]
    rows = [row(kind, extra_info={"kind": kind}) for kind in kinds]
    started = time.monotonic()
    trajectories = programs.run(agent, lambda text: "ok<|end|>", rows, agent={"timeout_s": 4.0})
    assert time.monotonic() - started < 15
    assert [t.aborted for t in trajectories] == [None, "exception", "timeout", "rollout", "score"]
    assert "ValueError: oh no" in trajectories[1].info["error"]
    assert trajectories[1].trajectory.last.response_ids == []


def test_a_blocking_agent_that_hangs_is_left_behind(programs: Programs) -> None:
    (trajectory,) = programs.run(lambda *_: time.sleep(8), lambda text: "ok<|end|>", agent={"timeout_s": 0.3})
    assert trajectory.aborted == "timeout"


def test_a_generation_that_fails_is_the_reason(programs: Programs) -> None:
    (trajectory,) = programs.run(sum_with_tool, lambda text: Completion([5], [0.0], "abort"))
    assert trajectory.aborted == "generation_aborted"


def test_calls_that_are_none_and_calls_that_are_not_wanted(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        unwanted = await ask(client, row["raw_prompt"], tools=TOOLS, tool_choice="none")
        assert unwanted.message.tool_calls is None
        assert unwanted.message.content == CALL
        messages = [*row["raw_prompt"], unwanted.message, *one("bad")]
        broken = await ask(client, messages, tools=TOOLS)
        assert (broken.message.tool_calls, broken.message.content) == (None, "<tool_call>{</tool_call>")
        answer = {"role": "tool", "tool_call_id": "made-up", "content": "5"}
        with pytest.raises(openai.BadRequestError, match="'made-up' is no call of the turn before; it made none"):
            await ask(client, [*messages, broken.message, answer], tools=TOOLS)

    said = lambda text: "<tool_call>{</tool_call><|end|>" if "bad" in text else f"{CALL}<|end|>"  # noqa: E731
    (trajectory,) = programs.run(agent, said)
    assert trajectory.aborted is None, trajectory.info
    assert trajectory.info["counts"] == {"tool_failures/malformed_call": 1}


def test_calls_whose_marks_are_special_tokens(programs: Programs) -> None:
    tokenizer = make_tokenizer(4096)
    marks = PARSERS["deepseek"].marks
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    begin, end, opened, closed, separator = marks
    said = f'so{begin}{opened}add{separator}{{"a": 2, "b": 3}}{closed}{end}<|end|>'

    class Special(Scripted):
        async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
            answered = "<|tool|>5" in tokenizer.decode(request.prompt_ids)
            ids = tokenizer("it is 5<|end|>" if answered else said, add_special_tokens=False)["input_ids"]
            return Completion(ids, [-0.1] * len(ids), "stop", 4)

    runner = programs.runner(sum_with_tool, tokenizer, multi_turn={"format": "deepseek"})
    (trajectory,) = run_rows(runner, Special(lambda text: ""))
    assert trajectory.aborted is None
    assert trajectory.trajectory.score == 1.0
    assert tokenizer.decode(trajectory.trajectory.last.response_ids).startswith(said)


def test_what_is_being_sampled_is_given_up_with_its_trajectory(programs: Programs) -> None:
    ended: list[str] = []

    class Slow(Scripted):
        async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
            try:
                return await super().generate(request, session=session)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    started = time.monotonic()
    (trajectory,) = programs.run(sum_with_tool, Slow(lambda text: "ok<|end|>", seconds=30), agent={"timeout_s": 2.0})
    assert trajectory.aborted == "timeout"
    assert ended == ["cancelled"]
    assert time.monotonic() - started < 10


def test_a_client_that_gives_up_and_tries_again_gets_the_one_answer(programs: Programs) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=0.5, max_retries=5)
        assert (await ask(client, row["raw_prompt"])).message.content == "ok"

    script = Scripted(lambda text: "ok<|end|>", seconds=1.2)
    (trajectory,) = programs.run(agent, script)
    assert trajectory.aborted is None, trajectory.info
    assert len(script.requests) == 1
    assert text_of(trajectory) == "ok<|end|>"


def test_a_key_is_good_for_its_own_trajectory_while_that_lasts(programs: Programs) -> None:
    seen: list[tuple[str, str]] = []

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        for _, old in seen:
            with pytest.raises(openai.AuthenticationError, match="no trajectory in progress has this key"):
                await ask(openai.AsyncOpenAI(base_url=base_url, api_key=old), row["raw_prompt"])
        seen.append((base_url, api_key))
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        assert [model.id async for model in await client.models.list()] == ["policy"]
        await ask(client, row["raw_prompt"])

    trajectories = programs.run(agent, lambda text: "ok<|end|>", [row("a"), row("b")], agent={"max_concurrent": 1})
    assert [trajectory.aborted for trajectory in trajectories] == [None, None]
    assert len({key for _, key in seen}) == 2


def test_a_wrong_agent_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("def run(url): ...\n")
    made = lambda **agent: AgentLoopRunner(config(agent=agent), TOKENIZER)  # noqa: E731
    with pytest.raises(ConfigError, match=r"cannot be called as run\(base_url, api_key, row\)"):
        made(openai_agent=OpenAIAgentConfig(path=str(path)), timeout_s=5.0)
    with pytest.raises(ConfigError, match="has no 'go'; it defines run"):
        made(openai_agent=OpenAIAgentConfig(path=str(path), name="go"), timeout_s=5.0)
    problems = list(AgentConfig(openai_agent=OpenAIAgentConfig(path=str(path))).problems())
    assert problems == [f"openai_agent.path={path}: an agent may hang, which nothing would end; set agent.timeout_s"]
    (problem,) = AgentConfig(default_agent_loop="openai_agent").problems()
    assert "set agent.openai_agent.path" in problem


@torch.no_grad()
def test_rows_have_the_sampled_ids_and_log_probs(programs: Programs, tiny_model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    engine = HFRolloutEngine(ModelConfig(path=tiny_model_dir), config(dtype="float32"), device="cpu")
    sampled: dict[int, list[int]] = {}

    async def load() -> None:
        await engine.begin_update(3)
        await engine.load(model.state_dict(keep_vars=True).items())
        await engine.end_update()

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = list(row["raw_prompt"])
        for turn in range(3):
            choice = await ask(client, messages, max_tokens=12, extra_body={"return_token_ids": True})
            sampled.setdefault(row["sample_index"], []).extend(choice.model_extra["token_ids"])
            messages += [{"role": "assistant", "content": choice.message.content}, *one(f"{turn}<|end|>")]

    asyncio.run(load())
    rows = [Row(str(i), {"temperature": 1.0, "seed": i}, row(content=f"{i}", sample_index=i).fields) for i in range(4)]
    runner = programs.runner(agent, load_tokenizer(tiny_model_dir))
    for number, trajectory in enumerate(asyncio.run(runner.run(rows, EngineGenerator(engine)))):
        output = trajectory.trajectory.last
        assert trajectory.aborted is None, trajectory.info
        own = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
        assert own == sampled[number]
        assert output.response_mask.count(0) > 10
        log_probs = model(input_ids=torch.tensor([output.prompt_ids + output.response_ids])).logits[0].log_softmax(-1)
        start = len(output.prompt_ids)
        for column, mask in enumerate(output.response_mask):
            if mask:
                fresh = log_probs[start + column - 1, output.response_ids[column]].item()
                assert output.log_probs is not None
                assert abs(fresh - output.log_probs[column]) < 1e-4


def test_nothing_listens_any_more() -> None:
    assert proxy_server._servers == {}

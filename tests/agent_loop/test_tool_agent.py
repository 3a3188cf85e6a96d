"""The model and its tools by turns, within limits."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.agent_loop.script import TOKENIZER, Scripted, config, ids_of, row, run, text_of
from verl.agent_loop.runner import AgentLoopRunner
from verl.errors import ConfigError, DataError
from verl.tools import ToolResponse, function_tool


@function_tool("add")
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@function_tool("wait")
async def wait(seconds: float) -> Any:
    """Wait, and be paid for it."""
    import asyncio

    await asyncio.sleep(seconds)
    return ToolResponse(text="done"), 0.5, {}


TOOLS = {"add": add, "wait": wait}


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def once(first: str, then: str = "ok<|end|>") -> Any:
    """Say ``first``, and ``then`` as soon as a tool has answered."""
    return lambda text: then if "<|tool|>" in text else first


def runner(**multi_turn: Any) -> AgentLoopRunner:
    return AgentLoopRunner(config(multi_turn=multi_turn), TOKENIZER, tools=TOOLS)


def test_a_call_its_answer_and_the_models_last_word() -> None:
    said = f"{call(a=2, b=3)}<|end|>"
    (trajectory,) = run(runner(), once(said))
    output = trajectory.trajectory.last
    assert text_of(trajectory) == f"{said}<|tool|>5<|end|><|assistant|>ok<|end|>"
    given = ids_of("<|tool|>5<|end|><|assistant|>")
    assert output.response_mask == [1] * len(ids_of(said)) + [0] * len(given) + [1, 1, 1]
    assert output.log_probs == [-0.1 if mask else 0.0 for mask in output.response_mask]
    assert trajectory.trajectory.num_turns == 4
    assert output.policy_versions == (4, 4)
    assert len(trajectory.trajectory.columns["state_hashes"]) == 2
    assert trajectory.aborted is None


def test_the_model_goes_on_from_its_own_tokens_with_a_stream_for_each_turn() -> None:
    generator = Scripted(once(f"{call(a=2, b=3)}<|end|>"))
    (trajectory,) = run(runner(), generator)
    first, second = generator.requests
    output = trajectory.trajectory.last
    assert second.prompt_ids == [*output.prompt_ids, *output.response_ids[:-3]]
    assert first.sampling.seed == 5
    assert second.sampling.seed not in (None, 5)
    assert first.sampling.max_tokens == 600
    assert second.sampling.max_tokens == 600 - len(output.response_ids) + 3
    assert generator.sessions == ["one", "one"]
    assert first.request_id != second.request_id


def test_calls_of_a_turn_run_at_the_same_time_in_their_order() -> None:
    said = call("wait", seconds=0.4) + call(a=1, b=1) + call("wait", seconds=0.4) + "<|end|>"
    started = time.monotonic()
    (trajectory,) = run(runner(max_parallel_calls=3), once(said))
    assert time.monotonic() - started < 0.75
    assert "<|tool|>done<|end|><|tool|>2<|end|><|tool|>done<|end|>" in text_of(trajectory)
    assert trajectory.info["tool_seconds"].keys() == {"wait", "add"}


def test_calls_beyond_the_limits_are_answered_and_counted() -> None:
    (trajectory,) = run(runner(max_parallel_calls=1), once(call(a=1, b=1) + call(a=2, b=2) + "<|end|>"))
    assert "<|tool|>2<|end|><|tool|>Error: at most 1 call(s) in one turn" in text_of(trajectory)
    assert trajectory.info["counts"] == {"tool_failures/too_many_calls": 1}
    (trajectory,) = run(runner(max_tool_calls=1, max_assistant_turns=3), lambda text: f"{call(a=1, b=1)}<|end|>")
    assert text_of(trajectory).count("all 1 tool calls of this conversation are used up") == 1


@pytest.mark.parametrize(
    ("said", "answer", "failure"),
    [
        ('<tool_call>{"name": "add", </tool_call>', "Error: the call is not valid JSON", "malformed_call"),
        (call("sub", a=1), "Error: there is no tool 'sub'; the tools are add, wait", "unknown_tool"),
        (call(a=1), "Error: add needs the parameter 'b'", "bad_arguments"),
        (call(a=1, b="x"), "Error: TypeError: ", "exception"),
    ],
)
def test_wrong_calls_are_told_to_the_model(said: str, answer: str, failure: str) -> None:
    (trajectory,) = run(runner(), once(f"{said}<|end|>"))
    assert f"<|tool|>{answer}" in text_of(trajectory)
    assert text_of(trajectory).endswith("<|assistant|>ok<|end|>")
    assert trajectory.info["counts"] == {f"tool_failures/{failure}": 1}
    assert trajectory.aborted is None


def test_limits_on_turns() -> None:
    for_ever = f"{call(a=1, b=1)}<|end|>"
    for limits, turns in (({"max_assistant_turns": 3}, 3), ({"max_user_turns": 2}, 3), ({"max_user_turns": 1}, 2)):
        (trajectory,) = run(runner(**limits), lambda text: for_ever)
        assert text_of(trajectory).count("<tool_call>") == turns
        assert trajectory.trajectory.last.response_mask[-1] == 1  # it ends with the model's turn


def test_an_agent_that_never_stops_ends_with_the_response_length() -> None:
    (trajectory,) = run(runner(), lambda text: f"{call(a=1, b=1)}<|end|>")
    assert len(trajectory.trajectory.last.response_ids) <= 600
    assert trajectory.info["counts"].get("truncated", 0) == 1 or trajectory.trajectory.last.response_mask[-1] == 1
    (cut,) = run(runner(), lambda text: "x" * 700)
    assert len(cut.trajectory.last.response_ids) == 600


def test_a_long_answer_is_cut_and_one_that_does_not_fit_left_out() -> None:
    @function_tool("add")
    def talk(a: int) -> str:
        """Talk."""
        return "y" * a

    limits = {"max_tool_response_length": 1000, "tool_response_truncate_side": "right"}
    one = AgentLoopRunner(config(multi_turn=limits), TOKENIZER, tools={"add": talk})
    (trajectory,) = run(one, once(f"{call(a=2000)}<|end|>"))
    assert text_of(trajectory) == f"{call(a=2000)}<|end|>"
    assert trajectory.info["counts"] == {"truncated": 1}
    limits["max_tool_response_length"] = 10
    one = AgentLoopRunner(config(multi_turn=limits), TOKENIZER, tools={"add": talk})
    (trajectory,) = run(one, once(f"{call(a=2000)}<|end|>"))
    assert f"<|tool|>{'y' * 10}(truncated)...<|end|>" in text_of(trajectory)


def test_rewards_of_tools_are_reported_or_added() -> None:
    said = once(f"{call('wait', seconds=0)}<|end|>")
    (trajectory,) = run(runner(), said)
    assert trajectory.trajectory.columns["tool_rewards"] == {"turns": [0.5, 0.0], "trajectory": {}}
    assert "turn_scores" not in trajectory.trajectory.columns
    (trajectory,) = run(runner(tool_rewards="add"), said)
    assert trajectory.trajectory.turn_scores == [0.5, 0.0]


def test_a_row_may_choose_among_the_tools() -> None:
    chosen = row(extra_info={"tool_selection": ["wait"]})
    (trajectory,) = run(runner(), once(f"{call(a=1, b=1)}<|end|>"), [chosen])
    assert "there is no tool 'add'; the tools are wait" in text_of(trajectory)
    (trajectory,) = run(runner(), once("x"), [row(extra_info={"tool_selection": ["wiat"]})])
    assert trajectory.aborted == "data"
    assert "names ['wiat']; the tools are add, wait" in trajectory.info["error"]


def test_tools_are_described_in_the_prompt_of_the_template() -> None:
    from tests.agent_loop.chat_templates import chat_tokenizer

    tokenizer = chat_tokenizer("qwen2.5")
    one = AgentLoopRunner(config(prompt_length=2000), tokenizer, tools=TOOLS)

    class Ends(Scripted):
        async def generate(self, request: Any, *, session: str | None = None) -> Any:
            from verl.workers.rollout.types import Completion

            self.requests.append(request)
            return Completion([tokenizer.eos_token_id], [0.0], "stop")

    generator = Ends(lambda text: "")
    run(one, generator)
    prompt = tokenizer.decode(generator.requests[0].prompt_ids)
    assert '"name": "add"' in prompt
    assert '"name": "wait"' in prompt
    small = AgentLoopRunner(config(prompt_length=50), tokenizer, tools=TOOLS)
    (trajectory,) = run(small, generator)
    assert "tokens with its 2 tool description(s), more than data.max_prompt_length" in trajectory.info["error"]


def test_what_would_fail_in_every_trajectory_fails_at_the_start() -> None:
    with pytest.raises(ConfigError, match="unknown tool-call format 'hermse'; did you mean 'hermes'"):
        runner(format="hermse")
    from tests.fixtures.tiny import make_tokenizer

    plain = make_tokenizer()
    plain.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        AgentLoopRunner(config(), plain, tools=TOOLS)


def test_gpt_oss_answers_are_rendered_by_the_format() -> None:
    said = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|end|>'
    script = lambda text: "fine<|end|>" if "functions.add to=assistant" in text else said  # noqa: E731
    (trajectory,) = run(runner(format="gpt-oss"), script)
    expected = f'{said}<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    assert text_of(trajectory) == f"{expected}fine<|end|>"

"""Trajectories of a batch side by side: limits, failures, records, and the batch that comes of them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.agent_loop import script
from tests.agent_loop.script import TOKENIZER, Scripted, config, row, run
from verl.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.base import AGENT_LOOPS
from verl.agent_loop.batch import rows_from_batch
from verl.agent_loop.metrics import agent_metrics
from verl.agent_loop.runner import AgentLoopRunner
from verl.data.collate import object_array
from verl.errors import ConfigError, DataError, RolloutError
from verl.protocol import DataProto
from verl.tools import function_tool
from verl.trainer.ppo.glossary import undocumented
from verl.trajectories import Sample
from verl.trajectories.batch import ROW_FIELDS, Layout, from_envelope, stop_if_too_many_failed, to_envelope
from verl.workers.rollout.types import Completion


@function_tool("nap")
async def nap(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "woken"


CALL = '<tool_call>{"name": "nap", "arguments": {"seconds": 0.3}}</tool_call><|end|>'


def sleeper(text: str) -> str:
    return "ok<|end|>" if "<|tool|>" in text else CALL


def runner(agent: dict[str, Any] | None = None, **multi_turn: Any) -> AgentLoopRunner:
    return AgentLoopRunner(config(agent=agent, multi_turn=multi_turn), TOKENIZER, tools={"nap": nap})


def test_tools_of_all_trajectories_wait_at_the_same_time() -> None:
    started = time.monotonic()
    trajectories = run(runner(), sleeper, [row(str(i)) for i in range(16)])
    assert time.monotonic() - started < 2.0  # one after the other they would take 4.8 s
    assert all(trajectory.aborted is None for trajectory in trajectories)


def test_at_most_so_many_are_in_progress() -> None:
    running, most = 0, 0

    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return AgentLoopOutput([1], [2], [1], [0.0])

    _known("counting", Loop)
    run(runner({"max_concurrent": 3}), sleeper, [row(str(i), agent_name="counting") for i in range(10)])
    assert most == 3


def _known(name: str, cls: type) -> None:
    AGENT_LOOPS._items.pop(name, None)
    register(name)(cls)


def test_a_failing_sample_is_an_aborted_row_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    def script(text: str) -> Any:
        if "bad" in text:
            return ValueError("oh no")
        if "gone" in text:
            return Completion([5], [0.0], "abort")
        return "ok<|end|>"

    rows = [row(str(i), content) for i, content in enumerate(("fine", "bad", "gone", "good", "nice"))]
    trajectories = run(runner(), script, rows)
    assert [t.aborted for t in trajectories] == [None, "exception", "generation_aborted", None, None]
    assert trajectories[1].trajectory.last.response_ids == []
    assert trajectories[1].trajectory.last.prompt_ids == rows[1].fields["raw_prompt_ids"]
    assert "trajectory 1 was aborted (exception): ValueError: oh no" in caplog.text


def test_too_many_failures_are_an_error_that_shows_the_first() -> None:
    def script(text: str) -> Any:
        return ValueError("oh no") if "bad" in text else "ok<|end|>"

    rows = [row("0", "bad"), row("1", "bad"), row("2", "fine")]
    infos = [trajectory.info for trajectory in run(runner(), script, rows)]
    message = r"2 of 3 trajectories were aborted \(exception: 2\)[\s\S]*ValueError: oh no"
    with pytest.raises(RolloutError, match=message):
        stop_if_too_many_failed(infos, 0.5)
    stop_if_too_many_failed(infos, 0.7)
    with pytest.raises(RolloutError, match="2 of 2 trajectories"):  # nothing is left to learn from
        stop_if_too_many_failed(infos[:2], 1.0)


def test_a_trajectory_beyond_its_time_is_aborted_and_its_tools_are_released() -> None:
    released = []

    class Held(type(nap)):  # type: ignore[misc]
        async def release(self, instance_id: str, **kwargs: Any) -> None:
            released.append(instance_id)

    held = Held(nap.function, "nap")
    slow = CALL.replace("0.3", "30")
    rows = [row("slow", "slow"), row("fast", "fast")]
    one = AgentLoopRunner(config(agent={"timeout_s": 0.5}), TOKENIZER, tools={"nap": held})
    started = time.monotonic()
    trajectories = run(one, lambda text: slow if "slow" in text and "<|tool|>" not in text else "ok<|end|>", rows)
    assert time.monotonic() - started < 5
    assert [t.aborted for t in trajectories] == ["timeout", None]
    assert released == ["slow"]


def test_loops_of_a_file_take_settings_and_rows_choose_them(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput\n"
        "class Echo(AgentLoopBase):\n"
        "    def __init__(self, context, *, word):\n"
        "        super().__init__(context)\n"
        "        self.word = word\n"
        "    async def run(self, sampling_params, **kwargs):\n"
        "        ids = self.tokenizer(self.word)['input_ids']\n"
        "        return AgentLoopOutput(kwargs['raw_prompt_ids'], ids, [1] * len(ids), [0.0] * len(ids),\n"
        "                               reward_score=1.0, metrics={'words': 1}, extra_fields={'said': self.word})\n"
    )
    file = tmp_path / "loops.yaml"
    file.write_text(f"- name: echo\n  _target_: {tmp_path / 'loops.py'}:Echo\n  word: hi\n")
    one = runner({"agent_loop_config_path": str(file)})
    echoed, plain = run(one, lambda text: "ok<|end|>", [row("a", agent_name="echo"), row("b")])
    assert TOKENIZER.decode(echoed.trajectory.last.response_ids) == "hi"
    assert TOKENIZER.decode(plain.trajectory.last.response_ids) == "ok<|end|>"
    with pytest.raises(ConfigError, match="unknown agent loop 'ecoh'"):
        run(one, lambda text: "", [row(agent_name="ecoh")])
    file.write_text("- name: echo\n")
    with pytest.raises(ConfigError, match="it needs name and _target_"):
        runner({"agent_loop_config_path": str(file)})
    with pytest.raises(ConfigError, match=r"agent_loop_config_path=.*none.yaml: cannot be read"):
        runner({"agent_loop_config_path": str(tmp_path / "none.yaml")})


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned NoneType"),
        (AgentLoopOutput([1], [2], [1]), "no response_logprobs"),
        (AgentLoopOutput([1], [2] * 601, [1] * 601, [0.0] * 601), "601 response tokens, more than"),
    ],
)
def test_what_a_loop_returns_is_checked(output: Any, message: str) -> None:
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            return output

    _known("odd", Loop)
    (trajectory,) = run(runner(), sleeper, [row(agent_name="odd")])
    assert trajectory.aborted == "rollout"
    assert message in trajectory.info["error"]


def test_traces_tell_turns_calls_times_and_tokens(tmp_path: Path) -> None:
    one = runner({"trace_dir": str(tmp_path)})
    run(one, sleeper, [row("first", uid="u1", sample_index=7)], step=3)
    run(one, lambda text: ValueError("x") if "bad" in text else "ok<|end|>", [row("2", "bad"), row("3")])
    records = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["session"] == "first")
    assert (first["uid"], first["step"], first["sample_index"], first["agent"]) == ("u1", 3, 7, "ToolAgentLoop")
    assert [event["kind"] for event in first["events"]] == ["generate", "tool", "generate"]
    assert first["events"][1]["name"] == "nap"
    assert 0.3 <= first["events"][1]["seconds"] < 3
    assert first["events"][2]["details"]["tokens"] == 3
    assert first["sampled_tokens"] < first["response_tokens"]
    assert first["response"].endswith("ok<|end|>")
    failed = next(record for record in records if record["session"] == "2")
    assert failed["aborted"] == "exception"
    assert "ValueError: x" in failed["error"]


def test_traces_become_spans() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    run(runner({"opentelemetry": True}), sleeper, [row("first", uid="u1")])
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["generate model", "tool nap", "generate model", "trajectory"]
    whole, call = spans[-1], spans[1]
    assert call.parent.span_id == whole.context.span_id
    assert whole.attributes["uid"] == "u1"
    assert 0.3e9 <= call.end_time - call.start_time < 3e9
    assert whole.start_time <= call.start_time <= call.end_time <= whole.end_time + 1e6


def trajectory(ids: list[int], mask: list[int], aborted: str | None = None, **fields: Any) -> Sample:
    output = AgentLoopOutput([7, 8], ids, mask, [-1.0 * m for m in mask], num_turns=2, **fields)
    info = {"seconds": 1.0, "generate_seconds": 0.5, "tool_seconds": {"nap": [0.1, 0.3]}, "counts": {}}
    return Sample([output.trajectory()], {**info, "aborted": aborted}, aborted)


def batch_of(*samples: Sample) -> DataProto:
    return script.batch_of(samples, prompt_length=3, response_length=5)


def test_the_batch_of_literal_trajectories() -> None:
    batch = batch_of(trajectory([1, 2, 3, 4], [1, 0, 0, 1]), trajectory([], [], "timeout"))
    tensors = batch.batch
    assert tensors["prompts"].tolist() == [[0, 7, 8]] * 2
    assert tensors["responses"].tolist() == [[1, 2, 3, 4, 0], [0] * 5]
    assert tensors["response_mask"].tolist() == [[1, 0, 0, 1, 0], [0] * 5]
    assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0]]
    assert tensors["position_ids"].tolist()[0] == [0, 0, 1, 2, 3, 4, 5, 5]
    assert tensors["rollout_log_probs"].tolist()[0] == [-1, 0, 0, -1, 0]
    assert tensors["aborted"].tolist() == [False, True]
    assert batch.non_tensor_batch["tool_call_counts"].tolist() == [2, 2]


def test_scores_of_turns_and_rows_find_their_tokens() -> None:
    first = trajectory([1, 2, 3, 4], [1, 1, 0, 1], reward_score=2.0, extra_fields={"turn_scores": [0.5, -1.0]})
    second = trajectory([1, 2], [1, 0], reward_score=3.0, extra_fields={"note": "x"})
    batch = batch_of(first, second, trajectory([], [], "timeout"))
    assert batch.batch["turn_scores"].tolist() == [[0, 0.5, 0, -1, 0], [0] * 5, [0] * 5]
    assert batch.batch["rm_scores"].tolist() == [[0, 0, 0, 2, 0], [3, 0, 0, 0, 0], [0] * 5]
    assert batch.non_tensor_batch["note"].tolist() == [None, "x", None]
    assert "__samples__" not in batch.non_tensor_batch


def test_rows_without_a_score_are_left_to_the_reward_function() -> None:
    first, second = trajectory([1], [1], reward_score=2.0), trajectory([1], [1])
    batch = batch_of(first, second, trajectory([], [], "timeout"))
    assert "rm_scores" not in batch.batch
    assert list(batch.non_tensor_batch["score_outcome"]) == [2.0, None, 0.0]


def test_parts_of_a_batch_join_whatever_their_loops_return() -> None:
    rich = trajectory([1], [1], reward_score=2.0, extra_fields={"turn_scores": [1.0], "note": 1})
    layout = Layout(3, 5, 0)
    parts = [to_envelope([sample], layout) for sample in (rich, trajectory([], [], "timeout"))]
    samples, same = from_envelope(DataProto.concat(parts))
    assert same == layout
    assert batch_of(*samples).batch["turn_scores"].sum() == 1


def test_fields_that_cannot_be_placed_are_refused() -> None:
    with pytest.raises(DataError, match="3 turn_scores for 2 turns"):
        batch_of(trajectory([1, 2, 3], [1, 0, 1], extra_fields={"turn_scores": [1, 2, 3]}))
    with pytest.raises(DataError, match="extra field 'uid', which the batch has already"):
        batch_of(trajectory([1], [1], extra_fields={"uid": "x"}))
    for later in ("advantages", "score_outcome", "reward_acc"):  # fields that the batch gets in a later stage
        with pytest.raises(DataError, match=f"{later!r}, which the batch has already or will have"):
            batch_of(trajectory([1], [1], extra_fields={later: "x"}))
    with pytest.raises(RolloutError, match="2 response_ids, 1 entries"):
        AgentLoopOutput([1], [2, 3], [1], [0.0])
    with pytest.raises(DataError, match="a prompt has 4 tokens, more than data.max_prompt_length=3"):
        batch_of(Sample([AgentLoopOutput([1] * 4, [], [], []).trajectory()]))


def test_rows_carry_their_columns_and_the_seeds_of_plain_generation() -> None:
    from verl.workers.rollout.batch import requests_from_batch

    tensors = {
        "input_ids": torch.tensor([[0, 1, 2], [3, 4, 5]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "sample_index": torch.tensor([8, 9]),
    }
    columns = {name: object_array([f"{name}0", f"{name}1"]) for name in (*ROW_FIELDS, "other")}
    batch = DataProto.from_dict(tensors, columns)
    rows = rows_from_batch(batch, config(), seed=1, step=2, validate=False)
    requests = requests_from_batch(batch, config(), seed=1, step=2, validate=False)
    assert [r.sampling_params["seed"] for r in rows] == [request.sampling.seed for request in requests]
    assert rows[0].fields["raw_prompt_ids"] == [1, 2]
    assert rows[1].fields["sample_index"] == 9
    assert rows[1].fields["agent_name"] == "agent_name1"
    assert "other" not in rows[1].fields


def test_metrics_are_counted_and_documented() -> None:
    info = trajectory([1], [1]).info | {"counts": {"tool_failures/timeout": 1, "truncated": 1}, "words": 3}
    gone = trajectory([], [], "timeout").info
    metrics = agent_metrics([info, gone])
    assert metrics["agent/aborted/timeout"] == 1
    assert metrics["agent/aborted_fraction"] == 0.5
    assert metrics["agent/tool_failures/timeout"] == 1
    assert metrics["agent/tool_failure_fraction"] == 0.25
    assert metrics["agent/tool_calls/nap"] == 4
    assert np.isclose(metrics["agent/tool_seconds/mean"], 0.2)
    assert metrics["agent/truncated"] == 1
    assert metrics["agent/reported/words"] == 3
    assert undocumented(metrics) == []
    assert agent_metrics([]) == {}


def test_the_part_of_the_time_without_generation_is_known() -> None:
    (trajectory,) = run(runner(), Scripted(sleeper, seconds=0.3))
    assert 0.2 < trajectory.info["engine_idle_fraction"] < 0.5  # 0.3 s of 0.9 s
    (busy,) = run(runner(), Scripted(lambda text: "ok<|end|>", seconds=0.3))
    assert busy.info["engine_idle_fraction"] < 0.2


def test_ids_of_prompts_are_used_where_no_tools_are() -> None:
    generator = Scripted(lambda text: "ok<|end|>")
    single = AgentLoopRunner(config(agent={"default_agent_loop": "single_turn_agent"}), TOKENIZER, tools={})
    run(single, generator, [row(raw_prompt_ids=[9, 9, 9])])
    assert generator.requests[0].prompt_ids == [9, 9, 9]

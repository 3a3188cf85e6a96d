"""Traces that cannot be written or sent cost no trajectory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.runner import AgentLoopRunner
from verl.agent_loop.trace import SpanExporter, Trace, TraceWriter
from verl.utils.telling import BOUNDARY


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    BOUNDARY.start()
    yield
    BOUNDARY.start()


def runner(writer: Any = None, spans: Any = None) -> Any:
    """As much of a runner as recording takes."""
    one = object.__new__(AgentLoopRunner)
    one.config = SimpleNamespace(agent=SimpleNamespace(trace_dir="traces"))  # type: ignore[assignment]
    one.tokenizer = SimpleNamespace(decode=lambda ids: "half \ud83d")  # type: ignore[assignment]
    one.writer, one.spans = writer, spans
    return one


def output() -> AgentLoopOutput:
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], num_turns=2, metrics={})


def test_a_trace_of_odd_text_is_one_valid_line(tmp_path: Path) -> None:
    trace = Trace("s\ud83d", {"uid": "a\u2028b"})
    trace.called("add", 0.0, None, arguments={"x": float("nan")})
    runner(TraceWriter(str(tmp_path), "w"))._record(trace, [output()], "")
    (line,) = (tmp_path / "w.jsonl").read_text("utf-8").splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["session"] == "s\ufffd"
    assert found["uid"] == "a\u2028b"
    assert found["response"] == "half \ufffd"
    assert found["events"][0]["details"]["arguments"] == {"x": "NaN"}
    assert trace.counts["trace_failures"] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_trace_alone(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path), "w")
    os.remove(writer.path)
    writer.path.symlink_to("/dev/full")
    one = runner(writer)
    for _ in range(2):
        trace = Trace("s")
        one._record(trace, [output()], "")
        assert trace.summary()["counts"] == {"trace_failures": 1}
    assert BOUNDARY.counts == {"traces": 2}


def test_spans_that_cannot_be_sent_cost_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry")

    class Down(SpanExporter):
        def export(self, trace: Trace) -> None:
            raise SystemExit(1)

    trace = Trace("s")
    runner(TraceWriter(str(tmp_path), "w"), Down())._record(trace, [output()], "")
    assert trace.counts["trace_failures"] == 1
    assert len((tmp_path / "w.jsonl").read_text().splitlines()) == 1


def test_spans_hold_valid_text() -> None:
    pytest.importorskip("opentelemetry")
    trace = Trace("s\ud83d", {"uid": "\udc00", "other": object()})
    trace.called("tool\ud83d", 0.0, "exception", text="\ud83d")
    SpanExporter().export(trace)

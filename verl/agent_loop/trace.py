"""A record of each trajectory: turns, tool calls, times, tokens and rewards; as JSONL and as OpenTelemetry spans."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.utils.fs import append_line, mend_lines
from verl.utils.json_text import dumps_json, valid_text
from verl.workers.rollout.types import Completion


@dataclass
class Event:
    """Something that took time.

    Attributes:
        kind: ``generate``, ``tool`` or ``interaction``.
        name: of the tool or interaction; ``model`` for a turn of the model.
        start: seconds since the epoch.
        seconds: how long it took.
        details: what else is known.
    """

    kind: str
    name: str
    start: float
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """What happened in one trajectory.

    Attributes:
        session: name of the trajectory.
        facts: about its row: uid, step, agent and so on.
        start: seconds since the epoch.
        events: in the order in which they ended.
        counts: failures and other things that are only counted, by name.
    """

    session: str
    facts: dict[str, Any] = field(default_factory=dict)
    start: float = field(default_factory=time.time)
    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    aborted: str | None = None

    def generated(self, started: float, prompt_tokens: int, completion: Completion) -> None:
        """Note a turn of the model that began at ``started``."""
        details = {
            "prompt_tokens": prompt_tokens,
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
        }
        self.events.append(Event("generate", "model", started, time.time() - started, details))

    def called(self, name: str, started: float, failure: str | None, **details: Any) -> None:
        """Note a tool call that began at ``started``; ``failure`` names what went wrong, if anything did."""
        details = {**details, **({"failure": failure} if failure else {})}
        self.events.append(Event("tool", name, started, time.time() - started, details))
        if failure:
            self.counts[f"tool_failures/{failure}"] += 1

    def interacted(self, name: str, started: float) -> None:
        """Note a call of a simulated user or environment that began at ``started``."""
        self.events.append(Event("interaction", name, started, time.time() - started))

    def count(self, name: str) -> None:
        """Count something."""
        self.counts[name] += 1

    def finish(self, aborted: str | None = None) -> None:
        """The trajectory has ended, for the reason ``aborted`` if it was given up."""
        self.seconds = time.time() - self.start
        self.aborted = aborted

    def summary(self) -> dict[str, Any]:
        """Numbers that metrics are made of; small, because they travel with the batch."""
        tools: dict[str, list[float]] = {}
        for event in self.events:
            if event.kind == "tool":
                tools.setdefault(event.name, []).append(event.seconds)
        return {
            "seconds": self.seconds,
            "generate_seconds": sum(event.seconds for event in self.events if event.kind == "generate"),
            "tool_seconds": tools,
            "counts": dict(self.counts),
            "aborted": self.aborted,
        }

    def record(self, **more: Any) -> dict[str, Any]:
        """The whole trace as plain values."""
        return {
            "session": self.session,
            **self.facts,
            "start": self.start,
            "seconds": self.seconds,
            "aborted": self.aborted,
            "events": [asdict(event) for event in self.events],
            "counts": dict(self.counts),
            **more,
        }


class TraceWriter:
    """Writes traces, one JSON object a line, to ``<directory>/<name>.jsonl``.

    Args:
        directory: created if missing.
        name: of the file; processes that write at the same time need names of their own.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.path = Path(directory) / f"{name}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mend_lines(self.path)
        except OSError as error:
            raise ConfigError(f"rollout.agent.trace_dir={directory}: cannot be written: {error}") from error
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record.

        Raises:
            OSError: the file takes no more.
        """
        line = dumps_json(record)
        with self._lock:
            append_line(self.path, line)


class SpanExporter:
    """Sends traces as OpenTelemetry spans: one for the trajectory, and one for each of its events below it.

    Where spans go is OpenTelemetry's own configuration (``OTEL_EXPORTER_OTLP_ENDPOINT`` and its like, or a provider
    that the program has set).

    Raises:
        ConfigError: the package ``opentelemetry-api`` is not installed.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigError(
                "rollout.agent.opentelemetry=True needs the package opentelemetry-sdk: pip install 'verl[tracing]'"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("verl.agent_loop")

    def export(self, trace: Trace) -> None:
        """Send the spans of a finished trajectory."""
        facts = _attributes(trace.facts)
        span = self._tracer.start_span(
            "trajectory",
            start_time=_nanoseconds(trace.start),
            attributes={"session": valid_text(trace.session), **facts, "aborted": trace.aborted or ""},
        )
        inside = self._trace.set_span_in_context(span)
        for event in trace.events:
            child = self._tracer.start_span(
                valid_text(f"{event.kind} {event.name}"),
                context=inside,
                start_time=_nanoseconds(event.start),
                attributes=_attributes(event.details),
            )
            child.end(_nanoseconds(event.start + event.seconds))
        span.end(_nanoseconds(trace.start + trace.seconds))


def _attributes(values: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """What a span can say: text and numbers."""
    plain = {key: valid_text(value) if isinstance(value, str) else value for key, value in values.items()}
    return {valid_text(key): value for key, value in plain.items() if isinstance(value, str | int | float | bool)}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

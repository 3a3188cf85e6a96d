"""Every call ends within its limits, and no failure of a tool gets out of the box."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from verl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, function_tool
from verl.tools.toolbox import ToolBox, ToolLimits, ToolResult, truncate


def box(*tools: BaseTool, limits: ToolLimits | None = None, **options: Any) -> ToolBox:
    return ToolBox({tool.name: tool for tool in tools}, limits or ToolLimits(), session="s", **options)


def call(*tools: BaseTool, limits: ToolLimits | None = None, **arguments: Any) -> ToolResult:
    return asyncio.run(box(*tools, limits=limits).call(tools[0].name, arguments))


class Counter(BaseTool):
    """Counts per trajectory, and remembers what was called."""

    def __init__(self, **config: Any) -> None:
        schema = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
        super().__init__(config, OpenAIFunctionToolSchema.model_validate(schema))
        self.log: list[Any] = []
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> Any:
        assert instance_id is not None
        self.log.append("create")
        await asyncio.sleep(0.01)
        self.counts[instance_id] = start
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], step: int = 1, **kwargs: Any) -> Any:
        self.counts[instance_id] += step
        return ToolResponse(text=str(self.counts[instance_id])), 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append("release")
        del self.counts[instance_id]


def test_state_belongs_to_the_trajectory() -> None:
    tool = Counter()
    kwargs = {"count": {"create_kwargs": {"start": 10}, "execute_kwargs": {"step": 5}}}

    async def run() -> Any:
        first, second = box(tool, tools_kwargs=kwargs), ToolBox({"count": tool}, ToolLimits(), session="other")
        results = await asyncio.gather(*(first.call("count", {}) for _ in range(3)), second.call("count", {}))
        rewards = await first.rewards(), await second.rewards()
        await first.close()
        await second.close()
        return [result.text for result in results], results[0].reward, rewards

    texts, reward, rewards = asyncio.run(run())
    assert texts == ["15", "20", "25", "1"]
    assert reward == 0.25
    assert rewards == ({"count": 25.0}, {"count": 1.0})
    assert tool.log == ["create", "create", "release", "release"]
    assert tool.counts == {}


def test_unused_tools_are_neither_created_nor_released() -> None:
    tool = Counter()

    async def run() -> dict[str, float]:
        unused = box(tool)
        rewards = await unused.rewards()
        await unused.close()
        return rewards

    assert asyncio.run(run()) == {}
    assert tool.log == []


@function_tool("take", timeout_s=0.2)
def take(what: str, other: int = 0) -> Any:
    """Misbehave."""
    if what == "raise":
        raise ValueError("no\x00way")
    if what == "exit":
        raise SystemExit(3)
    if what == "hang":
        time.sleep(1.5)
    if what == "large":
        return "x" * 10_000_000
    if what == "binary":
        return b"\x00\xff" * 1000
    if what == "surrogate":
        return "a\ud800b\x07c"
    if what == "object":
        return {1, 2}
    if what == "image":
        return ToolResponse(text="see", image=["picture"])
    return what


@pytest.mark.parametrize(
    ("what", "failure", "text"),
    [
        ("fine", None, "fine"),
        ("raise", "exception", "Error: ValueError: noway"),
        ("exit", "exception", "Error: SystemExit: 3"),
        ("hang", "timeout", "Error: take gave no answer within 0.2 s"),
        ("binary", "not_text", "Error: the answer is 2000 bytes of binary data, not text"),
        ("image", "not_text", "Error: the answer has images, and only text can be shown"),
        ("surrogate", None, "a?bc"),
        ("object", None, "[1, 2]"),
    ],
)
def test_each_misbehaviour_ends_in_an_answer(what: str, failure: str | None, text: str) -> None:
    started = time.monotonic()
    result = call(take, what=what)
    assert (result.failure, result.text) == (failure, text)
    assert time.monotonic() - started < 1.2  # a thread that hangs is not waited for


def test_ten_megabytes_are_cut() -> None:
    result = call(take, limits=ToolLimits(max_length=100, truncate_side="right"), what="large")
    assert result == ToolResult("x" * 100 + "(truncated)...")


def test_unknown_tools_and_wrong_arguments_are_told() -> None:
    notes: list[Any] = []

    async def run() -> list[ToolResult]:
        made = box(take, note=lambda name, started, failure, **details: notes.append((name, failure)))
        return [
            await made.call("tkae", {}),
            await made.call("take", {}),
            await made.call("take", {"what": "x", "who": "y"}),
        ]

    unknown, missing, extra = asyncio.run(run())
    assert unknown == ToolResult("Error: there is no tool 'tkae'; the tools are take", 0.0, "unknown_tool")
    assert missing == ToolResult("Error: take needs the parameter 'what'", 0.0, "bad_arguments")
    assert extra.text == "Error: take has no parameter 'who'; it takes what, other"
    assert notes == [("tkae", "unknown_tool"), ("take", "bad_arguments"), ("take", "bad_arguments")]


def test_failures_around_calls_are_contained() -> None:
    class Fragile(Counter):
        async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> Any:
            if start:
                raise RuntimeError("no room")
            self.counts[instance_id or ""] = 0
            return instance_id, ToolResponse()

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            raise RuntimeError("no reward")

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            raise RuntimeError("no release")

    notes: list[Any] = []

    async def run(**options: Any) -> tuple[ToolResult, dict[str, float]]:
        made = box(Fragile(), note=lambda name, started, failure, **details: notes.append(failure), **options)
        result = await made.call("count", {})
        rewards = await made.rewards()
        await made.close()
        return result, rewards

    assert asyncio.run(run()) == (ToolResult("1", 0.25), {})
    broken = asyncio.run(run(tools_kwargs={"count": {"create_kwargs": {"start": 1}}}))
    assert broken == (ToolResult("Error: RuntimeError: no room", 0.0, "exception"), {})
    assert notes == [None, "reward", "exception"]


def test_rates_and_places_are_shared_by_all_trajectories() -> None:
    running, most, starts = 0, 0, []

    @function_tool("slow", max_concurrent=2, max_rpm=1200)
    async def slow() -> str:
        """Wait."""
        nonlocal running, most
        starts.append(time.monotonic())
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.12)
        running -= 1
        return "ok"

    async def run() -> list[ToolResult]:
        limits = ToolLimits()
        boxes = [ToolBox({"slow": slow}, limits, session=str(i)) for i in range(6)]
        return await asyncio.gather(*(made.call("slow", {}) for made in boxes))

    assert {result.text for result in asyncio.run(run())} == {"ok"}
    assert most == 2
    assert starts[-1] - starts[0] >= 0.24  # 50 ms between starts, and three rounds of two


def test_waiting_for_a_place_does_not_count_against_the_time_limit() -> None:
    @function_tool("one", max_concurrent=1, timeout_s=0.4)
    async def one() -> str:
        """Wait."""
        await asyncio.sleep(0.25)
        return "ok"

    async def run() -> list[ToolResult]:
        made = box(one)
        return await asyncio.gather(*(made.call("one", {}) for _ in range(3)))

    assert [result.failure for result in asyncio.run(run())] == [None] * 3


def test_threads_that_hang_do_not_keep_the_process() -> None:
    call(take, what="hang")
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("verl-tool")]
    assert all(thread.daemon for thread in hanging)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "...(truncated)6789"),
        ("right", "0123(truncated)..."),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_the_named_side_is_left_out(side: str, expected: str) -> None:
    assert truncate("0123456789", 4, side) == expected
    assert truncate("0123", 4, side) == "0123"
    assert truncate("0123456789", 1, "middle") == "0...(truncated)..."

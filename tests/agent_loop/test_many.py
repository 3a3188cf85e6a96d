"""Two thousand trajectories at a time in one process: open files, threads and memory stay bounded."""

from __future__ import annotations

import asyncio
import threading
import time

import psutil

from tests.agent_loop.script import TOKENIZER, Scripted, batch_of, config, row
from verl.agent_loop.runner import AgentLoopRunner
from verl.tools import function_tool

COUNT = 2000


def test_two_thousand_trajectories_at_a_time() -> None:
    running = most = 0

    @function_tool("wait")
    async def wait(word: str) -> str:
        """Take a while."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1
        return f"{word} waited"

    @function_tool("block", max_concurrent=32)
    def block(word: str) -> str:
        """Block a thread for a while."""
        time.sleep(0.005)
        return f"{word} blocked"

    def script(text: str) -> str:
        for tool in ("wait", "block"):
            if f"{tool}ed" not in text:
                return f'<tool_call>{{"name": "{tool}", "arguments": {{"word": "w"}}}}</tool_call><|end|>'
        return "ok<|end|>"

    own = config(agent={"max_concurrent": COUNT}, multi_turn={"max_assistant_turns": 3}, response_length=400)
    runner = AgentLoopRunner(own, TOKENIZER, tools={"wait": wait, "block": block})
    rows = [row(str(number), content=f"{number}") for number in range(COUNT)]
    process = psutil.Process()
    files, threads, memory = process.num_fds(), threading.active_count(), process.memory_info().rss
    seen: list[tuple[int, int, int]] = []

    async def watched() -> list:
        async def watch() -> None:
            while True:
                seen.append((process.num_fds(), threading.active_count(), process.memory_info().rss))
                await asyncio.sleep(0.05)

        watching = asyncio.ensure_future(watch())
        try:
            return await asyncio.wait_for(runner.run(rows, Scripted(script, seconds=0.01)), 120)
        finally:
            watching.cancel()

    trajectories = asyncio.run(watched())
    most_files, most_threads, most_memory = (max(values) for values in zip(*seen, strict=True))
    assert [trajectory.aborted for trajectory in trajectories] == [None] * COUNT
    assert all(len(trajectory.info["tool_seconds"]) == 2 for trajectory in trajectories)
    assert most == COUNT, "all of them wait for the tool at the same time"
    # an event loop of its own opens a few files; a trajectory opens none
    assert most_files <= files + 20
    assert most_threads <= threads + 40
    assert threading.active_count() <= threads + 1
    assert process.num_fds() <= files + 1
    each = (most_memory - memory) / COUNT
    assert each < 250_000, f"{each:.0f} bytes for each trajectory"
    batch = batch_of(trajectories, prompt_length=400, response_length=400)
    assert len(batch) == COUNT

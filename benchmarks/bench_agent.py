"""Does generation wait for tools?

    python benchmarks/bench_agent.py --trajectories 64 --turns 3 --tool-seconds 0.5

runs the same trajectories of a tool agent on the built-in engine with a tool that answers at once and with one that
sleeps, and, for comparison, the usual loop that moves all trajectories one turn at a time: generate for all, then call
all tools in a few threads, then generate again. Prints seconds, the share of the time in which the engine had nothing
to do, and ratios, of which the first is the promise: at most 1.3 times the run without waiting plus one tool time for
each turn. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "quickstart"))

import torch
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from verl.agent_loop import EngineGenerator
from verl.agent_loop.batch import Row
from verl.agent_loop.runner import AgentLoopRunner
from verl.agent_loop.templating import ChatTemplater
from verl.config import ModelConfig, MultiTurnConfig, RolloutConfig
from verl.tools import function_tool
from verl.tools.parsers import ParsedTurn, ToolCall, ToolParser, register_parser
from verl.trajectories import Sample
from verl.utils.tokenizer import load_tokenizer
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import GenerationRequest, SamplingParams

TOOL_SECONDS = 0.0


@function_tool("lookup")
async def lookup(text: str) -> str:
    """Answer after a while."""
    await asyncio.sleep(TOOL_SECONDS)
    return "found"


@register_parser("every_turn")
class EveryTurnCalls(ToolParser):
    """A random model calls no tool; here everything it says is a call."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn("", [ToolCall("lookup", {"text": "x"})])


class FixedTurns(EngineGenerator):
    """Turns of one length, so that both loops generate the same number of tokens."""

    def __init__(self, engine: Any, tokens: int) -> None:
        super().__init__(engine)
        self.tokens = tokens

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Any:
        sampling = replace(request.sampling, max_tokens=self.tokens, ignore_eos=True)
        return await super().generate(replace(request, sampling=sampling), session=session)


def make_engine(directory: str, config: RolloutConfig) -> HFRolloutEngine:
    """The built-in engine with the weights of a small random model."""
    save_tiny_model(directory, hidden=128, layers=4, max_length=1024)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = HFRolloutEngine(ModelConfig(path=directory), config, device="cpu")

    async def load() -> None:
        await engine.begin_update(0)
        await engine.load(model.state_dict(keep_vars=True).items())
        await engine.end_update()

    asyncio.run(load())
    return engine


def agent_loops(runner: AgentLoopRunner, generator: FixedTurns, rows: list[Row]) -> tuple[float, float, int]:
    """Seconds, idle share of the engine and sampled tokens of agent loops."""
    started = time.perf_counter()
    done: list[Sample] = asyncio.run(runner.run(rows, generator))
    seconds = time.perf_counter() - started
    assert all(trajectory.aborted is None for trajectory in done)
    tokens = sum(sum(trajectory.trajectory.last.response_mask) for trajectory in done)
    return seconds, done[0].info["engine_idle_fraction"], tokens


def turn_by_turn(
    engine: HFRolloutEngine, templater: ChatTemplater, rows: list[Row], *, turns: int, tokens: int, threads: int
) -> tuple[float, float, int]:
    """The same of a loop in which everybody waits for the slowest of each turn."""
    started = time.perf_counter()
    busy, sampled = 0.0, 0
    contexts = [templater.prompt(row.fields["raw_prompt"]) for row in rows]
    answer = [{"role": "tool", "content": "found"}]
    for turn in range(turns):
        requests = [
            GenerationRequest(context, SamplingParams(tokens, seed=number * turns + turn, ignore_eos=True), f"{number}")
            for number, context in enumerate(contexts)
        ]
        begun = time.perf_counter()
        completions = asyncio.run(engine.generate_many(requests))
        busy += time.perf_counter() - begun
        sampled += sum(len(completion.token_ids) for completion in completions)
        if turn == turns - 1:
            break
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: time.sleep(TOOL_SECONDS), rows))
        for number, completion in enumerate(completions):
            more = templater.continuation(rows[number].fields["raw_prompt"], answer, completion.token_ids, ended=False)
            contexts[number] = contexts[number] + completion.token_ids + more.ids
    seconds = time.perf_counter() - started
    return seconds, 1 - busy / seconds, sampled


def main() -> None:
    global TOOL_SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3, help="turns of the model; a tool call between two of them")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a turn")
    parser.add_argument("--tool-seconds", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=8, help="of the turn-by-turn loop, for its tools")
    arguments = parser.parse_args()
    turns, waits = arguments.turns, arguments.turns - 1
    config = RolloutConfig(
        prompt_length=64,
        response_length=turns * (arguments.tokens + 32),
        dtype="float32",
        multi_turn=MultiTurnConfig(enable=True, format="every_turn", max_assistant_turns=turns),
    )
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(directory, config)
        tokenizer = load_tokenizer(directory)
        runner = AgentLoopRunner(config, tokenizer, tools={"lookup": lookup})
        rows = [
            Row(
                str(number),
                {"temperature": 1.0, "seed": number},
                {"raw_prompt": [{"role": "user", "content": f"question {number}"}], "raw_prompt_ids": [1]},
            )
            for number in range(arguments.trajectories)
        ]
        generator = FixedTurns(engine, arguments.tokens)
        agent_loops(runner, generator, rows[:4])  # warm up
        results = {}
        for name, seconds in (("no_wait", 0.0), ("wait", arguments.tool_seconds)):
            TOOL_SECONDS = seconds
            results[name] = agent_loops(runner, generator, rows)
        templater = ChatTemplater(tokenizer)
        options = {"turns": turns, "tokens": arguments.tokens, "threads": arguments.threads}
        results["turn_by_turn"] = turn_by_turn(engine, templater, rows, **options)
    bound = results["no_wait"][0] + waits * arguments.tool_seconds
    print(
        f"{arguments.trajectories} trajectories, {turns} turns of {arguments.tokens} tokens, "
        f"a tool of {arguments.tool_seconds} s"
    )
    for name, (seconds, idle, tokens) in results.items():
        print(f"{name:>14}: {seconds:6.2f} s, engine idle {idle:5.1%}, {tokens} tokens")
    result = {
        "seconds_no_wait": round(results["no_wait"][0], 3),
        "seconds_wait": round(results["wait"][0], 3),
        "seconds_turn_by_turn": round(results["turn_by_turn"][0], 3),
        "ratio_to_bound": round(results["wait"][0] / bound, 3),
        "within_1.3": results["wait"][0] <= 1.3 * bound,
        "speedup_over_turn_by_turn": round(results["turn_by_turn"][0] / results["wait"][0], 3),
        "idle_wait": round(results["wait"][1], 3),
        "idle_turn_by_turn": round(results["turn_by_turn"][1], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

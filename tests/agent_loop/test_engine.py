"""Agent loops on a real engine: the row is what was sampled, and its log-probabilities are the model's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agent_loop.script import config, row
from verl.agent_loop import EngineGenerator
from verl.agent_loop.batch import Row
from verl.agent_loop.runner import AgentLoopRunner
from verl.config import ModelConfig
from verl.tools import function_tool
from verl.tools.parsers import PARSERS, ParsedTurn, ToolCall, ToolParser, register_parser
from verl.utils.tokenizer import load_tokenizer
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import GenerationRequest, SamplingParams


@function_tool("echo")
def echo(text: str) -> str:
    """Repeat."""
    return f"<|end|>{text}"


class EveryTurnCalls(ToolParser):
    """A random model calls no tool; here everything it says is a call."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn("", [ToolCall("echo", {"text": text[:3]})])


@pytest.fixture(scope="module")
def model(tiny_model_dir: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(tiny_model_dir: str, model: Any) -> HFRolloutEngine:
    made = HFRolloutEngine(ModelConfig(path=tiny_model_dir), config(dtype="float32"), device="cpu")

    async def load() -> None:
        await made.begin_update(3)
        await made.load(model.state_dict(keep_vars=True).items())
        await made.end_update()

    asyncio.run(load())
    return made


@pytest.fixture(scope="module", autouse=True)
def every_turn() -> Any:
    register_parser("every_turn_of_the_engine")(EveryTurnCalls)
    yield
    PARSERS._items.pop("every_turn_of_the_engine")


@torch.no_grad()
def test_rows_have_the_sampled_ids_and_log_probs(engine: HFRolloutEngine, model: Any, tiny_model_dir: str) -> None:
    limits = {"format": "every_turn_of_the_engine", "max_assistant_turns": 4}
    runner = AgentLoopRunner(config(multi_turn=limits), load_tokenizer(tiny_model_dir), tools={"echo": echo})
    seen: list[tuple[list[int], list[int]]] = []

    class Watched(EngineGenerator):
        async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Any:
            short = GenerationRequest(
                request.prompt_ids,
                SamplingParams(
                    **{**{f: getattr(request.sampling, f) for f in ("seed", "temperature")}, "max_tokens": 12}
                ),
                request.request_id,
            )
            completion = await super().generate(short, session=session)
            seen.append((request.prompt_ids, completion.token_ids))
            return completion

    rows = [Row(str(i), {"temperature": 1.0, "seed": i}, row(content=f"{i}").fields) for i in range(6)]
    trajectories = asyncio.run(runner.run(rows, Watched(engine)))
    assert len(seen) == 6 * 4
    for trajectory in trajectories:
        output = trajectory.trajectory.last
        assert trajectory.aborted is None
        assert output.policy_versions == (3, 3)
        ids = torch.tensor([output.prompt_ids + output.response_ids])
        log_probs = model(input_ids=ids).logits[0].float().log_softmax(-1)
        start = len(output.prompt_ids)
        for column, mask in enumerate(output.response_mask):
            if mask:
                fresh = log_probs[start + column - 1, output.response_ids[column]].item()
                assert output.log_probs is not None
                assert abs(fresh - output.log_probs[column]) < 1e-4
        whole = output.prompt_ids + output.response_ids
        turns = [
            (prompt, said)
            for prompt, said in seen
            if prompt == whole[: len(prompt)] and prompt[:start] == whole[:start]
        ]
        assert len(turns) == 4
        for prompt, said in turns:
            assert whole[len(prompt) : len(prompt) + len(said)] == said
            place = len(prompt) - start
            assert output.response_mask[place : place + len(said)] == [1] * len(said)


def test_a_single_turn_is_plain_generation(engine: HFRolloutEngine, tiny_model_dir: str) -> None:
    runner = AgentLoopRunner(
        config(agent={"default_agent_loop": "single_turn_agent"}, response_length=20), load_tokenizer(tiny_model_dir)
    )
    rows = [Row(str(i), {"temperature": 1.0, "seed": i}, row(content=f"{i}").fields) for i in range(5)]
    trajectories = asyncio.run(runner.run(rows, EngineGenerator(engine)))
    requests = [
        GenerationRequest(r.fields["raw_prompt_ids"], SamplingParams(20, seed=i), str(i)) for i, r in enumerate(rows)
    ]
    completions = asyncio.run(engine.generate_many(requests))
    for trajectory, completion in zip(trajectories, completions, strict=True):
        assert trajectory.trajectory.last.response_ids == completion.token_ids
        assert trajectory.trajectory.last.log_probs == pytest.approx(completion.log_probs, abs=1e-5)

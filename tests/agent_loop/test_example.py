"""The agent quick start: what it is shown in fine-tuning is what it meets as an agent, token by token."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.agent_loop.script import TOKENIZER, config, row, run
from verl.agent_loop.runner import AgentLoopRunner
from verl.data.sft_dataset import conversation_tokens
from verl.tools.parsers import PARSERS


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"agent_example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example(repo_root: Path) -> Any:
    """The data maker and the calculator."""
    directory = repo_root / "examples" / "agent"
    PARSERS._items.pop("calculator", None)
    yield load(directory / "make_task.py"), load(directory / "calculator.py")
    PARSERS._items.pop("calculator")


def test_demonstrations_are_what_the_agent_meets(example: Any) -> None:
    task, calculator = example
    messages = task.demonstration((12, 34), True, random.Random(0))["messages"]
    ids, mask = conversation_tokens(TOKENIZER, messages)
    limits = {"format": "calculator", "max_assistant_turns": 2}
    runner = AgentLoopRunner(
        config(multi_turn=limits, response_length=32), TOKENIZER, tools={"calculator": calculator.calculator}
    )
    said = [f"{message['content']}<|end|>" for message in messages if message["role"] == "assistant"]
    (trajectory,) = run(runner, lambda text: said["<|tool|>" in text], [row(content=messages[0]["content"])])
    output = trajectory.trajectory.last
    assert output.prompt_ids + output.response_ids == ids
    assert [0] * len(output.prompt_ids) + output.response_mask == mask
    assert trajectory.info["counts"] == {}


@pytest.mark.parametrize("call", ["12+34", "12*", "<tool_call>", ""])
def test_wrong_calls_are_answered(example: Any, call: str) -> None:
    _, calculator = example
    runner = AgentLoopRunner(
        config(multi_turn={"format": "calculator"}), TOKENIZER, tools={"calculator": calculator.calculator}
    )
    script = lambda text: "ok<|end|>" if "<|tool|>" in text else f"<tool_call>{call}</tool_call><|end|>"  # noqa: E731
    (trajectory,) = run(runner, script)
    assert trajectory.info["counts"] == {"tool_failures/exception": 1}

"""What the page about agents shows works as it is printed there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.agent_loop.script import TOKENIZER, config, row, run, text_of
from verl.agent_loop.runner import AgentLoopRunner
from verl.config.multi_turn import MultiAgentConfig, OpenAIAgentConfig
from verl.tools.loading import load_tools
from verl.tools.parsers import PARSERS, ToolCall


@pytest.fixture
def page(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks of the page; those with a file's name in the first line lie in the working directory."""
    text = (repo_root / "docs" / "agents.md").read_text("utf-8")
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        if name := re.match(r"# (\w+\.(?:py|yaml))", block):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return blocks


def test_the_calculator_and_the_tool_file(page: list[str], tmp_path: Path) -> None:
    calculator = load_tools(None, "my_tools.py")["calculator"]
    description = calculator.tool_schema.for_template()["function"]["parameters"]["properties"]["expression"]
    assert description["description"] == "digits and operators, for example 17*23."
    (notebook,) = [block for block in page if "class Notebook" in block]
    (listing,) = [block for block in page if block.startswith("tools:")]
    Path("notebook.py").write_text(notebook)
    Path("tools.yaml").write_text(listing.replace("my_tools.py", "notebook.py"))
    tools = load_tools("tools.yaml")
    assert list(tools) == ["note", "python", "search"]
    call = json.dumps({"name": "note", "arguments": {"text": "x"}})
    one = AgentLoopRunner(config(), TOKENIZER, tools=tools)
    said = lambda text: "ok<|end|>" if "<|tool|>" in text else f"<tool_call>{call}</tool_call><|end|>"  # noqa: E731
    (trajectory,) = run(one, said, [row(tools_kwargs={"note": {"create_kwargs": {"first": "y"}}})])
    assert "<|tool|>noted<|end|>" in text_of(trajectory)
    assert trajectory.trajectory.columns["tool_rewards"]["trajectory"] == {"note": pytest.approx(0.2)}


def test_the_loop_and_the_format(page: list[str]) -> None:
    assert yaml.safe_load(Path("loops.yaml").read_text())[0]["question"] == "Are you sure?"
    one = AgentLoopRunner(config(agent={"agent_loop_config_path": "loops.yaml"}), TOKENIZER)
    (trajectory,) = run(one, lambda text: "yes", [row(agent_name="twice")])
    assert text_of(trajectory) == "yesAre you sure?yes"
    assert trajectory.trajectory.last.response_mask == [1] * 3 + [0] * 13 + [1] * 3
    (arrow,) = [block for block in page if "class Arrow" in block]
    exec(arrow, {})
    try:
        assert PARSERS["arrow"]().parse("mul -> 2*3").calls == [ToolCall("mul", {"expression": "2*3"})]
    finally:
        PARSERS._items.pop("arrow")


def test_the_program_behind_a_base_url(page: list[str]) -> None:
    pytest.importorskip("openai", reason="the package openai is not installed (requirements/dev.txt)")
    pytest.importorskip("aiohttp", reason="the package aiohttp is not installed (requirements/dev.txt)")
    agent = {"openai_agent": OpenAIAgentConfig(path="my_agent.py"), "timeout_s": 30.0}
    call = json.dumps({"name": "add", "arguments": {"a": 2, "b": 3}})
    said = lambda text: "it is 5<|end|>" if "<|tool|>5" in text else f"<tool_call>{call}</tool_call><|end|>"  # noqa: E731
    runner = AgentLoopRunner(config(agent=agent, multi_turn={"enable": False}), TOKENIZER)
    (trajectory,) = run(runner, said, [row(reward_model={"ground_truth": "5"})])
    assert trajectory.aborted is None
    assert trajectory.trajectory.score == 1.0
    assert text_of(trajectory).endswith("<|tool|>5<|end|><|assistant|>it is 5<|end|>")


def test_the_duel(page: list[str]) -> None:
    players = MultiAgentConfig(env="my_duel.py:Duel", players=["first", "second"])
    runner = AgentLoopRunner(config(agent={"multi_agent": players}), TOKENIZER)
    numbers = iter(("7", "4"))
    (trajectory,) = run(runner, lambda text: f"{next(numbers)}<|end|>")
    assert trajectory.trajectory.turn_scores == [1.0]
    assert trajectory.trajectories[1].turn_scores == [-1.0]


def test_environments_of_other_packages(page: list[str]) -> None:
    (listing,) = [block for block in page if "ReasoningGymEnv" in block]
    Path("worlds.yaml").write_text(listing)
    runner = AgentLoopRunner(config(multi_turn={"interaction_config_path": "worlds.yaml"}), TOKENIZER)
    assert list(runner.interactions) == ["sums", "number"]

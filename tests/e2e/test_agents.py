"""Training runs whose rows go through agent loops."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError, RolloutError
from verl.trainer.ppo.glossary import undocumented

pytestmark = pytest.mark.e2e

Run = Callable[..., list[dict[str, Any]]]
R = "actor_rollout_ref.rollout"
CLOCKS = re.compile(r"^(timing|perf/|weight_sync/)|^agent/(\w+_seconds|engine_idle_fraction)")

# a random model calls no tool: in this format everything that it says is a call
PLUGIN = '''
from verl.tools.parsers import PARSERS, ParsedTurn, ToolCall, ToolParser, register_parser
from verl.tools import ToolResponse, function_tool

@function_tool("echo")
def echo(text: str) -> object:
    """Repeat."""
    if "0" in text:
        raise ValueError("no zeros")
    return ToolResponse(text=text), 0.25, {}

if "every_turn" not in PARSERS:
    @register_parser("every_turn")
    class EveryTurn(ToolParser):
        def parse(self, text):
            return ParsedTurn("", [ToolCall("echo", {"text": text[:2]})])
'''


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a run with a tool."""
    (tmp_path / "agents_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return [
        "data.max_prompt_length=48",
        "data.max_response_length=64",
        "actor_rollout_ref.model.external_lib=agents_plugin",
        f"{R}.multi_turn.enable=True",
        f"{R}.multi_turn.format=every_turn",
        f"{R}.multi_turn.function_tool_path={tmp_path}/agents_plugin.py",
        f"{R}.multi_turn.max_assistant_turns=3",
        f"{R}.multi_turn.tool_rewards=add",
        f"{R}.multi_turn.max_tool_response_length=8",
        f"{R}.agent.trace_dir={tmp_path}/traces",
    ]


def test_a_tool_run_on_ray_with_two_workers(run_training: Run, agents: list[str], tmp_path: Path) -> None:
    rows = run_training(
        *agents,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        f"trainer.rollout_data_dir={tmp_path}/samples",
    )
    for row in rows:
        data = row["data"]
        assert undocumented(data) == []
        assert data["training/rollout_probs_diff_max"] < 1e-4  # the rows reproduce what was sampled
        assert data["num_turns/max"] == 6
        assert data["tool_call_counts/max"] == 2
        assert data["agent/tool_calls/echo"] > 0
        assert data["agent/aborted_fraction"] == 0.0
        assert data["actor/ppo_kl"] != 0.0
    traces = [json.loads(line) for file in (tmp_path / "traces").glob("rank*.jsonl") for line in file.open()]
    assert {trace["step"] for trace in traces if not trace["validate"]} == {1, 2}
    assert len({trace["session"] for trace in traces if trace["step"] == 1}) == 16
    sample = json.loads((tmp_path / "samples" / "1.jsonl").read_text().splitlines()[0])
    assert "<|tool|>" in sample["output"]


def test_gigpo_groups_steps_by_the_state_that_tools_show(run_training: Run, agents: list[str]) -> None:
    rows = run_training(
        *agents, "trainer.controller=local", "algorithm.adv_estimator=gigpo", "trainer.total_training_steps=1"
    )
    assert rows[0]["data"]["actor/grad_norm"] > 0


def test_a_single_turn_agent_trains_exactly_as_without_one(run_training: Run) -> None:
    plain = run_training("trainer.controller=local")
    agent = run_training("trainer.controller=local", f"{R}.agent.default_agent_loop=single_turn_agent")
    for one, other in zip(plain, agent, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/entropy"):
            assert one["data"][name] == pytest.approx(other["data"][name], rel=1e-5), name


def test_a_run_whose_trajectories_all_fail_says_why(run_training: Run, agents: list[str]) -> None:
    with pytest.raises(RolloutError, match="more than data.max_prompt_length=6; raise it"):
        run_training(*agents, "trainer.controller=local", "data.max_prompt_length=6", "data.truncation=left")


def test_wrong_settings_are_told_before_anything_starts(run_training: Run, agents: list[str]) -> None:
    with pytest.raises(ConfigError, match="unknown tool-call format 'hermse'"):
        run_training(*agents, f"{R}.multi_turn.format=hermse")
    with pytest.raises(ConfigError, match="unknown agent loop 'tool_agnet'"):
        run_training(*agents, f"{R}.agent.default_agent_loop=tool_agnet")
    with pytest.raises(ConfigError, match=r"tool_config_path=none.yaml: .*does not exist|missing"):
        run_training(*agents, f"{R}.multi_turn.tool_config_path=none.yaml")


def test_agent_loops_on_servers_make_the_trajectories_that_those_in_the_workers_make(
    run_training: Run, agents: list[str], tmp_path: Path
) -> None:
    cut = [*agents, "trainer.total_training_steps=1"]
    run_training(*cut, f"trainer.rollout_data_dir={tmp_path}/sync")
    served = [f"{R}.mode=async", f"{R}.num_replicas=2", f"{R}.agent.num_workers=2"]
    (row,) = run_training(*cut, *served, f"trainer.rollout_data_dir={tmp_path}/async")
    assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
    assert row["data"]["agent/aborted_fraction"] == 0.0
    expected, got = (
        [json.loads(line)["output"] for line in (tmp_path / kind / "1.jsonl").read_text().splitlines()]
        for kind in ("sync", "async")
    )
    assert got == expected
    traces = [json.loads(line) for file in (tmp_path / "traces").glob("agents*.jsonl") for line in file.open()]
    assert len({trace["session"] for trace in traces}) == 16


@pytest.mark.slow
def test_an_agent_run_repeats_bit_for_bit_whenever_its_tools_answer(
    run_training: Run, agents: list[str], tmp_path: Path
) -> None:
    """Requests arrive at the servers in another order in each run; one sequence at a time rounds alike."""
    slow = "import random, time\n\n" + PLUGIN.replace(
        "    return ToolResponse", "    time.sleep(random.SystemRandom().random() / 20)\n    return ToolResponse"
    )
    (tmp_path / "agents_plugin.py").write_text(slow)
    keys = [f"{R}.mode=async", f"{R}.num_replicas=2", f"{R}.agent.num_workers=2", f"{R}.max_num_seqs=1"]
    runs = [
        run_training(*agents, *keys, "trainer.deterministic=True", "trainer.total_training_steps=2") for _ in range(2)
    ]
    once, again = (
        [{name: value for name, value in row["data"].items() if not CLOCKS.search(name)} for row in rows]
        for rows in runs
    )
    assert any(name.startswith("rollout_corr/") for name in once[0])
    assert again == once


GAME = """
class Game:
    def reset(self, players, seed=None, options=None):
        self.turns = 0
        return "asks", "ask"

    def step(self, action):
        self.turns += 1
        digits = sum(character.isdigit() for character in action)
        reward = digits / 4 + len(action) / 16
        rewards = {"asks": reward} if self.turns % 2 else {"answers": -reward}
        return self.turns % 2, f"{self.turns}", rewards, self.turns == 4
"""


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_players_of_an_episode_are_trained_each_on_its_own_row(mode: str, run_training: Run, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    players = f"{R}.agent.multi_agent"
    rows = run_training(
        "data.max_prompt_length=48",
        "data.max_response_length=64",
        f"{R}.mode={mode}",
        f"{R}.agent.num_workers=3",
        f"{players}.env={tmp_path}/game.py:Game",
        f"{players}.players=[asks,answers]",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        f"trainer.rollout_data_dir={tmp_path}/samples",
    )
    for row in rows:
        data = row["data"]
        assert undocumented(data) == []
        assert data["training/rollout_probs_diff_max"] < 1e-4  # the rows reproduce what was sampled
        assert data["agent/aborted_fraction"] == 0.0
        assert data["agent/reported/score/asks"] > 0 > data["agent/reported/score/answers"]
        assert data["num_turns/max"] == 4
        assert data["actor/grad_norm"] > 0
    assert rows[-1]["data"]["val-core/digits/asks/reward/mean@1"] > 0
    assert rows[-1]["data"]["val-core/digits/answers/reward/mean@1"] < 0
    samples = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 8 * 2 * 2
    counts = Counter(sample["uid"] for sample in samples)
    assert set(counts.values()) == {2}
    assert {uid.partition("/")[2] for uid in counts} == {"asks", "answers"}


PROGRAM = """
from openai import OpenAI

def run(base_url, api_key, row):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["raw_prompt"])
    for word in ("again", "and again"):
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=12).choices[0]
        if answer.finish_reason == "length" and not answer.message.content:
            break
        messages += [answer.message, {"role": "user", "content": word}]
    return {"reward": sum(len(m.content) for m in messages if not isinstance(m, dict)) / 10, "messages": len(messages)}
"""


def test_a_program_is_trained_by_its_base_url(run_training: Run, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the package openai is not installed (requirements/dev.txt)")
    pytest.importorskip("aiohttp", reason="the package aiohttp is not installed (requirements/dev.txt)")
    (tmp_path / "program.py").write_text(PROGRAM)
    cut = ["trainer.controller=local", "data.max_prompt_length=48", "data.max_response_length=64"]
    program = f"{R}.agent.openai_agent.path={tmp_path}/program.py"
    with pytest.raises(ConfigError, match=r"set agent\.timeout_s"):
        run_training(*cut, program)
    rows = run_training(*cut, program, f"{R}.agent.timeout_s=60", "trainer.total_training_steps=2")
    for row in rows:
        data = row["data"]
        assert undocumented(data) == []
        assert data["training/rollout_probs_diff_max"] < 1e-4  # the rows reproduce what was sampled
        assert data["agent/aborted_fraction"] == 0.0
        assert data["agent/reported/messages"] == 5.0
        assert data["num_turns/max"] == 4
        assert data["critic/score/mean"] > 0
        assert data["actor/grad_norm"] > 0

"""Several players in one episode: each has its own tokens, rewards and group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agent_loop import script
from tests.agent_loop.script import TOKENIZER, config, row, run, text_of
from verl.agent_loop.metrics import agent_metrics
from verl.agent_loop.runner import AgentLoopRunner
from verl.config import RolloutConfig
from verl.config.base import find_problems
from verl.config.multi_turn import AgentConfig, MultiAgentConfig
from verl.errors import ConfigError
from verl.protocol import DataProto

WORLD = '''
import time

class Duel:
    """Two say digits by turns, for some rounds; each round the higher one wins."""

    def __init__(self, rounds=1, fault=None):
        self.rounds, self.fault = rounds, fault

    def reset(self, players, seed=None, options=None):
        self.players, self.bonus, self.said = players, seed or 0, []
        return "first", f"you are first of {len(players)}"

    def step(self, action):
        if self.fault == "raise":
            raise OSError("the board broke")
        if self.fault == "hang":
            time.sleep(2)
        if self.fault == "stranger":
            return "third", "", {}, False
        if self.fault == "early":  # before the second player has had a turn
            return None, "", {"first": 1.0}, True
        self.said.append(int(action) if action.isdigit() else -1)
        if len(self.said) % 2:
            return "second", f"the other has spoken, round {len(self.said) // 2 + 1}", {1: 0.25}, False
        won = (self.said[-2] > self.said[-1]) - (self.said[-2] < self.said[-1])
        rewards = {"first": won + self.bonus, "second": -won}
        return 0, f"now you are {won:+d}", rewards, len(self.said) >= 2 * self.rounds

class Patient(Duel):
    """The same, with coroutines, and closed at the end."""
    closed = 0

    async def reset(self, **kwargs):
        return super().reset(**kwargs)

    async def step(self, action):
        return super().step(action)

    def close(self):
        Patient.closed += 1
'''


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A runner whose rows are episodes of the world's class."""
    world = tmp_path / "world.py"
    world.write_text(WORLD)

    def build(
        name: str = "Duel", multi_turn: Any = None, rollout: Any = None, agent: Any = None, **settings: Any
    ) -> AgentLoopRunner:
        players = MultiAgentConfig(**{"env": f"{world}:{name}", "players": ["first", "second"], **settings})
        made = config(agent={"multi_agent": players, **(agent or {})}, multi_turn=multi_turn, **(rollout or {}))
        return AgentLoopRunner(made, TOKENIZER)

    return build


def say(text: str) -> str:
    """The first player says 3, the second 1."""
    return "3<|end|>" if "you are first" in text else "1<|end|>"


def batch_of(runner: AgentLoopRunner, trajectories: list[Any], uids: list[str]) -> DataProto:
    """What the trainer makes of trajectories."""
    return script.batch_of(trajectories, prompt_length=60, response_length=80, uids=uids)


def test_each_player_has_its_own_conversation_and_rewards(make: Any) -> None:
    runner = make(env_kwargs={"rounds": 2})
    (trajectory,) = run(runner, say, [row(interaction_kwargs={"seed": 7})])
    first, second = trajectory.trajectories
    assert TOKENIZER.decode(first.last.prompt_ids) == "<|user|>go\n\nyou are first of 2<|end|><|assistant|>"
    assert TOKENIZER.decode(second.last.prompt_ids) == (
        "<|user|>go\n\nthe other has spoken, round 1<|end|><|assistant|>"
    )
    assert text_of(trajectory) == "3<|end|><|user|>now you are +1<|end|><|assistant|>3<|end|>"
    assert TOKENIZER.decode(second.last.response_ids) == (
        "1<|end|><|user|>the other has spoken, round 2<|end|><|assistant|>1<|end|>"
    )
    # what the second earns before its first turn counts on that; later on the turn before
    assert first.turn_scores == [8.0, 8.0]
    assert second.turn_scores == [0.25 - 1 + 0.25, -1.0]
    assert trajectory.info["score/first"] == 16.0
    assert trajectory.info["score/second"] == -1.5
    assert second.last.log_probs == [-0.1 if mask else 0.0 for mask in second.last.response_mask]
    assert second.last.policy_versions == (4, 4)


def test_rows_are_grouped_by_prompt_and_player(make: Any) -> None:
    rows = [row(str(number)) for number in range(4)]
    batch = batch_of(make(), run(make(), say, rows), ["a", "a", "b", "b"])
    uids = ["a/first", "a/first", "a/second", "a/second", "b/first", "b/first", "b/second", "b/second"]
    assert list(batch.non_tensor_batch["uid"]) == uids
    assert list(batch.non_tensor_batch["player"]) == [uid.partition("/")[2] for uid in uids]
    assert batch.batch["sample_index"].tolist() == list(range(5, 13))
    scores = (batch.batch["turn_scores"] + batch.batch["rm_scores"]).sum(-1)
    assert scores.tolist() == [1.0, 1.0, -0.75, -0.75] * 2
    assert not batch.batch["aborted"].any()
    metrics = agent_metrics(list(batch.non_tensor_batch["agent_info"]))
    assert metrics["agent/reported/score/second"] == -0.75
    assert metrics["agent/aborted_fraction"] == 0.0


def test_only_some_are_trained_and_their_sum_may_be_the_score(make: Any) -> None:
    runner = make(trained=["second"], reward="trajectory", env_kwargs={"rounds": 2})
    (trajectory,) = run(runner, say)
    assert len(trajectory.trajectories) == 1
    assert trajectory.trajectory.columns["player"] == "second"
    assert trajectory.trajectory.score == -1.5
    assert "turn_scores" not in trajectory.trajectory.columns


def test_the_reward_function_may_decide(make: Any) -> None:
    (trajectory,) = run(make(reward="report"), say)
    assert trajectory.trajectory.score is None
    assert trajectory.trajectory.columns["interaction_rewards"] == [1.0]


def test_a_player_without_a_turn_counts_nowhere(make: Any) -> None:
    rows = [row("0", interaction_kwargs={"env_kwargs": {"fault": "early"}}), row("1")]
    batch = batch_of(make(), run(make(), say, rows), ["a", "a"])
    assert list(batch.non_tensor_batch["uid"]) == ["a/first", "a/first", "a/second", "a/second"]
    assert batch.batch["aborted"].tolist() == [False, False, True, False]
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 2, 0, 2]


def test_rows_that_are_missing_are_nobodys(make: Any) -> None:
    runner = make(agent={"rows_per_sample": 3})
    rows = [row("0"), row("1", interaction_kwargs={"env_kwargs": {"fault": "raise"}})]
    batch = batch_of(runner, run(runner, say, rows), ["a", "a"])
    uids = ["a/2", "a/2", "a/first", "a/first", "a/second", "a/second"]
    assert list(batch.non_tensor_batch["uid"]) == uids
    assert batch.batch["aborted"].tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [
        ("raise", "exception", "the board broke"),
        ("hang", "rollout", "took longer than 0.5 s (step); rollout.agent.multi_agent.timeout_s changes the limit"),
        ("stranger", "rollout", "names the player 'third'; rollout.agent.multi_agent.players are first, second"),
    ],
)
def test_an_environment_that_fails_ends_its_episode_alone(make: Any, fault: str, reason: str, message: str) -> None:
    rows = [row("bad", interaction_kwargs={"env_kwargs": {"fault": fault}}), row("good")]
    runner = make(timeout_s=0.5)
    trajectories = run(runner, say, rows)
    assert [trajectory.aborted for trajectory in trajectories] == [reason, None]
    assert message in trajectories[0].info["error"]
    batch = batch_of(runner, trajectories, ["a", "a"])
    assert list(batch.non_tensor_batch["uid"]) == ["a/first", "a/first", "a/second", "a/second"]
    assert batch.batch["aborted"].tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "limit", [{"multi_turn": {"max_assistant_turns": 2}}, {"rollout": {"response_length": 36}}], ids=["turns", "tokens"]
)
def test_an_episode_ends_with_the_turns_or_tokens_of_a_player(make: Any, limit: dict[str, Any]) -> None:
    runner = make(env_kwargs={"rounds": 100}, **limit)
    (trajectory,) = run(runner, say)
    assert trajectory.aborted is None
    assert trajectory.info["counts"] == {"truncated": 1}
    assert len(trajectory.trajectory.turn_scores) == 2
    assert trajectory.trajectory.last.response_mask[-1] == 1


def test_coroutines_and_the_end(make: Any) -> None:
    runner = make("Patient")
    (trajectory,) = run(runner, say)
    assert trajectory.trajectory.turn_scores == [1.0]
    from verl.utils.dynamic_import import load_target

    assert load_target(runner.config.agent.multi_agent.env).closed == 1


def test_a_loop_of_ones_own_may_give_several_rows(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "from verl.agent_loop import AgentLoopBase, AgentLoopOutput\n"
        "class Pair(AgentLoopBase):\n"
        "    async def run(self, sampling_params, **kwargs):\n"
        "        prompt = kwargs['raw_prompt_ids']\n"
        "        outputs = []\n"
        "        for _ in range(kwargs['extra_info']['rows']):\n"
        "            said = await self.generate(prompt, sampling_params)\n"
        "            mask = [1] * len(said.token_ids)\n"
        "            outputs.append(AgentLoopOutput(prompt, said.token_ids, mask, said.log_probs))\n"
        "        return outputs\n"
    )
    (tmp_path / "loops.yaml").write_text(f"- name: pair\n  _target_: {tmp_path}/loops.py:Pair\n")
    agent = {"agent_loop_config_path": f"{tmp_path}/loops.yaml", "default_agent_loop": "pair", "rows_per_sample": 2}
    runner = AgentLoopRunner(config(agent=agent), TOKENIZER)
    rows = [row(str(count), extra_info={"rows": count}) for count in (2, 1, 3)]
    two, one, three = run(runner, lambda text: "ok<|end|>", rows)
    assert "returned 3 rows; between 1 and rollout.agent.rows_per_sample=2" in three.info["error"]
    batch = batch_of(runner, [two, one, three], ["a", "a", "a"])
    assert list(batch.non_tensor_batch["uid"]) == ["a", "a", "a", "a/1", "a/1", "a/1"]
    assert batch.batch["response_mask"].sum(-1).tolist() == [3, 3, 0, 3, 0, 0]
    assert batch.batch["aborted"].tolist() == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "x.py:Game", "players": ["one"]}, "name at least two players"),
        ({"env": "x.py:Game", "players": ["a", "b"], "trained": ["c"]}, "c is none of the players a, b"),
        ({"players": ["a", "b"]}, "has no use without an environment"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], message: str) -> None:
    agent = AgentConfig(multi_agent=MultiAgentConfig(**settings))
    assert any(message in problem for problem in find_problems(RolloutConfig(agent=agent)))


def test_an_environment_that_does_not_exist_is_told_at_the_start(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no 'Duell'"):
        make("Duell")


def test_a_game_of_textarena(make: Any) -> None:
    pytest.importorskip("textarena", reason="the package textarena is not installed (requirements/dev.txt)")

    def play(text: str) -> str:
        """The first takes the left column, the second what is free in the middle one."""
        mine = text.count("<|assistant|>") - 1
        return f"[{(0, 3, 6)[mine]}]<|end|>" if "You are Player 0" in text else f"[{(1, 4, 7)[mine]}]<|end|>"

    runner = make(
        env="verl.interactions.TextArenaGame",
        env_kwargs={"game": "TicTacToe-v0"},
        multi_turn={"max_tool_response_length": 2000},
        rollout={"prompt_length": 1500, "response_length": 3000},
    )
    (trajectory,) = run(runner, play, [row(interaction_kwargs={"seed": 3})])
    assert trajectory.aborted is None, trajectory.info.get("error")
    first, second = trajectory.trajectories
    assert first.turn_scores == [0.0, 0.0, 1.0]
    assert second.turn_scores == [0.0, -1.0]
    # each player reads what the other did, and its own words only once
    assert "[Player 0] [3]" in TOKENIZER.decode(second.last.response_ids)
    assert text_of(trajectory).count("[3]<|end|>") == 1
    assert "[Player 0]" not in text_of(trajectory)

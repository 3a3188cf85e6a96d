"""Simulated users and environments answer the model within their limits, and their rewards find their turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.agent_loop.script import TOKENIZER, batch_of, config, row, run, text_of
from verl.agent_loop.runner import AgentLoopRunner
from verl.errors import ConfigError

WORLD = '''
import time
from verl.interactions import BaseInteraction

class Guess:
    """Find a number: the environment says higher or lower."""
    closed = 0

    def __init__(self, limit=10, broken=False):
        self.limit, self.broken = limit, broken

    def reset(self, seed=None, options=None):
        self.number, self.tries = seed % self.limit, 0
        return f"a number below {self.limit}", {}

    def step(self, action):
        if self.broken:
            raise OSError("the world ended")
        if action == "hang":
            time.sleep(2)
        self.tries += 1
        guess = int(action) if action.isdigit() else -1
        right = guess == self.number
        word = "right" if right else "higher" if guess < self.number else "lower"
        return word, 1.0 if right else -0.1, right, self.tries >= 5, {"state": (self.number, word)}

    def close(self):
        Guess.closed += 1

class Doubter(BaseInteraction):
    """Asks once more, then leaves."""

    async def start_interaction(self, instance_id=None, word="sure", **kwargs):
        self.asked = getattr(self, "asked", {})
        self.asked[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, word="sure", **kwargs):
        self.asked[instance_id] += 1
        done = self.asked[instance_id] > 1
        return done, "" if done else f"are you {word}?", 0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.asked[instance_id]
'''


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A runner with one or more interactions."""
    world = tmp_path / "world.py"
    world.write_text(WORLD)

    def build(*entries: dict[str, Any], **agent: Any) -> AgentLoopRunner:
        file = tmp_path / "interaction.yaml"
        file.write_text(yaml.safe_dump({"interaction": list(entries)}))
        multi_turn = {"interaction_config_path": str(file)}
        return AgentLoopRunner(config(multi_turn=multi_turn, agent=agent), TOKENIZER)

    build.world = str(world)  # type: ignore[attr-defined]
    return build


def guess(make: Any, **settings: Any) -> dict[str, Any]:
    return {
        "name": "guess",
        "class_name": "verl.interactions.GymInteraction",
        "config": {"env": f"{make.world}:Guess", "timeout_s": 5, **settings},
    }


def doubter(make: Any, **settings: Any) -> dict[str, Any]:
    return {"name": "doubter", "class_name": f"{make.world}:Doubter", "config": settings}


def bisect(text: str) -> str:
    """Guess 5, then 7 after "higher"."""
    return "7<|end|>" if "higher" in text else "5<|end|>"


def test_an_episode_with_rewards_for_its_steps(make: Any) -> None:
    (trajectory,) = run(make(guess(make)), bisect, [row(interaction_kwargs={"seed": 7})])
    assert TOKENIZER.decode(trajectory.trajectory.last.prompt_ids) == (
        "<|user|>go\n\na number below 10<|end|><|assistant|>"
    )
    assert text_of(trajectory) == "5<|end|><|user|>higher<|end|><|assistant|>7<|end|>"
    output = trajectory.trajectory.last
    assert trajectory.trajectory.turn_scores == [-0.1, 1.0]
    assert trajectory.trajectory.columns["interaction_rewards"] == [-0.1, 1.0]
    assert trajectory.trajectory.score == 0.0
    assert trajectory.trajectory.columns["state_hashes"][1] == (7, "higher")
    batch = batch_of([trajectory], prompt_length=60, response_length=60)
    scores = (batch.batch["turn_scores"] + batch.batch["rm_scores"])[0]
    assert scores[1].item() == pytest.approx(-0.1)  # on <|end|> of "5<|end|>"
    assert scores[len(output.response_ids) - 1] == 1.0


def test_the_whole_trajectory_may_get_the_sum(make: Any) -> None:
    (trajectory,) = run(make(guess(make, reward="trajectory")), bisect, [row(interaction_kwargs={"seed": 7})])
    assert trajectory.trajectory.score == pytest.approx(0.9)
    assert "turn_scores" not in trajectory.trajectory.columns


def test_an_episode_that_is_cut_off_ends(make: Any) -> None:
    (trajectory,) = run(make(guess(make)), lambda text: "3<|end|>", [row(interaction_kwargs={"seed": 7})])
    assert len(trajectory.trajectory.turn_scores) == 5
    assert trajectory.trajectory.last.response_mask[-1] == 1


@pytest.mark.parametrize(
    ("kwargs", "said", "reason", "message"),
    [
        ({"env_kwargs": {"broken": True}}, "5<|end|>", "exception", "the world ended"),
        ({"env_kwargs": {"limt": 3}}, "5<|end|>", "exception", "limt"),
        ({}, "hang<|end|>", "rollout", "took longer than 0.3 s (answer)"),
    ],
)
def test_an_environment_that_fails_ends_its_trajectory_alone(
    make: Any, kwargs: dict[str, Any], said: str, reason: str, message: str
) -> None:
    rows = [row("bad", "bad", interaction_kwargs={"seed": 5, **kwargs}), row("good", interaction_kwargs={"seed": 5})]
    started = time.monotonic()
    bad, good = run(make(guess(make, timeout_s=0.3)), lambda text: said if "bad" in text else "5<|end|>", rows)
    assert time.monotonic() - started < 10
    assert (bad.aborted, good.aborted) == (reason, None)
    assert message in bad.info["error"]


def test_a_user_answers_and_leaves(make: Any) -> None:
    runner = make(doubter(make), guess(make))
    rows = [row(interaction_kwargs={"name": "doubter", "word": "certain"})]
    (trajectory,) = run(runner, lambda text: "yes<|end|>", rows)
    assert text_of(trajectory) == "yes<|end|><|user|>are you certain?<|end|><|assistant|>yes<|end|>"
    assert trajectory.trajectory.score is None  # the reward function is asked, and sees what the user gave
    assert trajectory.trajectory.columns["interaction_rewards"] == [0.5, 0.5]
    assert "turn_scores" not in trajectory.trajectory.columns
    assert runner.interactions["doubter"].asked == {}


def test_rows_have_to_name_one_of_several(make: Any) -> None:
    runner = make(doubter(make), guess(make))
    with pytest.raises(ConfigError, match="names no interaction; there are doubter, guess"):
        run(runner, bisect)
    with pytest.raises(ConfigError, match="interaction_kwargs.name='gess'"):
        run(runner, bisect, [row(interaction_kwargs={"name": "gess"})])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "x"}, "expected name, class_name and config"),
        ({"class_name": "verl.errors.ConfigError"}, "is not derived from BaseInteraction"),
        ({"class_name": "verl.interactions.GymInteraction"}, "give config.env"),
        ({"class_name": "verl.interactions.BaseInteraction", "config": {"reward": "sum"}}, "use one of report, step"),
    ],
)
def test_a_wrong_file_is_told(make: Any, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(entry)

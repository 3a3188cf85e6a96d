"""Environments of other packages: the tasks of reasoning-gym and the games of textarena."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.agent_loop.script import TOKENIZER, config, row, run, text_of
from verl.agent_loop.runner import AgentLoopRunner
from verl.errors import ConfigError
from verl.interactions import ReasoningGymEnv, TextArenaEnv


def runner_of(tmp_path: Path, env: str, **env_kwargs: Any) -> AgentLoopRunner:
    """A runner whose rows meet the environment."""
    settings = {"env": f"verl.interactions.{env}", "env_kwargs": env_kwargs}
    file = tmp_path / "interaction.yaml"
    entry = {"name": "it", "class_name": "verl.interactions.GymInteraction", "config": settings}
    file.write_text(yaml.safe_dump({"interaction": [entry]}))
    limits = {"interaction_config_path": str(file), "max_tool_response_length": 2000}
    return AgentLoopRunner(config(multi_turn=limits, prompt_length=1500, response_length=1500), TOKENIZER)


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed (verl[reasoning-gym])")

    SUMS = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

    def test_the_seed_makes_the_question_and_the_task_judges(self, tmp_path: Path) -> None:
        questions = []

        def solve(text: str) -> str:
            question = text.split("<|user|>")[1].split("<|end|>")[0]
            questions.append(question)
            terms = question.rpartition(":")[2] if ":" in question else question
            expression = "".join(c for c in terms if c in "0123456789+-")
            return f"so <answer>{eval(expression)}</answer><|end|>"

        rows = [row(str(n), interaction_kwargs={"seed": seed}) for n, seed in enumerate((5, 5, 6))]
        trajectories = run(runner_of(tmp_path, "ReasoningGymEnv", **self.SUMS), solve, rows)
        assert [t.trajectory.turn_scores for t in trajectories] == [[1.0]] * 3
        assert questions[0] == questions[1] != questions[2]

    def test_another_try_after_a_wrong_answer(self, tmp_path: Path) -> None:
        runner = runner_of(tmp_path, "ReasoningGymEnv", attempts=2, **self.SUMS)
        (trajectory,) = run(runner, lambda text: "<answer>none</answer><|end|>", [row(interaction_kwargs={"seed": 5})])
        again = "<|user|>That is not right. Try again.<|end|><|assistant|>"
        assert text_of(trajectory) == f"<answer>none</answer><|end|>{again}<answer>none</answer><|end|>"
        assert trajectory.trajectory.columns["interaction_rewards"] == [0.0, 0.0]

    def test_what_cannot_be_made_is_told(self, tmp_path: Path) -> None:
        (trajectory,) = run(runner_of(tmp_path, "ReasoningGymEnv", **self.SUMS), lambda text: "1<|end|>")
        assert trajectory.aborted == "data"
        assert "set extra_info.interaction_kwargs.seed" in trajectory.info["error"]
        for kwargs, message in (
            ({"task": "chain_smu"}, "does not make the task 'chain_smu'"),
            ({"task": "chain_sum", "min_term": 2}, "min_term"),
            ({"task": "chain_sum", "attempts": 0}, "must be at least 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                ReasoningGymEnv(**kwargs).reset(seed=1)


class TestTextArena:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("textarena", reason="the package textarena is not installed (requirements/dev.txt)")

    def test_a_game_for_one_player(self, tmp_path: Path) -> None:
        def bisect(text: str) -> str:
            low, high = 1, 20
            guess = 10
            for turn in text.split("<|assistant|>")[1:]:
                if "higher" in turn:
                    low = guess + 1
                elif "lower" in turn:
                    high = guess - 1
                guess = (low + high) // 2
            return f"[{guess}]<|end|>"

        runner = runner_of(tmp_path, "TextArenaEnv", game="GuessTheNumber-v0")
        rows = [row(str(n), interaction_kwargs={"seed": seed}) for n, seed in enumerate((1, 2, 3, 1))]
        trajectories = run(runner, bisect, rows)
        for trajectory in trajectories:
            assert trajectory.aborted is None, trajectory.info.get("error")
            scores = trajectory.trajectory.columns["interaction_rewards"]
            assert scores[-1] == 1.0
            assert not any(scores[:-1])
        assert "Guess The Number" in TOKENIZER.decode(trajectories[0].trajectory.last.prompt_ids)
        assert text_of(trajectories[0]) == text_of(trajectories[3])
        assert len({text_of(trajectory) for trajectory in trajectories}) > 1
        assert text_of(trajectories[0]).count("Guess The Number") == 0  # what was shown once is not repeated

    def test_games_do_not_touch_the_processs_random_numbers(self) -> None:
        random.seed(4)
        np.random.seed(4)
        expected = [random.random(), np.random.random(), random.random()]
        random.seed(4)
        np.random.seed(4)
        game = TextArenaEnv("Bandit-v0")
        game.reset(seed=9)
        got = [random.random(), np.random.random()]
        game.step("[red]")
        assert [*got, random.random()] == expected

    def test_a_game_draws_the_same_whatever_others_do(self) -> None:
        def play(disturb: bool) -> list[str]:
            game = TextArenaEnv("Bandit-v0")
            game.reset(seed=9)
            seen = []
            for _ in range(5):
                if disturb:
                    other = TextArenaEnv("Bandit-v0")
                    other.reset(seed=2)
                    other.step("[blue]")
                seen.append(game.step("[red]")[0])
            return seen

        assert play(False) == play(True)

    @pytest.mark.parametrize(
        ("game", "kwargs", "message"),
        [
            ("TicTacTo-v0", {}, "not found in registry"),
            ("GuessTheNumber-v0", {"numbers": 3}, "numbers"),
            ("TicTacToe-v0", {}, "is not for 1 player"),
        ],
    )
    def test_what_cannot_be_made_is_told(self, game: str, kwargs: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            TextArenaEnv(game, **kwargs).reset(seed=1)

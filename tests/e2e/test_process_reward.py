"""PRIME in a whole run: the reward model learns outcomes, rewards tokens, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_equivalence import comparable
from tests.e2e.test_resume import deterministic
from verl.trainer.ppo.metrics import undocumented

pytestmark = pytest.mark.e2e

RunTraining = Callable[..., list[dict[str, Any]]]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(c.isupper() for c in solution_str) > 1)
"""


@pytest.fixture
def prime(tmp_path: Path, tiny_model_dir: str) -> list[str]:
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        f"custom_reward_function.path={tmp_path}/reward.py",
        "algorithm.adv_estimator=prime",
        "reward_model.enable=True",
        "reward_model.kind=implicit",
        f"reward_model.model.path={tiny_model_dir}",
        "reward_model.model.optim.lr=1e-3",
        "reward_model.model.optim.grad_clip=10.0",
        "reward_model.mini_batch_size=4",
        "trainer.controller=local",
        "trainer.total_training_steps=4",
    ]


def test_it_learns_and_resumes(run_training: RunTraining, prime: list[str], tmp_path: Path) -> None:
    whole = run_training(*prime, "trainer.save_freq=2")
    losses = [row["data"]["reward_model/loss"] for row in whole]
    assert losses[0] == pytest.approx(0.693, abs=0.05)  # ln 2: at first it is its own reference
    assert losses[-1] < losses[0]
    assert all(row["data"]["reward_model/grad_norm"] > 0 for row in whole)
    assert undocumented(whole[0]["data"]) == []
    assert "timing_s/process_reward" in whole[0]["data"]
    rest = run_training(
        *prime, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run1/global_step_2"
    )
    assert deterministic(rest) == deterministic(whole[2:])


def test_without_learning_before_it_the_first_rewards_are_nothing(run_training: RunTraining, prime: list[str]) -> None:
    """A model that is its own reference rewards no token: what is left is leave-one-out on the outcomes."""
    after = run_training(*prime, "trainer.total_training_steps=1", "reward_model.update=after")[0]["data"]
    rloo = run_training(
        *[key for key in prime if not key.startswith(("reward_model", "algorithm"))],
        "algorithm.adv_estimator=rloo",
        "trainer.total_training_steps=1",
    )[0]["data"]
    for name in ("critic/advantages/max", "critic/advantages/min", "actor/grad_norm"):
        assert after[name] == pytest.approx(rloo[name], rel=1e-5)


@pytest.mark.usefixtures("ray_local")
def test_two_workers_give_the_same_numbers(run_training: RunTraining, prime: list[str]) -> None:
    one = run_training(*prime, "trainer.total_training_steps=2")
    two = run_training(
        *prime,
        "trainer.total_training_steps=2",
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "reward_model.micro_batch_size_per_gpu=1",
    )
    for expected, actual in zip(one, two, strict=True):
        assert comparable(actual) == pytest.approx(comparable(expected), rel=1e-4, abs=1e-5)


def test_outcomes_must_be_probabilities(run_training: RunTraining, prime: list[str], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD.replace("float(", "3.0 * float("))
    with pytest.raises(Exception, match="outcomes between 0 and 3"):
        run_training(*prime)

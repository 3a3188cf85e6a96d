"""The recipes: each is a valid configuration of the algorithm it is named after, and trains a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.config import PPOConfig, load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.metrics import undocumented

pytestmark = pytest.mark.e2e

DIRECTORY = Path(__file__).resolve().parents[2] / "examples" / "recipes"
RECIPES = sorted(path.stem for path in DIRECTORY.glob("*.yaml") if path.stem != "common")

# about half of the random answers have three capital letters or more, so that groups differ
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(c.isupper() for c in solution_str) > 2)
"""

#: name -> (advantage estimator, policy loss)
ALGORITHMS = {
    "ppo": ("gae", "vanilla"),
    "grpo": ("grpo", "vanilla"),
    "dr_grpo": ("grpo", "vanilla"),
    "dapo": ("grpo", "vanilla"),
    "rloo": ("rloo", "vanilla"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "vanilla"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "vanilla"),
    "remax": ("remax", "vanilla"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "gpg": ("gpg", "gpg"),
    "geo_mean": ("grpo", "geo_mean"),
    "kl_cov": ("grpo", "kl_cov"),
    "clip_cov": ("grpo", "clip_cov"),
    "opo": ("opo", "vanilla"),
    "prime": ("prime", "vanilla"),
}


def test_there_is_a_recipe_for_each() -> None:
    assert set(RECIPES) == set(ALGORITHMS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_what_its_name_says(recipe: str) -> None:
    config = load_config(PPOConfig, recipe, config_path=str(DIRECTORY))
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode) == ALGORITHMS[recipe]
    # all see the same number of samples in a step, so that the table compares like with like
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 256


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(
    recipe: str, base_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step on the small task and model of these tests; the real ones are in docs/algorithms/recipes.md."""
    kept = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
    grouped = load_config(PPOConfig, recipe, config_path=str(DIRECTORY)).actor_rollout_ref.rollout.n > 1
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    overrides = [
        *(override for override in base_overrides if override.startswith(kept)),
        f"custom_reward_function.path={tmp_path}/reward.py",
        "data.train_batch_size=4",
        *(["data.gen_batch_size=6"] if recipe == "dapo" else []),
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"actor_rollout_ref.rollout.n={2 if grouped else 1}",
        "critic.ppo_mini_batch_size=2",
        "trainer.critic_warmup=0",
        "trainer.controller=local",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={tmp_path}/out",
    ]
    run_ppo(load_config(PPOConfig, recipe, overrides, config_path=str(DIRECTORY)))
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["data"]["actor/grad_norm"] > 0
    assert undocumented(row["data"]) == []

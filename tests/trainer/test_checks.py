"""What cannot run is told before anything starts, with the key to change."""

from __future__ import annotations

from typing import Any

import pytest

from verl.algorithms.registry import register_adv_est, register_policy_loss
from verl.config import PPOConfig, load_config
from verl.errors import ConfigError
from verl.trainer.ppo.checks import check_algorithm

BASE = [
    "data.train_files=train.parquet",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.model.external_lib=my_plug_in",
    "actor_rollout_ref.rollout.n=4",
    "trainer.n_gpus_per_node=1",
]


def config(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", [*BASE, *overrides])


@pytest.fixture(autouse=True)
def _plug_ins() -> None:
    @register_adv_est("mine")
    def mine(token_level_rewards: Any, response_mask: Any, ref_log_prob: Any, my_column: Any) -> Any:
        raise NotImplementedError

    @register_policy_loss("plain")
    def plain(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, mode: str, config: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=gae",),
        ("algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token"),
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"),
        ("algorithm.adv_estimator=spo",),
        ("algorithm.adv_estimator=optimal_token_baseline",),
        (
            "algorithm.adv_estimator=prime",
            "reward_model.enable=True",
            "reward_model.kind=implicit",
            "reward_model.model.path=m",
        ),
    ],
)
def test_what_can_run(overrides: tuple[str, ...]) -> None:
    check_algorithm(config(*overrides))


def test_a_field_that_only_some_sources_make() -> None:
    remax = config("algorithm.adv_estimator=remax")
    check_algorithm(remax, frozenset({"reward_baselines"}))
    with pytest.raises(
        ConfigError, match=r"adv_estimator=remax: needs reward_baselines, which nothing in this run makes"
    ):
        check_algorithm(remax)
    players = "actor_rollout_ref.rollout.agent.multi_agent"
    remax = config("algorithm.adv_estimator=remax", f"{players}.env=game.py:Game", f"{players}.players=[a,b]")
    with pytest.raises(ConfigError, match="no baseline for the 2 rows of an episode"):
        check_algorithm(remax, frozenset({"reward_baselines"}))


def test_a_plug_in_whose_fields_nobody_makes() -> None:
    with pytest.raises(ConfigError) as caught:
        check_algorithm(config("algorithm.adv_estimator=mine"))
    assert str(caught.value) == (
        "algorithm.adv_estimator=mine: needs my_column, ref_log_prob, which nothing in this run makes; set "
        "actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True"
    )


def test_a_misspelt_plug_in() -> None:
    with pytest.raises(ConfigError, match="unknown advantage estimator 'mien'"):
        check_algorithm(config("algorithm.adv_estimator=mien"))
    with pytest.raises(ConfigError, match="unknown policy loss 'plian'"):
        check_algorithm(config("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=plian"))


def test_weights_for_a_loss_that_takes_none() -> None:
    chosen = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=plain"]
    check_algorithm(config(*chosen))
    with pytest.raises(ConfigError, match="has no parameter rollout_is_weights"):
        check_algorithm(config(*chosen, "algorithm.rollout_correction.rollout_is=token"))

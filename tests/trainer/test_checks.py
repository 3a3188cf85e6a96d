"""What cannot run is told before anything starts, with the key to change."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import Subset
from transformers import AutoModelForSequenceClassification

from tests.fixtures.tiny import make_tokenizer
from tests.models.families import make_config
from verl.algorithms.registry import register_adv_est, register_policy_loss
from verl.config import PPOConfig, load_config
from verl.data import create_dataset
from verl.errors import ConfigError, DataError
from verl.rewards import load_reward_manager
from verl.trainer.ppo.checks import check_algorithm, check_data_sources, check_models, check_reward_model

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


@pytest.mark.parametrize(
    ("source", "overrides", "refused"),
    [
        ("mine", (), True),
        (None, (), True),
        ("openai/gsm8k", (), False),
        ("aime24", (), False),
        ("mine", ("custom_reward_function.path=reward.py",), False),
        ("mine", ("reward_model.enable=True", "reward_model.model.path=m", "data.return_raw_chat=True"), False),
    ],
)
def test_a_data_source_that_no_rule_knows(
    source: str | None, overrides: tuple[str, ...], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(**kwargs): return 1.0")
    messages = [{"role": "user", "content": "1"}]
    right = {"ground_truth": "1"}
    rows = [{"data_source": name, "prompt": messages, "reward_model": right} for name in ("gsm8k", source)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen, tokenizer = config("algorithm.adv_estimator=grpo", *overrides), make_tokenizer()
    dataset = create_dataset([str(tmp_path / "train.jsonl")], tokenizer, chosen.data)
    reward_fn = load_reward_manager(chosen, tokenizer)
    said = (
        nullcontext()
        if not refused
        else pytest.raises(DataError, match=rf"train.jsonl, line 2.*data_source={source!r}")
    )
    with said:
        check_data_sources(chosen, reward_fn, [Subset(dataset, [0])])


def test_references_are_checked_for_all_rows(tmp_path: Path) -> None:
    chosen, tokenizer = config("algorithm.adv_estimator=grpo"), make_tokenizer()
    frame = pa.table(
        {
            "data_source": ["gsm8k", "gsm8k", "math", "gsm8k", "gsm8k"],
            "prompt": [[{"role": "user", "content": "1"}]] * 5,
            # what pandas writes of an integer column with gaps
            "reward_model": pa.array([{"ground_truth": value} for value in (5.0, None, 1.0, math.nan, -2.0)]),
        }
    )
    pq.write_table(frame, tmp_path / "train.parquet")
    dataset = create_dataset([str(tmp_path / "train.parquet")], tokenizer, chosen.data)
    with pytest.raises(DataError) as raised:
        check_data_sources(chosen, load_reward_manager(chosen, tokenizer), [dataset])
    _, one, two = str(raised.value).splitlines()
    assert (
        "train.parquet, row 1, columns 'data_source' and 'reward_model': "
        "data_source='gsm8k': ground_truth=None: the reference is missing"
    ) in one
    assert (
        "train.parquet, row 3, columns 'data_source' and 'reward_model': "
        "data_source='gsm8k': ground_truth=nan: the reference is missing"
    ) in two


def test_a_language_model_is_no_reward_model(tiny_model_dir: str, tmp_path: Path) -> None:
    def chosen(path: str | Path, estimator: str = "grpo", kind: str = "classifier") -> PPOConfig:
        model = ["reward_model.enable=True", f"reward_model.kind={kind}", f"reward_model.model.path={path}"]
        return config(f"algorithm.adv_estimator={estimator}", *model, "data.return_raw_chat=True")

    with pytest.raises(ConfigError, match=r"reward_model.model.path=.*no trained score head"):
        check_reward_model(chosen(tiny_model_dir))
    check_reward_model(chosen(tiny_model_dir, "prime", "implicit"))
    AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1).save_pretrained(tmp_path)
    check_reward_model(chosen(tmp_path))


def test_layers_that_the_built_in_rollout_engine_does_not_have_are_named(tmp_path: Path) -> None:
    make_config("lfm2").save_pretrained(tmp_path)
    keys = (f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.external_lib=null")
    with pytest.raises(ConfigError, match=r"'lfm2' has conv layers, which rollout.name=hf does not serve"):
        check_models(config(*keys, "actor_rollout_ref.rollout.name=hf", "algorithm.adv_estimator=grpo"))

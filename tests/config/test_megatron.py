"""The Megatron section: sizes that fit the ranks, and each other."""

from __future__ import annotations

import pytest

from verl.config import MegatronConfig, PPOConfig, load_config
from verl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
BASE = [
    "actor_rollout_ref.model.path=m",
    "data.train_files=t.parquet",
    "data.val_files=v.parquet",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    "trainer.n_gpus_per_node=4",
]


def load(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_megatron_trainer", [*BASE, *overrides])


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_the_preset_chooses_the_engine_and_roles_share_its_sizes() -> None:
    config = load(f"{ACTOR}.megatron.tensor_model_parallel_size=2", "algorithm.adv_estimator=gae")
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    assert config.critic.megatron.tensor_model_parallel_size == 2
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2
    assert config.reward_model.megatron.tensor_model_parallel_size == 2


def test_the_reference_is_built_as_the_policy_and_a_critic_may_be_another_model() -> None:
    layers = {"num_layers_in_first_pipeline_stage": 2}
    config = load(
        f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=2",
        "algorithm.adv_estimator=gae",
    )
    assert config.actor_rollout_ref.ref.megatron.override_transformer_config == layers
    assert config.critic.megatron.override_transformer_config == {}


def test_the_optimizer_of_a_megatron_model_takes_fields_of_its_own() -> None:
    config = load(f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", "algorithm.adv_estimator=gae")
    assert config.actor_rollout_ref.actor.optim.override_optimizer_config == {"optimizer_cpu_offload": True}


@pytest.mark.parametrize("where", [ACTOR, "critic"])
def test_saving_in_the_background_is_refused(where: str) -> None:
    text = problem(f"{where}.checkpoint.async_save=True", "algorithm.adv_estimator=gae")
    assert f"{where}.checkpoint.async_save=True: the Megatron engine writes its checkpoints before" in text


def test_neighbours_share_weights_and_tokens_and_stages_come_last() -> None:
    # 8 ranks, 2 of them tensor parallel, 2 stages: ranks 0, 1 | 2, 3 of the first stage, 4, 5 | 6, 7 of the second
    sizes = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [sizes.row_share(rank, 8)[0] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sizes.row_share(0, 8)[1] == 2


def test_ranks_that_share_rows_count_once_in_the_batch_arithmetic() -> None:
    # 8 samples on 4 ranks of which 2 share rows: 4 samples each, so micro-batches of 4 fit
    config = load(
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.ppo_micro_batch_size=8",
        "algorithm.adv_estimator=gae",
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    load(
        f"{ACTOR}.megatron.pipeline_model_parallel_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        "algorithm.adv_estimator=gae",
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([f"{ACTOR}.megatron.tensor_model_parallel_size=3"], "takes 3 ranks, which do not divide"),
        ([f"{ACTOR}.megatron.expert_model_parallel_size=3"], "the experts take 3 ranks"),
        ([f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"], "interleaving needs several stages"),
        (
            ["algorithm.adv_estimator=gae", "critic.megatron.tensor_model_parallel_size=2"],
            "critic.megatron.tensor_model_parallel_size=2: differs from",
        ),
        (["actor_rollout_ref.model.use_remove_padding=False"], "always removes padding"),
        (["actor_rollout_ref.model.enable_activation_offload=True"], "is for the FSDP2 engine"),
        ([f"+{ACTOR}.megatron.override_ddp_config.overlap_grad_reduce=True"], "how Megatron-core keeps and reduces"),
        (
            [
                "actor_rollout_ref.actor.strategy=fsdp",
                f"{ACTOR}.optim.override_optimizer_config.store_param_remainders=True",
            ],
            "sets fields of Megatron's optimizer, and strategy is 'fsdp'",
        ),
        ([f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.strategy=fsdp"], "shares the workers of the actor"),
        ([f"{ACTOR}.megatron.use_dist_checkpointing=True"], "give both or neither"),
    ],
)
def test_what_does_not_fit_is_told_before_the_start(overrides: list[str], text: str) -> None:
    assert text in problem("actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo", *overrides)

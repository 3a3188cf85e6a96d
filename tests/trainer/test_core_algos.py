from __future__ import annotations

import inspect

import pytest

from verl.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES
from verl.config import algorithm as config_names
from verl.trainer.ppo import core_algos


def parameters(name: str) -> list[str]:
    return list(inspect.signature(getattr(core_algos, name)).parameters)


GROUP = ["token_level_rewards", "response_mask", "index", "epsilon"]


@pytest.mark.parametrize(
    ("name", "leading"),
    [
        ("compute_gae_advantage_return", ["token_level_rewards", "values", "response_mask", "gamma", "lam"]),
        ("compute_grpo_outcome_advantage", [*GROUP, "norm_adv_by_std_in_grpo", "config"]),
        ("compute_grpo_vectorized_outcome_advantage", GROUP),
        ("compute_rloo_outcome_advantage", [*GROUP, "config"]),
        ("compute_rloo_vectorized_outcome_advantage", [*GROUP, "config"]),
        ("compute_opo_outcome_advantage", [*GROUP, "config"]),
        ("compute_reinforce_plus_plus_baseline_outcome_advantage", [*GROUP, "config"]),
        ("compute_reinforce_plus_plus_outcome_advantage", ["token_level_rewards", "response_mask", "config"]),
        ("compute_gpg_outcome_advantage", [*GROUP, "f_norm", "alpha", "config"]),
        ("compute_grpo_passk_outcome_advantage", [*GROUP, "norm_adv_by_std_in_grpo", "config"]),
        (
            "compute_gdpo_outcome_advantage",
            [*GROUP, "norm_adv_by_std_in_grpo", "config", "non_tensor_batch", "batch"],
        ),
        (
            "compute_remax_outcome_advantage",
            ["token_level_rewards", "reward_baselines", "response_mask", "config"],
        ),
        ("compute_pf_ppo_reweight_data", ["data", "reweight_method", "weight_pow"]),
        ("compute_rewards", ["token_level_scores", "old_log_prob", "ref_log_prob", "kl_ratio"]),
        (
            "agg_loss",
            [
                *["loss_mat", "loss_mask", "loss_agg_mode", "dp_size"],
                *["batch_num_tokens", "global_batch_size", "loss_scale_factor"],
            ],
        ),
        (
            "compute_policy_loss",
            [
                *["old_log_prob", "log_prob", "advantages", "response_mask", "cliprange"],
                *["cliprange_low", "cliprange_high", "clip_ratio_c", "loss_agg_mode"],
            ],
        ),
        (
            "compute_value_loss",
            ["vpreds", "returns", "values", "response_mask", "cliprange_value", "loss_agg_mode"],
        ),
        ("compute_entropy_loss", ["logits", "response_mask", "loss_agg_mode"]),
        ("kl_penalty", ["logprob", "ref_logprob", "kl_penalty"]),
        ("FixedKLController", ["kl_coef"]),
        ("AdaptiveKLController", ["init_kl_coef", "target_kl", "horizon"]),
    ],
)
def test_signatures_that_scripts_rely_on(name: str, leading: list[str]) -> None:
    assert parameters(name)[: len(leading)] == leading


def test_registered_losses_share_one_signature() -> None:
    for name in config_names.POLICY_LOSSES:
        fn = core_algos.get_policy_loss_fn(name)
        assert list(inspect.signature(fn).parameters)[:7] == [
            *["old_log_prob", "log_prob", "advantages", "response_mask"],
            *["loss_agg_mode", "config", "rollout_is_weights"],
        ]


def test_every_name_in_all_exists_and_has_a_docstring() -> None:
    for name in core_algos.__all__:
        assert inspect.getdoc(getattr(core_algos, name)), name


def test_the_enum_the_registry_and_the_configuration_name_the_same_estimators() -> None:
    enum = {member.value for member in core_algos.AdvantageEstimator}
    built_in = {name for name in ADV_ESTIMATORS if ADV_ESTIMATORS[name].__module__.startswith("verl.")}
    assert enum == built_in == set(config_names.ADV_ESTIMATORS)
    losses = {name for name in POLICY_LOSSES if POLICY_LOSSES[name].__module__.startswith("verl.")}
    assert losses == set(config_names.POLICY_LOSSES)


def test_what_an_estimator_needs_agrees_with_the_configuration() -> None:
    from verl.algorithms.registry import fields_needed

    needs = {name: fields_needed(ADV_ESTIMATORS[name]) for name in config_names.ADV_ESTIMATORS}
    assert {name for name, fields in needs.items() if "values" in fields} == config_names.NEEDS_VALUES
    assert {name for name, fields in needs.items() if "uid" in fields} == config_names.NEEDS_GROUPS


def test_enum_members_are_strings_and_find_their_estimator() -> None:
    member = core_algos.AdvantageEstimator.GRPO
    assert member == "grpo"
    assert core_algos.get_adv_estimator_fn(member) is core_algos.compute_grpo_outcome_advantage

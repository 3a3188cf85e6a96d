"""The algorithm layer by name: every estimator, loss, KL estimate and aggregation, and how to register one's own.

Nothing is defined here but :class:`AdvantageEstimator`; the code lives in :mod:`verl.algorithms`.
"""

from __future__ import annotations

from enum import StrEnum

from verl.algorithms.aggregate import agg_loss
from verl.algorithms.baseline import (
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.algorithms.best_of import compute_grpo_passk_outcome_advantage, compute_maxrl_outcome_advantage
from verl.algorithms.bypass_loss import compute_policy_loss_bypass_mode
from verl.algorithms.covariance_loss import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.algorithms.divergence_loss import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from verl.algorithms.entropy import compute_entropy_loss
from verl.algorithms.gae import compute_gae_advantage_return
from verl.algorithms.gdpo import compute_gdpo_outcome_advantage
from verl.algorithms.gigpo import compute_gigpo_outcome_advantage
from verl.algorithms.gpg import compute_gpg_outcome_advantage, compute_policy_loss_gpg
from verl.algorithms.group import (
    compute_grpo_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from verl.algorithms.policy_loss import compute_policy_loss, compute_policy_loss_vanilla
from verl.algorithms.prime import compute_prime_advantage
from verl.algorithms.registry import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from verl.algorithms.sequence_loss import (
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_gspo_token,
)
from verl.algorithms.soft_loss import compute_policy_loss_cispo, compute_policy_loss_dro, compute_policy_loss_sapo
from verl.algorithms.spo import compute_spo_outcome_advantage
from verl.algorithms.token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from verl.algorithms.value_loss import compute_value_loss
from verl.trainer.ppo.advantage import compute_pf_ppo_reweight_data

# Group estimators are vectorised throughout; the second name exists for scripts that ask for that variant.
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


class AdvantageEstimator(StrEnum):
    """Names of the built-in advantage estimators; each equals its string."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    MAXRL = "maxrl"
    SPO = "spo"
    GIGPO = "gigpo"
    PRIME = "prime"


__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gigpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_gspo_token",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_prime_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_spo_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]

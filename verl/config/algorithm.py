"""Advantages and KL control.

The names of the built-in estimators and losses are repeated here, because this package imports no torch; a test
holds them equal to the registries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.actor import KL_PENALTIES, POLICY_LOSSES
from verl.config.base import Config, opt, section
from verl.config.correction import RolloutCorrectionConfig
from verl.config.filter_groups import FilterGroupsConfig

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "gdpo",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "maxrl",
    "spo",
    "gigpo",
    "prime",
)
# POLICY_LOSSES live beside the actor section, which names them in its help.
__all__ = ["ADV_ESTIMATORS", "POLICY_LOSSES", "NEEDS_GROUPS", "NEEDS_VALUES", "AlgorithmConfig", "KLCtrlConfig"]
NEEDS_VALUES = frozenset({"gae"})
NEEDS_PROCESS_REWARDS = frozenset({"prime"})
NEEDS_GROUPS = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gdpo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
        "maxrl",
        "gigpo",
        "prime",
    }
)
USES_SUM_PI_SQUARED = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
GIGPO_MODES = ("mean_norm", "mean_std_norm")
REWEIGHT_METHODS = ("pow", "max_min", "max_random")


@dataclass
class KLCtrlConfig(Config):
    """Weight of the KL penalty in the reward."""

    type: str = opt("fixed", "Fixed weight, or one that follows target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "Weight of the penalty (adaptive: at the start).", ge=0)
    horizon: int = opt(10000, "Adaptive: how slowly the weight follows, in samples.", ge=1)
    target_kl: float = opt(0.1, "Adaptive: KL divergence to hold, in nats per response token.", gt=0)


@dataclass
class GiGPOConfig(Config):
    """Advantages of single steps of an agent."""

    step_advantage_w: float = opt(1.0, "Weight of the step advantage beside the episode's.", ge=0)
    mode: str = opt(
        "mean_norm",
        "Subtract the group's mean (mean_norm), or divide by its standard deviation too (mean_std_norm).",
        choices=GIGPO_MODES,
    )


@dataclass
class SPOConfig(Config):
    """The remembered value of each prompt."""

    rho_min: float = opt(0.875, "Least share of the evidence that a visit keeps.", ge=0, le=1)
    rho_max: float = opt(0.96, "Largest share of the evidence that a visit keeps.", ge=0, le=1)
    half_life_kl: float = opt(0.06, "Change of the policy that halves the evidence, in nats.", gt=0)
    kl_per_step: float = opt(0.001, "Assumed change of the policy per training step, in nats.", ge=0)

    def problems(self) -> Iterator[str]:
        if self.rho_min > self.rho_max:
            yield f"rho_min={self.rho_min}: must not be above rho_max={self.rho_max}"


@dataclass
class PFPPOConfig(Config):
    """Which samples PF-PPO trains on."""

    reweight_method: str = opt(
        "pow",
        "Chance of a sample: power of its score (pow), best and worst only (max_min), best favoured (max_random).",
        choices=REWEIGHT_METHODS,
    )
    weight_pow: float = opt(2.0, "pow: the power.", ge=0)


@dataclass
class AlgorithmConfig(Config):
    """Advantages and KL control."""

    adv_estimator: str = opt("gae", f"Advantage estimator: {', '.join(ADV_ESTIMATORS)}, or one that a plug-in adds.")
    gamma: float = opt(1.0, "Discount per token; gigpo: per step of the agent.", ge=0, le=1)
    lam: float = opt(1.0, "Lambda of GAE.", ge=0, le=1)
    lam_critic: float | None = opt(
        None, "Lambda of GAE for the critic's returns (VAPO: 1.0); not given = lam.", ge=0, le=1
    )
    length_adaptive_alpha: float | None = opt(
        None, "GAE: lambda of the policy is 1 - 1 / (alpha * response length) (VAPO: 0.05); not given = lam.", gt=0
    )
    norm_adv_by_std_in_grpo: bool = opt(
        True,
        "grpo, grpo_passk, gdpo: divide by the standard deviation of the group's scores; False is the form of Dr-GRPO.",
    )
    f_norm: float = opt(1.0, "gpg: divisor of the advantages.", gt=0)
    alpha: float = opt(1.0, "gpg: factor of the advantages.", gt=0)
    gdpo_reward_keys: list[str] = opt([], "gdpo: components of the reward, as the reward function names them.")
    gdpo_reward_weights: list[float] = opt([], "gdpo: weight of each component; not given = 1 each.")
    gigpo: GiGPOConfig = section(GiGPOConfig, "Advantages of single steps of an agent.")
    spo: SPOConfig = section(SPOConfig, "The remembered value of each prompt.")
    use_pf_ppo: bool = opt(False, "Draw the samples to train on by their scores, with replacement (PF-PPO).")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "Which samples PF-PPO trains on.")
    process_reward_coef: float = opt(1.0, "prime: weight of the process rewards.", ge=0)
    outcome_reward_coef: float = opt(1.0, "prime: weight of the outcome.", ge=0)
    filter_overlong_responses: bool = opt(
        False,
        "Leave responses that the length limit cut off out of the updates (overlong filtering, DAPO); they stay in "
        "their groups with their scores.",
    )
    use_kl_in_reward: bool = opt(False, "Subtract the KL divergence from the reference policy from the reward.")
    kl_penalty: str = opt("kl", "Estimator of the KL divergence in the reward.", choices=KL_PENALTIES)
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "Weight of the KL penalty in the reward.")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling of prompts (DAPO).")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "Correction for a rollout that is stale or computes differently."
    )

    def problems(self) -> Iterator[str]:
        if self.adv_estimator == "gdpo" and not self.gdpo_reward_keys:
            yield (
                "gdpo_reward_keys=[]: adv_estimator='gdpo' treats the components of the reward one by one; name them, "
                "or use grpo"
            )
        if self.adv_estimator in USES_SUM_PI_SQUARED and self.rollout_correction.bypass_mode:
            yield (
                f"rollout_correction.bypass_mode=True: adv_estimator={self.adv_estimator!r} needs the policy's own "
                "probabilities, which bypass mode does not compute; use bypass_mode=False"
            )
        if self.gdpo_reward_weights and len(self.gdpo_reward_weights) != len(self.gdpo_reward_keys):
            yield (
                f"gdpo_reward_weights={self.gdpo_reward_weights}: needs one weight for each of the "
                f"{len(self.gdpo_reward_keys)} gdpo_reward_keys"
            )
        if self.adv_estimator in ("gdpo", "maxrl") and self.use_kl_in_reward:
            yield (
                f"use_kl_in_reward=True: adv_estimator={self.adv_estimator!r} has no place for a KL penalty in the "
                "reward; use actor_rollout_ref.actor.use_kl_loss=True"
            )

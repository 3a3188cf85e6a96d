"""Advantages and KL control.

The names of the built-in estimators and losses are repeated here, because this package imports no torch; a test
holds them equal to the registries.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.actor import KL_PENALTIES, POLICY_LOSSES
from verl.config.base import Config, opt, section
from verl.config.correction import RolloutCorrectionConfig
from verl.config.filter_groups import FilterGroupsConfig

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
# POLICY_LOSSES live beside the actor section, which names them in its help.
__all__ = ["ADV_ESTIMATORS", "POLICY_LOSSES", "NEEDS_GROUPS", "NEEDS_VALUES", "AlgorithmConfig", "KLCtrlConfig"]
NEEDS_VALUES = frozenset({"gae"})
NEEDS_GROUPS = frozenset(
    {"grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg"}
)


@dataclass
class KLCtrlConfig(Config):
    """Weight of the KL penalty in the reward."""

    type: str = opt("fixed", "Fixed weight, or one that follows target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "Weight of the penalty (adaptive: at the start).", ge=0)
    horizon: int = opt(10000, "Adaptive: how slowly the weight follows, in samples.", ge=1)
    target_kl: float = opt(0.1, "Adaptive: KL divergence to hold, in nats per sequence.", gt=0)


@dataclass
class AlgorithmConfig(Config):
    """Advantages and KL control."""

    adv_estimator: str = opt("gae", f"Advantage estimator: {', '.join(ADV_ESTIMATORS)}, or one that a plug-in adds.")
    gamma: float = opt(1.0, "Discount per token.", ge=0, le=1)
    lam: float = opt(1.0, "Lambda of GAE.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = opt(
        True, "GRPO: divide by the standard deviation of the group's scores; False is the form of Dr-GRPO."
    )
    use_kl_in_reward: bool = opt(False, "Subtract the KL divergence from the reference policy from the reward.")
    kl_penalty: str = opt("kl", "Estimator of the KL divergence in the reward.", choices=KL_PENALTIES)
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "Weight of the KL penalty in the reward.")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling of prompts (DAPO).")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "Correction for a rollout that is stale or computes differently."
    )

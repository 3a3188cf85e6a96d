"""The policy that is trained, and its reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.base import Config, MicroBatch, opt, section
from verl.config.checkpoint import CheckpointConfig
from verl.config.correction import IS_LEVELS, LOSS_TYPES, RS_LEVELS
from verl.config.fsdp import FSDPConfig
from verl.config.megatron import MegatronConfig
from verl.config.model import ModelConfig
from verl.config.optim import OptimConfig
from verl.config.rollout import RolloutConfig

POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "gspo_token",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "bypass_mode",
)
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
KL_PENALTIES = _KL + tuple(f"{name}+" for name in _KL)
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


STRATEGIES = ("fsdp", "fsdp2", "megatron")


def strategy_problems(strategy: str) -> Iterator[str]:
    """Yield the problem of a training engine that is not there."""
    if strategy not in STRATEGIES:
        yield (
            f"strategy={strategy!r}: there is no such engine; use 'fsdp' or 'fsdp2', which both mean the FSDP2 engine, "
            "or 'megatron'"
        )


@dataclass
class PolicyLossConfig(Config):
    """Which policy loss."""

    loss_mode: str = opt("vanilla", f"Policy loss: {', '.join(POLICY_LOSSES)}, or one that a plug-in adds.")
    clip_cov_ratio: float = opt(2e-4, "clip_cov: share of the tokens that are dropped.", gt=0, le=1)
    clip_cov_lb: float = opt(1.0, "clip_cov: least covariance of a token that may be dropped.")
    clip_cov_ub: float = opt(5.0, "clip_cov: largest covariance of a token that may be dropped.")
    kl_cov_ratio: float = opt(2e-4, "kl_cov: share of the tokens that are penalised.", gt=0, le=1)
    ppo_kl_coef: float = opt(0.1, "kl_cov: weight of the penalty.", ge=0)
    dro_beta: float = opt(0.05, "dro: weight of the squared log ratio.", ge=0)
    bypass_loss_type: str = opt(
        "ppo_clip",
        "bypass_mode: ppo_clip = clipped ratio to the rollout policy; reinforce = weighted policy gradient.",
        choices=LOSS_TYPES,
        inherits=f"{CORRECTION}.loss_type",
    )
    bypass_is: str | None = opt(
        None,
        "bypass_mode, reinforce: level of the importance weight; not given = no weight.",
        choices=IS_LEVELS,
        inherits=f"{CORRECTION}.rollout_is",
    )
    bypass_is_threshold: float = opt(
        2.0,
        "bypass_mode, reinforce: largest importance weight.",
        gt=0,
        inherits=f"{CORRECTION}.rollout_is_threshold",
    )
    bypass_is_threshold_lower: float | None = opt(
        None,
        "bypass_mode, reinforce, icepop: smallest weight that is kept; not given = 1 / bypass_is_threshold.",
        gt=0,
        inherits=f"{CORRECTION}.rollout_is_threshold_lower",
    )
    bypass_rs: str | None = opt(
        None,
        "bypass_mode: level of rejection; not given = no rejection.",
        choices=RS_LEVELS,
        inherits=f"{CORRECTION}.rollout_rs",
    )
    bypass_rs_threshold: float | None = opt(
        None,
        "bypass_mode: largest ratio that is not rejected; not given = bypass_is_threshold.",
        gt=0,
        inherits=f"{CORRECTION}.rollout_rs_threshold",
    )
    bypass_rs_threshold_lower: float | None = opt(
        None,
        "bypass_mode: smallest ratio that is not rejected; not given = 1 / bypass_rs_threshold.",
        gt=0,
        inherits=f"{CORRECTION}.rollout_rs_threshold_lower",
    )
    bypass_veto_threshold: float | None = opt(
        None,
        "bypass_mode: reject a response with a token whose ratio is below this; not given = no veto.",
        gt=0,
        inherits=f"{CORRECTION}.rollout_token_veto_threshold",
    )

    def problems(self) -> Iterator[str]:
        if self.clip_cov_lb >= self.clip_cov_ub:
            yield (
                f"clip_cov_lb={self.clip_cov_lb}: must be below clip_cov_ub={self.clip_cov_ub}; tokens are dropped "
                "whose covariance lies between them"
            )


@dataclass
class ActorConfig(Config):
    """Training of the policy."""

    # Counts over the whole mini-batch, set per mini-batch by with_batch_info(); not a key.
    global_batch_info: ClassVar[Mapping[str, Any]] = {}

    strategy: str = opt("fsdp", "Training engine: megatron, or fsdp and fsdp2, which both mean the FSDP2 engine.")
    ppo_mini_batch_size: int = opt(256, "Prompts per optimizer step, over all ranks (times rollout.n samples).", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = opt(
        None,
        "Samples per rank in one forward and backward pass; not given = the rank's whole mini-batch.",
        ge=1,
        affects="speed",
    )
    ppo_micro_batch_size: int | None = opt(
        None, "Old form of ppo_micro_batch_size_per_gpu: samples over all ranks.", ge=1, affects="speed"
    )
    use_dynamic_bsz: bool = opt(
        False,
        "Fill micro-batches up to ppo_max_token_len_per_gpu tokens; micro-batch sizes then play no part.",
        affects="speed",
    )
    ppo_max_token_len_per_gpu: int = opt(
        16384, "Tokens per rank in one pass with use_dynamic_bsz.", ge=1, affects="speed"
    )
    ppo_epochs: int = opt(1, "Passes over the rollout batch.", ge=1)
    shuffle: bool = opt(False, "Shuffle the rollout batch before it is split into mini-batches.")
    clip_ratio: float = opt(0.2, "Clip range of the probability ratio.", ge=0)
    clip_ratio_low: float = opt(0.2, "Lower clip range.", ge=0, inherits=f"{ACTOR}.clip_ratio")
    clip_ratio_high: float = opt(0.2, "Upper clip range.", ge=0, inherits=f"{ACTOR}.clip_ratio")
    clip_ratio_c: float = opt(3.0, "Dual-clip bound on the loss of tokens with negative advantage.", gt=1)
    tau_pos: float = opt(1.0, "sapo: steepness of the gate for tokens with positive advantage.", gt=0)
    tau_neg: float = opt(1.05, "sapo: steepness of the gate for the other tokens.", gt=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "Which policy loss.")
    loss_agg_mode: str = opt("token-mean", "How token losses become one number.", choices=LOSS_AGG_MODES)
    loss_scale_factor: int | None = opt(
        None, "Divisor of seq-mean-token-sum-norm, in tokens; not given = the response length.", ge=1
    )
    calculate_sum_pi_squared: bool | None = opt(
        None,
        "Compute the sum of squared probabilities with the old log-probs; not given = if the estimator uses it.",
    )
    skip_old_log_prob: bool = opt(
        False,
        "Take the old log-probabilities from the update itself instead of a pass of their own; where a step is one "
        "mini-batch and one epoch they are equal.",
    )
    entropy_coeff: float = opt(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = opt(False, "Add the KL divergence from the reference policy to the loss.")
    kl_loss_coef: float = opt(0.001, "Weight of the KL loss.", ge=0)
    kl_loss_type: str = opt("low_var_kl", "Estimator of the KL loss.", choices=KL_PENALTIES)
    optim: OptimConfig = section(OptimConfig, "Optimizer of the policy.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding, offload and numeric types of the policy.")
    megatron: MegatronConfig = section(MegatronConfig, "The same with strategy=megatron.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Contents of the policy's checkpoint.", affects="place")

    def problems(self) -> Iterator[str]:
        yield from strategy_problems(self.strategy)
        yield from self.optim.engine_problems("optim", self.strategy)

    def micro_batch(self) -> MicroBatch:
        """Return how an update splits a rank's mini-batch."""
        if self.use_dynamic_bsz:
            return MicroBatch(None, self.ppo_max_token_len_per_gpu)
        return MicroBatch(self.ppo_micro_batch_size_per_gpu, None)

    def with_batch_info(self, info: Mapping[str, Any]) -> ActorConfig:
        """Return a copy whose ``global_batch_info`` is ``info``, as registered policy losses read it.

        Args:
            info: ``dp_size``, ``batch_num_tokens``, ``global_batch_size``, ``loss_scale_factor`` of the mini-batch.
        """
        other = copy.copy(self)
        object.__setattr__(other, "global_batch_info", dict(info))
        return other


@dataclass
class RefConfig(Config):
    """The frozen reference policy."""

    strategy: str = opt("fsdp", "Engine of the reference.", inherits=f"{ACTOR}.strategy")
    fsdp_config: FSDPConfig = section(
        FSDPConfig, "Sharding, offload and numeric types of the reference.", inherits=f"{ACTOR}.fsdp_config"
    )
    megatron: MegatronConfig = section(MegatronConfig, "The same with strategy=megatron.", inherits=f"{ACTOR}.megatron")
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None,
        "Samples per rank in one forward pass; not given = all at once.",
        ge=1,
        inherits="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        affects="speed",
    )
    log_prob_micro_batch_size: int | None = opt(
        None, "Old form of log_prob_micro_batch_size_per_gpu: samples over all ranks.", ge=1, affects="speed"
    )
    log_prob_use_dynamic_bsz: bool = opt(
        False,
        "Fill micro-batches up to log_prob_max_token_len_per_gpu tokens.",
        inherits="actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        affects="speed",
    )
    log_prob_max_token_len_per_gpu: int = opt(
        16384,
        "Tokens per rank in one forward pass with log_prob_use_dynamic_bsz.",
        ge=1,
        inherits="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        affects="speed",
    )

    def problems(self) -> Iterator[str]:
        yield from strategy_problems(self.strategy)

    def log_prob_micro_batch(self) -> MicroBatch:
        """Return how the reference splits a rank's batch."""
        if self.log_prob_use_dynamic_bsz:
            return MicroBatch(None, self.log_prob_max_token_len_per_gpu)
        return MicroBatch(self.log_prob_micro_batch_size_per_gpu, None)


@dataclass
class ActorRolloutRefConfig(Config):
    """Policy, generation and reference, which share worker processes."""

    hybrid_engine: bool = opt(True, "Training and generation share processes and parameters.")
    nccl_timeout: int = opt(600, "Time limit of a collective operation, in seconds.", ge=1, affects="limit")
    model: ModelConfig = section(ModelConfig, "The policy's model.")
    actor: ActorConfig = section(ActorConfig, "Training of the policy.")
    rollout: RolloutConfig = section(RolloutConfig, "Generation.")
    ref: RefConfig = section(RefConfig, "The frozen reference policy.")

    def problems(self) -> Iterator[str]:
        if not self.hybrid_engine:
            yield (
                "hybrid_engine=False: leave it True. Generation in processes of its own is rollout.mode=async; roles "
                "on devices of their own are not in this version"
            )
        if self.rollout.lora_merge is not None and self.model.lora_rank == 0:
            yield (
                f"rollout.lora_merge={self.rollout.lora_merge}: there is no adapter (model.lora_rank=0); leave it out, "
                "or give model.lora_rank"
            )

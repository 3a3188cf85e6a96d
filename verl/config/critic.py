"""The value function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.actor import ACTOR, LOSS_AGG_MODES, strategy_problems
from verl.config.base import Config, MicroBatch, opt, section
from verl.config.checkpoint import CheckpointConfig
from verl.config.fsdp import FSDPConfig
from verl.config.megatron import MegatronConfig
from verl.config.model import ModelConfig
from verl.config.optim import OptimConfig


@dataclass
class CriticConfig(Config):
    """Training of the value function."""

    enable: bool | None = opt(None, "Train a critic; not given = when the advantage estimator needs values.")
    strategy: str = opt("fsdp", "Training engine of the critic.", inherits=f"{ACTOR}.strategy")
    model: ModelConfig = section(
        ModelConfig,
        "The critic's model: the body of path with a value head; path defaults to the policy's.",
        inherits="actor_rollout_ref.model",
        inherit_only=(
            "path",
            "tokenizer_path",
            "trust_remote_code",
            "use_shm",
            "external_lib",
            "enable_gradient_checkpointing",
            "enable_activation_offload",
            "use_remove_padding",
        ),
    )
    ppo_mini_batch_size: int = opt(
        256, "Prompts per optimizer step, over all ranks.", ge=1, inherits=f"{ACTOR}.ppo_mini_batch_size"
    )
    ppo_micro_batch_size_per_gpu: int | None = opt(
        None,
        "Samples per rank in one forward and backward pass; not given = the rank's whole mini-batch.",
        ge=1,
        inherits=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        affects="speed",
    )
    ppo_micro_batch_size: int | None = opt(
        None, "Old form of ppo_micro_batch_size_per_gpu: samples over all ranks.", ge=1, affects="speed"
    )
    forward_micro_batch_size_per_gpu: int | None = opt(
        None,
        "Samples per rank in one forward pass for the values.",
        ge=1,
        inherits="critic.ppo_micro_batch_size_per_gpu",
        affects="speed",
    )
    forward_micro_batch_size: int | None = opt(
        None, "Old form of forward_micro_batch_size_per_gpu: samples over all ranks.", ge=1, affects="speed"
    )
    use_dynamic_bsz: bool = opt(
        False, "Fill micro-batches up to a number of tokens.", inherits=f"{ACTOR}.use_dynamic_bsz", affects="speed"
    )
    ppo_max_token_len_per_gpu: int = opt(
        16384,
        "Tokens per rank in one pass with use_dynamic_bsz.",
        ge=1,
        inherits=f"{ACTOR}.ppo_max_token_len_per_gpu",
        affects="speed",
    )
    forward_max_token_len_per_gpu: int = opt(
        16384,
        "Tokens per rank in one forward pass for the values with use_dynamic_bsz.",
        ge=1,
        inherits="critic.ppo_max_token_len_per_gpu",
        affects="speed",
    )
    ppo_epochs: int = opt(1, "Passes over the rollout batch.", ge=1, inherits=f"{ACTOR}.ppo_epochs")
    shuffle: bool = opt(False, "Shuffle the rollout batch before the split.", inherits=f"{ACTOR}.shuffle")
    cliprange_value: float = opt(0.5, "Clip range of the value around the old value.", ge=0)
    loss_agg_mode: str = opt(
        "token-mean",
        "How token losses become one number.",
        choices=LOSS_AGG_MODES,
        inherits=f"{ACTOR}.loss_agg_mode",
    )
    loss_scale_factor: int | None = opt(
        None,
        "Divisor of seq-mean-token-sum-norm, in tokens; not given = the response length.",
        ge=1,
        inherits=f"{ACTOR}.loss_scale_factor",
    )
    optim: OptimConfig = section(OptimConfig, "Optimizer of the critic.", lr=1e-5)
    fsdp_config: FSDPConfig = section(
        FSDPConfig, "Sharding, offload and numeric types of the critic.", inherits=f"{ACTOR}.fsdp_config"
    )
    megatron: MegatronConfig = section(MegatronConfig, "The same with strategy=megatron.", inherits=f"{ACTOR}.megatron")
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, "Contents of the critic's checkpoint.", inherits=f"{ACTOR}.checkpoint", affects="place"
    )

    def problems(self) -> Iterator[str]:
        if self.enable is not False:
            yield from strategy_problems(self.strategy)
            yield from self.optim.engine_problems("optim", self.strategy)

    def micro_batch(self) -> MicroBatch:
        """Return how an update splits a rank's mini-batch."""
        if self.use_dynamic_bsz:
            return MicroBatch(None, self.ppo_max_token_len_per_gpu)
        return MicroBatch(self.ppo_micro_batch_size_per_gpu, None)

    def forward_micro_batch(self) -> MicroBatch:
        """Return how a rank's batch is split when values are computed."""
        if self.use_dynamic_bsz:
            return MicroBatch(None, self.forward_max_token_len_per_gpu)
        return MicroBatch(self.forward_micro_batch_size_per_gpu, None)

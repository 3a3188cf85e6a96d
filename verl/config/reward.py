"""Reward functions and the reward model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.actor import ACTOR, strategy_problems
from verl.config.base import Config, MicroBatch, opt, section
from verl.config.checkpoint import CheckpointConfig
from verl.config.fsdp import FSDPConfig
from verl.config.megatron import MegatronConfig
from verl.config.model import ModelConfig
from verl.config.optim import OptimConfig

KINDS = ("classifier", "implicit")
UPDATES = ("before", "after", "none")
CONSEQUENCES = ("stop", "penalise", "drop_sample", "drop_group")
SPELLINGS = {"fail": "stop", "score": "penalise", "penalize": "penalise", "abstain": "drop_sample"}


@dataclass
class CustomRewardFunctionConfig(Config):
    """A reward function in a file of the user."""

    path: str | None = opt(
        None, "Python file with the function; not given = the built-in scorers by data_source.", affects="file"
    )
    name: str = opt("compute_score", "Name of the function in the file.")
    reward_kwargs: dict[str, Any] = opt({}, "Keyword arguments given to every call of the function.")


@dataclass
class RewardManagerConfig(Config):
    """Which reward manager."""

    name: str = opt("naive", "Name of the reward manager.")


@dataclass
class SandboxConfig(Config):
    """Where and how the programs that a policy writes are tested."""

    url: str | None = opt(
        None,
        "Sandbox Fusion server that runs programs, its run_code address; not given = on this machine.",
        affects="place",
    )
    isolation: str = opt(
        "auto",
        "Means that confine programs on this machine; auto takes the strongest that the kernel allows.",
        choices=("auto", "namespaces", "landlock", "guard"),
        affects="limit",
    )
    timeout_s: float = opt(10.0, "CPU seconds of one test; twice that in wall-clock time.", gt=0)
    memory_limit_mb: int = opt(1024, "Memory of a program, in MiB.", ge=64)
    max_concurrent: int | None = opt(
        None,
        "Programs at the same time from one process; not given = one per CPU here, 64 on a server.",
        ge=1,
        affects="speed",
    )
    continuous: bool = opt(False, "Score the share of tests that pass, instead of all or nothing.")


@dataclass
class ScoringConfig(Config):
    """How a function scores responses."""

    custom_reward_function: CustomRewardFunctionConfig = section(
        CustomRewardFunctionConfig, "A reward function in a file of the user."
    )
    sandbox: SandboxConfig = section(SandboxConfig, "Where and how the programs that a policy writes are tested.")
    num_workers: int = opt(1, "Processes that score responses; 1 = in the controller.", ge=1, affects="speed")
    max_concurrent: int | None = opt(
        None,
        "Calls at the same time: of an async function (256 unless given), of a manager that streams (8 unless given).",
        ge=1,
        affects="speed",
    )
    max_rpm: float | None = opt(
        None, "Calls of the reward function started per minute, evenly spaced.", gt=0, affects="limit"
    )
    timeout_s: float | None = opt(
        300.0,
        "Time limit of one call of the reward function, in seconds; null = none, so that a call may hang the run.",
        gt=0,
        affects="limit",
    )
    max_retries: int = opt(
        0, "Further calls after an error or a time-out, before on_error or on_timeout applies.", ge=0, affects="limit"
    )
    retry_wait_s: float = opt(1.0, "Seconds before the first further call; doubles with each.", ge=0, affects="limit")
    on_error: str = opt(
        "stop",
        "What a call that raises or returns no finite number means: the run ends, the sample gets error_score, it is "
        "left out, or all samples of its prompt are.",
        choices=CONSEQUENCES,
        spellings=SPELLINGS,
        affects="limit",
    )
    on_timeout: str = opt(
        "stop",
        "What a call beyond timeout_s means.",
        choices=CONSEQUENCES,
        spellings=SPELLINGS,
        inherits="reward.on_error",
        affects="limit",
    )
    on_abstain: str = opt(
        "drop_sample",
        "What it means that the function gives no score on purpose.",
        choices=CONSEQUENCES,
        spellings=SPELLINGS,
    )
    error_score: float = opt(0.0, "Score of a sample with the consequence penalise.")
    max_failed_fraction: float = opt(
        0.5,
        "Part of a batch whose scoring may fail before the run stops, whatever on_error says.",
        ge=0,
        le=1,
        affects="limit",
    )


@dataclass
class RewardConfig(ScoringConfig):
    """How responses are scored by functions."""

    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "Which reward manager.")
    reward_kwargs: dict[str, Any] = opt({}, "Keyword arguments of the reward manager's constructor.")


@dataclass
class RewardModelConfig(Config):
    """A model that scores responses, or the tokens of responses."""

    enable: bool = opt(False, "Score responses with a model.")
    kind: str = opt(
        "classifier",
        "classifier = a frozen sequence-classification model scores responses in place of the reward function; "
        "implicit = a language model learns the outcomes and rewards tokens, for adv_estimator=prime.",
        choices=KINDS,
    )
    strategy: str = opt("fsdp", "Engine of the reward model.", inherits=f"{ACTOR}.strategy")
    model: ModelConfig = section(ModelConfig, "The reward model; its own chat template is applied.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding, offload and numeric types of the reward model.")
    megatron: MegatronConfig = section(MegatronConfig, "The same with strategy=megatron.", inherits=f"{ACTOR}.megatron")
    micro_batch_size_per_gpu: int | None = opt(
        None, "Samples per rank in one forward pass; not given = all at once.", ge=1, affects="speed"
    )
    micro_batch_size: int | None = opt(
        None, "Old form of micro_batch_size_per_gpu: samples over all ranks.", ge=1, affects="speed"
    )
    use_dynamic_bsz: bool = opt(
        False,
        "Fill micro-batches up to forward_max_token_len_per_gpu tokens.",
        inherits="critic.use_dynamic_bsz",
        affects="speed",
    )
    forward_max_token_len_per_gpu: int = opt(
        16384,
        "Tokens per rank in one forward pass with use_dynamic_bsz.",
        ge=1,
        inherits="critic.forward_max_token_len_per_gpu",
        affects="speed",
    )
    max_length: int | None = opt(
        None, "Largest conversation given to the model, in its tokens; not given = prompt plus response length.", ge=1
    )

    ref_path: str | None = opt(
        None,
        "implicit: model whose log-probabilities the rewards are relative to; not given = model.path.",
        affects="model",
    )
    beta: float = opt(0.05, "implicit: scale of the token rewards.", gt=0)
    update: str = opt(
        "before",
        "implicit: learn a batch's outcomes before rewarding its tokens, after it, or not at all.",
        choices=UPDATES,
    )
    mini_batch_size: int = opt(
        256,
        "implicit: prompts per optimizer step, over all ranks (times rollout.n samples).",
        ge=1,
        inherits=f"{ACTOR}.ppo_mini_batch_size",
    )
    optim: OptimConfig = section(OptimConfig, "implicit: optimizer of the model.")
    checkpoint: CheckpointConfig = section(
        CheckpointConfig,
        "implicit: contents of the model's checkpoint.",
        inherits=f"{ACTOR}.checkpoint",
        affects="place",
    )

    @property
    def implicit(self) -> bool:
        """Whether the model rewards tokens and learns."""
        return self.enable and self.kind == "implicit"

    def problems(self) -> Iterator[str]:
        if not self.enable:
            return
        yield from strategy_problems(self.strategy)
        yield from self.optim.engine_problems("optim", self.strategy)
        if not self.model.path:
            wanted = "causal language" if self.implicit else "sequence-classification"
            yield f"model.path=None: reward_model.enable=True needs a {wanted} model, a directory or id"

    def micro_batch(self) -> MicroBatch:
        """Return how a rank's batch is split."""
        if self.use_dynamic_bsz:
            return MicroBatch(None, self.forward_max_token_len_per_gpu)
        return MicroBatch(self.micro_batch_size_per_gpu, None)

"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.base import Config, opt


@dataclass
class OptimConfig(Config):
    """Optimizer of one trained model."""

    optimizer: str = opt("AdamW", "Optimizer.", choices=("AdamW",), spellings={"adamw": "AdamW"})
    lr: float = opt(1e-6, "Peak learning rate.", ge=0)
    weight_decay: float = opt(0.01, "Decoupled weight decay.", ge=0)
    betas: list[float] = opt([0.9, 0.999], "Decay of the first and second moment estimates.", ge=0)
    eps: float = opt(1e-8, "Added to the denominator of the update for stability.", gt=0)
    clip_grad: float = opt(1.0, "Largest norm of the gradient over all parameters and ranks; 0 = no clipping.", ge=0)
    lr_scheduler_type: str = opt(
        "constant",
        "Shape of the learning rate after warm-up.",
        choices=("constant", "cosine", "linear"),
    )
    lr_warmup_steps: int = opt(-1, "Linear warm-up, in optimizer steps; negative = use lr_warmup_steps_ratio.", ge=-1)
    lr_warmup_steps_ratio: float = opt(0.0, "Linear warm-up as a part of total_training_steps.", ge=0, le=1)
    min_lr_ratio: float = opt(0.0, "Learning rate at the end of the decay, as a part of lr.", ge=0, le=1)
    num_cycles: float = opt(0.5, "Cosine waves over the decay; 0.5 falls from lr to the minimum once.", gt=0)
    total_training_steps: int | None = opt(
        None, "Optimizer steps of the whole run; filled by the trainer when not given.", ge=1, affects="length"
    )
    lr_decay_steps: int | None = opt(
        None, "Step at which the decay reaches its minimum; not given = total_training_steps.", ge=1
    )

    override_optimizer_config: dict[str, Any] = opt(
        {},
        "Fields of Megatron-core's OptimizerConfig that say how its state is kept, for example "
        "use_precision_aware_optimizer or optimizer_cpu_offload; only with strategy=megatron.",
    )

    def problems(self) -> Iterator[str]:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            yield f"betas={self.betas!r}: must be two numbers in [0, 1)"
        if self.lr_decay_steps is not None and self.lr_warmup_steps >= self.lr_decay_steps > 0:
            yield (
                f"lr_decay_steps={self.lr_decay_steps}: must be larger than lr_warmup_steps={self.lr_warmup_steps}, "
                "because the decay starts after the warm-up"
            )

    def engine_problems(self, where: str, strategy: str) -> Iterator[str]:
        """Yield what another engine than the chosen one reads.

        Args:
            where: dotted path of this section.
            strategy: the engine.
        """
        if self.override_optimizer_config and strategy != "megatron":
            yield (
                f"{where}.override_optimizer_config={self.override_optimizer_config!r}: sets fields of Megatron's "
                f"optimizer, and strategy is {strategy!r}; leave it out (fsdp_config.optimizer_offload keeps the state "
                "in host memory)"
            )

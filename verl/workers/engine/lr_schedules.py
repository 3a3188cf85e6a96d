"""Learning-rate schedules as pure functions of the step number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config import OptimConfig


class LRSchedule:
    """Factor on the peak learning rate for the n-th step, n from 0.

    Warm-up over w steps rises linearly and reaches the peak at its last step: (n+1)/w, so no step is wasted at zero.
    After it, with x the part of the way from w to the end of the decay and m = ``min_lr_ratio``:

    - ``constant``: 1
    - ``linear``: 1 - (1-m) x
    - ``cosine``: m + (1-m) (1 + cos(2 pi c x)) / 2, with c = ``num_cycles``

    Beyond the end the last value stays.

    Raises:
        ConfigError: the shape needs the number of steps and none is known.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.kind = config.lr_scheduler_type
        self.peak = float(config.lr)
        self.min_ratio = float(config.min_lr_ratio)
        self.cycles = float(config.num_cycles)
        total = config.total_training_steps or 0
        warmup = config.lr_warmup_steps
        if warmup < 0:
            if config.lr_warmup_steps_ratio > 0 and not total:
                raise ConfigError(
                    f"optim.lr_warmup_steps_ratio={config.lr_warmup_steps_ratio} is a part of the total number of "
                    "steps, which is not known; set optim.total_training_steps or optim.lr_warmup_steps"
                )
            warmup = int(config.lr_warmup_steps_ratio * total)
        self.warmup = warmup
        self.end = config.lr_decay_steps or total
        if self.kind not in ("constant", "linear", "cosine"):
            raise ConfigError(f"optim.lr_scheduler_type={self.kind!r}; use constant, linear or cosine")
        if self.kind != "constant" and not self.end:
            raise ConfigError(
                f"optim.lr_scheduler_type={self.kind} needs the number of steps; set optim.total_training_steps or "
                "optim.lr_decay_steps, or use constant"
            )

    def factor(self, step: int) -> float:
        """Factor for the step with number ``step`` (from 0)."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        x = min(1.0, (step - self.warmup) / max(1, self.end - self.warmup))
        if self.kind == "linear":
            return 1.0 - (1.0 - self.min_ratio) * x
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * self.cycles * x))
        return self.min_ratio + (1.0 - self.min_ratio) * wave

    def lr(self, step: int) -> float:
        """Learning rate of the step with number ``step`` (from 0)."""
        return self.peak * self.factor(step)

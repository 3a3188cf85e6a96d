"""Learning-rate schedules on literal numbers."""

from __future__ import annotations

import pytest

from verl.config import OptimConfig
from verl.errors import ConfigError
from verl.workers.engine.lr_schedules import LRSchedule


def test_constant_with_warmup_reaches_the_peak_at_its_last_step() -> None:
    schedule = LRSchedule(OptimConfig(lr=2.0, lr_warmup_steps=4))
    assert [schedule.lr(n) for n in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_falls_to_the_minimum_and_stays() -> None:
    schedule = LRSchedule(
        OptimConfig(lr=1.0, lr_scheduler_type="cosine", min_lr_ratio=0.1, lr_warmup_steps=0, total_training_steps=4)
    )
    values = [schedule.lr(n) for n in (0, 1, 2, 3, 4, 9)]
    assert values == pytest.approx([1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1, 0.1], abs=1e-6)


def test_linear_with_a_ratio_of_warmup() -> None:
    schedule = LRSchedule(
        OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps_ratio=0.2, total_training_steps=10)
    )
    assert [schedule.lr(n) for n in (0, 1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_decay_steps_replace_the_total() -> None:
    schedule = LRSchedule(OptimConfig(lr=1.0, lr_scheduler_type="linear", total_training_steps=100, lr_decay_steps=10))
    assert schedule.lr(5) == pytest.approx(0.5)
    assert schedule.lr(50) == 0.0


def test_a_shape_that_needs_the_number_of_steps_says_so() -> None:
    with pytest.raises(ConfigError, match="total_training_steps"):
        LRSchedule(OptimConfig(lr_scheduler_type="cosine"))
    with pytest.raises(ConfigError, match="lr_warmup_steps_ratio=0.1"):
        LRSchedule(OptimConfig(lr_warmup_steps_ratio=0.1))

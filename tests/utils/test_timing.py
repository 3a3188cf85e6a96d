"""Seconds by name and estimates of the rest."""

from __future__ import annotations

import pytest

from verl.utils import timing
from verl.utils.timing import EtaEstimator, StepTimer, format_duration, marked_timer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_phases_lie_inside_each_other_and_repeat(clock: Clock) -> None:
    timer = StepTimer()
    with timer("step"):
        with timer("gen"):
            clock.now += 2.0
        clock.now += 0.5
        with timer("gen"):
            clock.now += 1.0
    assert timer.seconds == {"gen": 3.0, "step": 3.5}
    assert timer.metrics() == {"timing_s/gen": 3.0, "timing_s/step": 3.5}


def test_time_counts_when_the_block_raises(clock: Clock) -> None:
    seconds: dict[str, float] = {}
    with pytest.raises(RuntimeError), marked_timer("gen", seconds):
        clock.now += 4.0
        raise RuntimeError
    assert seconds == {"gen": 4.0}


def test_the_slow_first_step_is_forgotten() -> None:
    eta = EtaEstimator(total_steps=10, window=3)
    assert eta.remaining_seconds(0) is None
    eta.update(100.0)
    assert eta.remaining_seconds(1) == 900.0  # all that is known
    eta.update(2.0)
    assert eta.remaining_seconds(2) == 16.0
    eta.update(4.0)
    assert eta.remaining_seconds(3) == 21.0
    eta.update(6.0)
    eta.update(8.0)  # the window holds 4, 6, 8
    assert eta.remaining_seconds(5) == 30.0
    assert eta.remaining_seconds(11) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "--:--"), (0, "0:00"), (75, "1:15"), (59.6, "1:00"), (3675, "1:01:15"), (200_000, "2d 7h"), (-3, "0:00")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text

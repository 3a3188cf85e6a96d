"""Seconds by name, and an estimate of when a run ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def marked_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the wall seconds of the block to ``timing_raw[name]``, also when the block raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


class StepTimer:
    """The phases of one step: ``with timer("gen"): ...``. Phases may lie inside each other and may repeat.

    Attributes:
        seconds: wall seconds by name, summed over repetitions.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time a block under ``name``."""
        return marked_timer(name, self.seconds)

    def metrics(self, prefix: str = "timing_s") -> dict[str, float]:
        """The seconds as metrics, ``timing_s/<name>``."""
        return {f"{prefix}/{name}": value for name, value in self.seconds.items()}


class EtaEstimator:
    """How long the remaining steps take, from the recent ones.

    The first step is slower than the rest (compilation, caches), so only the last ``window`` steps count, and the
    first is forgotten as soon as there are others.

    Args:
        total_steps: number of the last step.
        window: how many recent steps are averaged.
    """

    def __init__(self, total_steps: int, window: int = 20) -> None:
        self.total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=window)
        self._first_pending = True

    def update(self, step_seconds: float) -> None:
        """Report the duration of a finished step."""
        if len(self._recent) == 1 and self._first_pending:
            self._recent.clear()
            self._first_pending = False
        self._recent.append(step_seconds)

    def remaining_seconds(self, step: int) -> float | None:
        """Seconds left after ``step``; None before the first step is known."""
        if not self._recent:
            return None
        return max(0, self.total_steps - step) * sum(self._recent) / len(self._recent)


def format_duration(seconds: float | None) -> str:
    """``75`` -> ``1:15``, ``3675`` -> ``1:01:15``, ``200000`` -> ``2d 7h``; None -> ``--:--``."""
    if seconds is None:
        return "--:--"
    whole = max(0, round(seconds))
    if whole >= 48 * 3600:
        days, rest = divmod(whole, 86400)
        return f"{days}d {rest // 3600}h"
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"

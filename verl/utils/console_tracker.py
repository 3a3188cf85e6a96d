"""The lines of a run on the console."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape

from verl.utils.output import LenientText, printable
from verl.utils.timing import EtaEstimator, format_duration
from verl.utils.tracker import TRACKERS, RunInfo, Sample, Tracker

# ---------------------------------------------------------------------- console


@dataclass(frozen=True)
class _Column:
    """One number on the console line: the first of ``keys`` that a step has, under a short label."""

    label: str
    keys: tuple[str, ...]
    text: Callable[[float], str]


def _significant(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.1e}"


_COLUMNS = (
    _Column("reward", ("critic/rewards/mean", "critic/score/mean"), lambda v: f"{v:.3f}"),
    _Column("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), _significant),
    _Column("ppo_kl", ("actor/ppo_kl",), _significant),
    _Column("len", ("response_length/mean",), lambda v: f"{v:.1f}"),
    _Column("entropy", ("actor/entropy",), _significant),
    _Column("loss", ("train/loss",), _significant),
    _Column("grad", ("actor/grad_norm", "train/grad_norm"), _significant),
    _Column("vf", ("critic/vf_loss",), _significant),
    _Column("lr", ("actor/lr", "train/lr"), lambda v: f"{v:.1e}"),
    _Column("", ("timing_s/step", "perf/time_per_step"), lambda v: f"{v:.2f}s"),
    _Column("tok/s", ("perf/throughput",), lambda v: f"{v / 1000:.1f}k" if v >= 1000 else f"{v:.0f}"),
)


def _step_seconds(data: Mapping[str, Any]) -> float | None:
    value = data.get("timing_s/step", data.get("perf/time_per_step"))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def console_line(data: Mapping[str, Any], step: int, total_steps: int | None, eta_s: float | None) -> str:
    """The one line of a step: progress, remaining time and the numbers that tell whether it goes well."""
    parts = []
    if total_steps:
        width, share = 10, min(1.0, step / total_steps)
        filled = int(share * width)
        digits = len(str(total_steps))
        parts.append(f"step {step:>{digits}}/{total_steps} {'━' * filled}{'╌' * (width - filled)} {share:4.0%}")
        parts[0] += f" eta {format_duration(eta_s)}"
    else:
        parts.append(f"step {step}")
    score, reward = data.get("critic/score/mean"), data.get("critic/rewards/mean")
    if isinstance(score, int | float) and isinstance(reward, int | float) and score != reward:
        parts.append(f"score {score:.3f}")  # differs from the reward when a KL penalty is part of it
    for column in _COLUMNS:
        value = next((data[key] for key in column.keys if isinstance(data.get(key), int | float)), None)
        if value is None:
            continue
        number = column.text(value) if math.isfinite(value) else f"{value}!"
        if column.label.startswith("tok"):
            parts.append(f"{number} {column.label}")
        else:
            parts.append(f"{column.label} {number}".strip())
    return " │ ".join(parts)


class ConsoleTracker(Tracker):
    """A compact line per step, a line per validation, and sample tables; all other metrics go to other trackers."""

    def __init__(self, info: RunInfo, stream: TextIO | None = None) -> None:
        self._total = info.total_steps
        self._eta = EtaEstimator(info.total_steps or 0)
        # Not a terminal (a file, a pipe, a Ray worker): never wrap, a line is a line.
        self._console = Console(file=cast(TextIO, LenientText(stream)), highlight=False, soft_wrap=True)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        validation = {key: value for key, value in data.items() if key.startswith("val-core/")}
        if any(not key.startswith("val-") for key in data):
            seconds = _step_seconds(data)
            if seconds is not None:
                self._eta.update(seconds)
            eta = self._eta.remaining_seconds(step) if self._total else None
            self._print(console_line(data, step, self._total, eta))
        if validation:
            shown = ", ".join(f"{key.removeprefix('val-core/')} {_three(value)}" for key, value in validation.items())
            self._print(f"validation after step {step}: {shown}", style="bold")

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._print(f"samples after step {step}", style="bold")
        for number, sample in enumerate(samples, 1):
            for key, value in sample.items():
                text = str(value)
                self._print(f"  {number:>2} {key}: {text if len(text) <= 400 else text[:397] + '...'}")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(escape(printable(text)), style=style)


def _three(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else str(value)


@TRACKERS.register("console")
def _console(info: RunInfo) -> Tracker:
    return ConsoleTracker(info)

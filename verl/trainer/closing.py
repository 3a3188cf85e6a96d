"""What a training program says when it ends: how it went, what was kept and where, and the next command."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from verl import envs
from verl.checkpoint.failure import describe_state
from verl.config.trainer import RunConfig
from verl.trainer.health import HealthMonitor
from verl.trainer.run_record import CONFIG, RECORDS, command_words
from verl.utils.output import fitting
from verl.utils.telling import BOUNDARY
from verl.utils.timing import format_duration

logger = logging.getLogger(__name__)

_REWARD = "critic/rewards/mean"
_LOSS = "train/loss"


@dataclass
class Track:
    """First, best and last value of a metric."""

    first: tuple[int, float]
    best: tuple[int, float]
    last: tuple[int, float]

    def add(self, step: int, value: float, sign: float) -> None:
        """A further value; ``sign`` is 1 where large is good."""
        self.last = (step, value)
        if sign * value > sign * self.best[1]:
            self.best = (step, value)


@dataclass
class RunReport:
    """Follows a run by the metrics of its steps and describes its end.

    Args:
        trainer: section of the configuration.
        total_steps: of the whole run.
        next_step: command for the model that the run leaves; ``{model}`` stands for its directory.
        lr_key: dotted path of the learning rate.
        sample_dirs: where samples are written.
    """

    trainer: RunConfig
    total_steps: int
    next_step: str
    lr_key: str
    sample_dirs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.health = HealthMonitor(self.lr_key)
        self.started = time.monotonic()
        self.tracks: dict[str, Track] = {}
        self.trained = 0  # steps of this process

    def note(self, metrics: Mapping[str, object], step: int) -> None:
        """Take the metrics of a step or of a validation."""
        self.trained += any(name in metrics for name in ("training/global_step", "timing_s/step"))
        for name, value in metrics.items():
            followed = name in (_REWARD, _LOSS) or name.startswith("val-core/") or name in ("val/loss", "val/accuracy")
            if followed and isinstance(value, int | float):
                sign = -1.0 if name.endswith("loss") else 1.0
                point = (step, float(value))
                if name in self.tracks:
                    self.tracks[name].add(step, float(value), sign)
                else:
                    self.tracks[name] = Track(point, point, point)
        self.health.look(metrics, step)

    # ---- the text -----------------------------------------------------------------------------------------------

    def lines(self, step: int, *, root: Path, model: Path | None, checkpoint: Path | None, stopped: bool) -> list[str]:
        """The closing lines of a run that was not interrupted by an error; the last one names what to continue with.

        Args:
            step: the last one.
            root: of the run.
            model: the final model.
            checkpoint: the newest complete one of this run.
            stopped: ended before the last step, to be started again.
        """
        took = format_duration(time.monotonic() - self.started)
        begin = "stopped early" if stopped else "done"
        found = [f"{begin}: step {step} of {self.total_steps}, {self.trained} steps in this process, {took}"]
        found += self._numbers()
        found += self.health.summary()
        found += self._places(root, checkpoint)
        if stopped:
            return [*found, f"next: {self._again()}", describe_state(step + 1, checkpoint, self.trainer)]
        if model is not None:
            directory = model.absolute()
            return [*found, f"next: {self.next_step.format(model=shlex.quote(str(directory)))}", f"model: {directory}"]
        if checkpoint is not None:
            return [*found, f"no final model was written (trainer.save_final_model=False); checkpoint: {checkpoint}"]
        return [
            *found,
            "nothing of this run was kept: trainer.save_final_model=False and trainer.save_freq=-1 write neither a "
            "model nor a checkpoint",
        ]

    def _numbers(self) -> Iterator[str]:
        order = sorted(self.tracks.items(), key=lambda item: item[0] not in (_REWARD, _LOSS))
        for name, track in order:
            if name in (_REWARD, _LOSS):
                what = "reward" if name == _REWARD else "loss"
                (first, begin), (last, end) = track.first, track.last
                yield f"{what}: {begin:.3f} (step {first}) -> {end:.3f} (step {last})"
            else:
                yield (
                    f"validation {name.removeprefix('val-core/')}: best {track.best[1]:.3f} (step {track.best[0]}), "
                    f"last {track.last[1]:.3f} (step {track.last[0]})"
                )

    def _places(self, root: Path, checkpoint: Path | None) -> Iterator[str]:
        if checkpoint is not None:
            yield f"checkpoints: {checkpoint.parent}, the newest is {checkpoint.name}"
        if "file" in self.trainer.logger:
            yield f"metrics: {envs.get('VERL_FILE_LOGGER_PATH') or root / 'metrics.jsonl'}"
        if self.sample_dirs:
            yield f"samples: {', '.join(self.sample_dirs)}"
        if (root / CONFIG).exists():
            yield f"record: {', '.join(RECORDS)} in {root}"

    @staticmethod
    def _again() -> str:
        return shlex.join(command_words())


@contextmanager
def state_logged_on_failure(state: Callable[[], str]) -> Iterator[None]:
    """Say what is saved when an error ends the training.

    Args:
        state: what is saved, in one sentence.
    """
    try:
        yield
    except Exception:
        logger.warning("the run fails: %s", state())
        raise


def print_lines(lines: list[str]) -> None:
    """Print the closing lines on standard output."""
    with BOUNDARY.guard("console", "standard output"):
        sys.stdout.write(fitting("".join(f"{line}\n" for line in lines), sys.stdout.encoding))
        sys.stdout.flush()

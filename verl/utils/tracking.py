"""Where the numbers of a step go: the console, a file, TensorBoard, hosted trackers.

Packages of trackers load only when their tracker is asked for. A tracker that cannot start is an error, before any
work is done; one that fails later, or does not answer, never stops the run: that is reported and counted.
"""

from __future__ import annotations

import importlib
import logging
import math
import numbers
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TextIO, TypeVar

from rich.console import Console
from rich.markup import escape

from verl import envs
from verl.errors import ConfigError
from verl.utils.background import Courier
from verl.utils.json_text import dumps_json as dumps_json  # also known under this module
from verl.utils.logging import redact
from verl.utils.registry import Registry
from verl.utils.timing import EtaEstimator, format_duration

logger = logging.getLogger(__name__)

Sample = Mapping[str, Any]
R = TypeVar("R")


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run.

    Attributes:
        project_name: groups runs.
        experiment_name: names this run.
        config: the whole configuration as nested plain values, secrets already hidden.
        local_dir: directory of the run's outputs.
        total_steps: the last step, when known.
        run_ids: tracker -> the id under which it knows a run that is continued.
    """

    project_name: str
    experiment_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    local_dir: Path = Path("outputs")
    total_steps: int | None = None
    run_ids: Mapping[str, str] = field(default_factory=dict)


class Tracker:
    """One destination. Subclasses override what they can do."""

    #: under which the destination knows the run; None where a run has no id
    run_id: str | None = None
    #: whether calls go to another machine, which may not answer
    hosted: ClassVar[bool] = False

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record a table of samples: rows of the same keys, for example prompt, response and score."""

    def finish(self) -> None:
        """Flush and close."""


#: longest wait for a hosted tracker: to start, to take the metrics of a step, and to end with all that it still holds
_START_S, _LOG_S, _FINISH_S = 300.0, 30.0, 300.0

TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry("tracker")


class Tracking:
    """All trackers of a run (``trainer.logger``).

    Args:
        project_name: ``trainer.project_name``.
        experiment_name: ``trainer.experiment_name``.
        loggers: names of trackers, see :data:`TRACKERS`.
        config: the configuration as nested plain values; values named like secrets are hidden before they leave.
        default_local_dir: directory of the run's outputs.
        total_steps: number of the last step, for the progress and the remaining time on the console.
        run_ids: from :meth:`state_dict` of the run that is continued, whose record then goes on.

    Raises:
        ConfigError: an unknown tracker, or one whose package is not installed.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        loggers: Sequence[str] | str = ("console",),
        config: Mapping[str, Any] | None = None,
        *,
        default_local_dir: str | Path = "outputs",
        total_steps: int | None = None,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        names = [loggers] if isinstance(loggers, str) else list(dict.fromkeys(loggers))
        info = RunInfo(
            project_name, experiment_name, redact(config or {}), Path(default_local_dir), total_steps, run_ids or {}
        )
        factories = {name: TRACKERS[name] for name in names}  # all names are checked before the first one starts
        self._couriers = {
            name: Courier(f"verl-{name}") for name, factory in factories.items() if getattr(factory, "hosted", False)
        }
        self._trackers = {name: self._start(name, factory, info) for name, factory in factories.items()}
        self._failures = Counter[str]()

    def _start(self, name: str, factory: Callable[[RunInfo], Tracker], info: RunInfo) -> Tracker:
        try:
            return self._call(name, partial(factory, info), _START_S)
        except TimeoutError as error:
            raise ConfigError(
                f"trainer.logger contains {name!r}, which does not start: {error}; is its server reachable from here?"
            ) from error

    def _call(self, name: str, call: Callable[[], R], limit_s: float) -> R:
        """Hosted trackers live in threads of their own, which their packages may tie runs to."""
        courier = self._couriers.get(name)
        return call() if courier is None else courier.do(call, limit_s)

    def state_dict(self) -> dict[str, str]:
        """Tracker -> id of this run there, for a checkpoint."""
        return {name: tracker.run_id for name, tracker in self._trackers.items() if tracker.run_id is not None}

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Send the metrics of a step to every tracker; numbers may be NumPy or torch scalars. No metrics, no record.

        Once a tracker has failed, ``tracking/failures`` counts the failures of all so far.
        """
        if not data:
            return
        plain = {name: _plain(value) for name, value in data.items()}
        if self._failures:
            plain["tracking/failures"] = self._failures.total()
        self._each("log", plain, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Send a table of samples to every tracker that can show one."""
        if samples:
            self._each("log_samples", samples, step)

    def finish(self) -> None:
        """Flush and close every tracker."""
        self._each("finish", limit_s=_FINISH_S)
        for name, count in self._failures.items():
            logger.warning("tracker %r failed %d times in this run and lacks what it was told then", name, count)
        for courier in self._couriers.values():
            courier.end()

    def _each(self, method: str, *args: Any, limit_s: float | None = None) -> None:
        limit = _LOG_S if limit_s is None else limit_s
        for name, tracker in self._trackers.items():
            try:
                self._call(name, partial(getattr(tracker, method), *args), limit)
            except Exception:  # a broken tracker must not cost the run
                self._failures[name] += 1
                if self._failures[name] == 1:
                    logger.warning("tracker %r failed; the run goes on, and counts its failures", name, exc_info=True)


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
        self._console = Console(file=stream, highlight=False, soft_wrap=True)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        validation = {key: value for key, value in data.items() if key.startswith("val-core/")}
        if any(not key.startswith("val-") for key in data):
            seconds = _step_seconds(data)
            if seconds is not None:
                self._eta.update(seconds)
            eta = self._eta.remaining_seconds(step) if self._total else None
            self._console.print(escape(console_line(data, step, self._total, eta)))
        if validation:
            shown = ", ".join(f"{key.removeprefix('val-core/')} {value:.3f}" for key, value in validation.items())
            self._console.print(escape(f"validation after step {step}: {shown}"), style="bold")

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._console.print(f"samples after step {step}", style="bold")
        for number, sample in enumerate(samples, 1):
            for key, value in sample.items():
                text = str(value)
                self._console.print(escape(f"  {number:>2} {key}: {text if len(text) <= 400 else text[:397] + '...'}"))


@TRACKERS.register("console")
def _console(info: RunInfo) -> Tracker:
    return ConsoleTracker(info)


# ---------------------------------------------------------------------- file


class FileTracker(Tracker):
    """JSON lines: ``{"step": 3, "data": {name: number}}``; samples go to ``<name>.samples.jsonl`` beside it.

    JSON has no NaN: non-finite numbers are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. A
    resumed run appends; where a step is there twice, the later line holds.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.samples_path = self.path.with_name(f"{self.path.stem}.samples.jsonl")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(
                f"the file tracker cannot write to {str(path)!r}: {error}; set VERL_FILE_LOGGER_PATH to a file in a "
                "writable directory"
            ) from error

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._append(self.path, {"step": step, "data": data})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._append(self.samples_path, {"step": step, "samples": list(samples)})

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        # One write per line and no open handle: readers and a second process see whole lines only.
        with path.open("a", encoding="utf-8") as handle:
            handle.write(dumps_json(record) + "\n")


@TRACKERS.register("file")
def _file(info: RunInfo) -> Tracker:
    return FileTracker(envs.get("VERL_FILE_LOGGER_PATH") or info.local_dir / "metrics.jsonl")


def _plain(value: Any) -> Any:
    """NumPy and torch scalars as Python numbers, arrays as lists, without importing either."""
    if value is None or isinstance(value, str | bool | int | float | Mapping | list | tuple):
        return value
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    if isinstance(value, numbers.Real):
        return float(value)
    return value


def _numeric(data: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in data.items() if isinstance(value, int | float)}


# ---------------------------------------------------------------------- packages


def _load(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger contains {name!r}, whose package is not installed ({error}); "
            "install it with: pip install 'verl[tracking]'"
        ) from error


class TensorboardTracker(Tracker):
    """Scalars and sample tables as TensorBoard events."""

    def __init__(self, info: RunInfo) -> None:
        _load("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(envs.get("TENSORBOARD_DIR") or str(info.local_dir / "tensorboard"))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for name, value in _numeric(data).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        header = list(samples[0])
        rows = [header, ["---"] * len(header)] + [[_cell(sample.get(key)) for key in header] for sample in samples]
        self._writer.add_text("samples", "\n".join("| " + " | ".join(row) + " |" for row in rows), step)

    def finish(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


class WandbTracker(Tracker):
    """Weights & Biases; its own environment variables (key, mode, entity) apply."""

    hosted = True

    def __init__(self, info: RunInfo) -> None:
        self._wandb = _load("wandb", "wandb")
        self.run_id = info.run_ids.get("wandb") or _new_id()
        self._run = self._wandb.init(
            project=info.project_name,
            name=info.experiment_name,
            config=dict(info.config),
            id=self.run_id,
            resume="allow",
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._run.log(_numeric(data), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = list(samples[0])
        rows = [[_scalar_or_text(sample.get(key)) for key in columns] for sample in samples]
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def finish(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """MLflow; its own environment variables (tracking server, credentials) apply."""

    hosted = True

    def __init__(self, info: RunInfo) -> None:
        self._mlflow = _load("mlflow", "mlflow")
        self._mlflow.set_experiment(info.project_name)
        resumed = info.run_ids.get("mlflow")
        if resumed:
            run = self._mlflow.start_run(run_id=resumed)  # has its parameters, which cannot be changed
        else:
            run = self._mlflow.start_run(run_name=info.experiment_name)
            self._log_config(info.config)
        self.run_id = run.info.run_id

    def _log_config(self, config: Mapping[str, Any]) -> None:
        params = {name: str(value)[:500] for name, value in _flatten(config).items()}
        names = list(params)
        for start in range(0, len(names), 100):  # the server takes at most 100 in a call
            self._mlflow.log_params({name: params[name] for name in names[start : start + 100]})

    def log(self, data: Mapping[str, Any], step: int) -> None:
        # MLflow's names take no "@", which validation metrics have: mean@8 -> mean_at_8.
        metrics = {name.replace("@", "_at_"): float(value) for name, value in _numeric(data).items()}
        self._mlflow.log_metrics(metrics, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = {key: [_scalar_or_text(sample.get(key)) for sample in samples] for key in samples[0]}
        self._mlflow.log_table(columns, artifact_file=f"samples/step_{step}.json")

    def finish(self) -> None:
        self._mlflow.end_run()


class SwanlabTracker(Tracker):
    """SwanLab; its own environment variables apply."""

    hosted = True

    def __init__(self, info: RunInfo) -> None:
        self._swanlab = _load("swanlab", "swanlab")
        self.run_id = info.run_ids.get("swanlab") or _new_id()
        self._swanlab.init(
            project=info.project_name,
            experiment_name=info.experiment_name,
            config=dict(info.config),
            id=self.run_id,
            resume="allow",
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._swanlab.log(_numeric(data), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        texts = [self._swanlab.Text("\n".join(f"{k}: {v}" for k, v in sample.items())) for sample in samples]
        self._swanlab.log({"samples": texts}, step=step)

    def finish(self) -> None:
        self._swanlab.finish()


class TrackioTracker(Tracker):
    """Trackio, which keeps its runs locally or on a hub space."""

    hosted = True

    def __init__(self, info: RunInfo) -> None:
        self._trackio = _load("trackio", "trackio")
        # a run goes on under its name
        self._trackio.init(
            project=info.project_name, name=info.experiment_name, config=dict(info.config), resume="allow"
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._trackio.log(_numeric(data), step=step)

    def finish(self) -> None:
        self._trackio.finish()


TRACKERS.register("tensorboard")(TensorboardTracker)
TRACKERS.register("wandb")(WandbTracker)
TRACKERS.register("mlflow")(MlflowTracker)
TRACKERS.register("swanlab")(SwanlabTracker)
TRACKERS.register("trackio")(TrackioTracker)


def _new_id() -> str:
    """An id that hosted trackers accept: 21 letters and digits."""
    return uuid.uuid4().hex[:21]


def _scalar_or_text(value: Any) -> Any:
    value = _plain(value)
    return value if isinstance(value, int | float | str) else str(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat

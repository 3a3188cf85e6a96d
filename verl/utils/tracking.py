"""Where the numbers of a step go: the console, a file, TensorBoard, hosted trackers.

Packages of trackers load only when their tracker is asked for. A tracker that cannot start is an error, before any
work is done. One that fails later, or does not answer, never stops the run and costs the others nothing. A name or a
value that a tracker refuses is lost there alone. Each loss is reported once and counted, see
:mod:`verl.utils.telling`.
"""

from __future__ import annotations

import importlib
import math
import numbers
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeVar, cast

from rich.console import Console
from rich.markup import escape

from verl import envs
from verl.errors import ConfigError
from verl.utils.background import Courier
from verl.utils.fs import append_line, mend_lines
from verl.utils.json_text import distinct_name, to_plain, valid_text
from verl.utils.json_text import dumps_json as dumps_json  # also known under this module
from verl.utils.logging import redact
from verl.utils.output import LenientText, printable
from verl.utils.registry import Registry
from verl.utils.telling import BOUNDARY, Guard, describe, is_failure
from verl.utils.timing import EtaEstimator, format_duration

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
    #: whether calls go to another machine or thread, which may not answer
    hosted: ClassVar[bool] = False
    #: whether one refused metric loses all of a call, so that a call that failed is repeated in parts
    divides: ClassVar[bool] = False

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step; raise :class:`RefusedError` for those that cannot be recorded."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record a table of samples: rows of the same keys, for example prompt, response and score."""

    def finish(self) -> None:
        """Flush and close."""


class RefusedError(Exception):
    """A tracker has recorded the metrics of a step, some excepted.

    Args:
        reasons: name of a metric that was not recorded -> why.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(f"refused: {', '.join(reasons)}")
        self.reasons = dict(reasons)


#: how often the metrics of a step are divided to find those that a tracker refuses, and how often without success
_MAX_CALLS, _MAX_FAILURES = 64, 8
#: refused metrics that are reported by name
_MAX_NAMED = 20
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
            valid_text(project_name),
            valid_text(experiment_name),
            to_plain(redact(config or {})),
            Path(default_local_dir),
            total_steps,
            run_ids or {},
        )
        factories = {name: TRACKERS[name] for name in names}  # all names are checked before the first one starts
        BOUNDARY.start()
        self._couriers = {
            name: Courier(f"verl-{name}") for name, factory in factories.items() if getattr(factory, "hosted", False)
        }
        self._trackers: dict[str, Tracker] = {}
        self._refused: dict[str, set[str]] = {name: set() for name in factories}
        try:
            for name, factory in factories.items():
                self._trackers[name] = self._start(name, factory, info)
        except BaseException:
            self._close()
            raise

    def _start(self, name: str, factory: Callable[[RunInfo], Tracker], info: RunInfo) -> Tracker:
        try:
            return self._call(name, partial(factory, info), _START_S)
        except ConfigError:
            raise
        except TimeoutError as error:
            raise ConfigError(
                f"trainer.logger contains {name!r}, which does not start: {error}; is its server reachable from here?"
            ) from error
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ConfigError(
                f"trainer.logger contains {name!r}, which does not start: {describe(error)}; check its settings, or "
                "leave it out"
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

        Once something was lost, ``tracking/failures`` and ``tracking/failures/<destination>`` count all so far.
        """
        if not data:
            return
        plain = _valid_metrics(data) | BOUNDARY.metrics()
        for name, tracker in self._trackers.items():
            with self._guard(name):
                self._log(name, tracker, plain, step)

    def _log(self, name: str, tracker: Tracker, data: dict[str, Any], step: int) -> None:
        """Send the metrics of a step to one tracker, without those that it refuses."""
        refused = self._refused[name]
        if known := refused & data.keys():  # reported when they were refused first
            BOUNDARY.lose(name, f"tracker {name!r} refuses {sorted(known)}", count=len(known), silent=True)
            data = {key: value for key, value in data.items() if key not in refused}
        deadline = time.monotonic() + _LOG_S

        def send(part: dict[str, Any]) -> None:
            self._call(name, partial(tracker.log, part, step), max(0.0, round(deadline - time.monotonic(), 1)))

        try:
            send(data)
        except RefusedError as error:
            reasons = error.reasons
        except BaseException as error:
            if not is_failure(error) or not tracker.divides:
                raise
            found = _narrow(send, data, deadline)
            if found is None:  # nothing was taken: the tracker fails, not a name
                raise
            reasons = found
        else:
            return
        for key, reason in reasons.items():
            value = data[key]
            if isinstance(value, int | float) and math.isfinite(value):
                refused.add(key)  # the name is at fault, as the value is an ordinary one
            kind = f"refused {key}" if len(refused) <= _MAX_NAMED else "refused others"
            BOUNDARY.lose(name, f"tracker {name!r} refuses {key!r}: {reason}", kind=kind)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Send a table of samples to every tracker that can show one; a row may lack what others have."""
        columns = list(dict.fromkeys(key for sample in samples for key in sample))
        names = _valid_names(columns)
        rows = [{names[key]: _cell_value(sample.get(key)) for key in columns} for sample in samples]
        if rows:
            self._each("log_samples", _LOG_S, rows, step)

    def finish(self) -> None:
        """Flush and close every tracker, and report what the records of the run lack."""
        self._close()
        BOUNDARY.summarize()

    def _close(self) -> None:
        self._each("finish", _FINISH_S)
        for courier in self._couriers.values():
            courier.end()

    def _each(self, method: str, limit_s: float, *args: Any) -> None:
        for name, tracker in self._trackers.items():
            with self._guard(name):
                self._call(name, partial(getattr(tracker, method), *args), limit_s)

    def _guard(self, name: str) -> Guard:
        return BOUNDARY.guard(name, f"tracker {name!r}")


def _narrow(send: Callable[[dict[str, Any]], None], data: Mapping[str, Any], deadline: float) -> dict[str, str] | None:
    """Send metrics in halves of halves, until those that are refused stand alone.

    Returns:
        The metrics that were not taken, with the reason; None if none was taken, so that no name is to blame.
    """
    parts, reasons, taken, calls = _halves(dict(data)), dict[str, str](), False, 0
    while parts:
        part = parts.pop()
        calls += 1
        try:
            if calls > _MAX_CALLS or time.monotonic() > deadline:
                raise TimeoutError("too many of the step's metrics are refused")
            send(part)
            taken = True
        except BaseException as error:
            if not is_failure(error):
                raise
            if not taken and (calls >= _MAX_FAILURES or isinstance(error, TimeoutError)):
                return None
            if len(part) > 1 and calls <= _MAX_CALLS:
                parts += _halves(part)
            else:
                reasons |= dict.fromkeys(part, describe(error))
    return reasons if taken else None


def _halves(part: dict[str, Any]) -> list[dict[str, Any]]:
    items = list(part.items())
    middle = len(items) // 2
    return [dict(half) for half in (items[middle:], items[:middle]) if half]


def _valid_metrics(data: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics under names of valid text, with plain values."""
    names, plain = _valid_names(data), {}
    for key, value in data.items():
        with BOUNDARY.guard("metrics", f"metric {names[key]!r}"):
            plain[names[key]] = _plain(value)
    return plain


def _valid_names(keys: Iterable[Any]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for key in keys:
        text = key if isinstance(key, str) else str(key)
        names[key] = distinct_name(valid_text(text), set(names.values()))
        if names[key] != text:
            BOUNDARY.lose("metrics", f"a name is no valid text and becomes {names[key]!r}", kind="name", count=0)
    return names


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
            mend_lines(self.path)
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
        append_line(path, dumps_json(record))


@TRACKERS.register("file")
def _file(info: RunInfo) -> Tracker:
    return FileTracker(envs.get("VERL_FILE_LOGGER_PATH") or info.local_dir / "metrics.jsonl")


def _plain(value: Any) -> Any:
    """Numbers as Python's, NaN and infinities included; anything else after the rules of the JSON writer."""
    if isinstance(value, str):
        return valid_text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    tolist = getattr(value, "tolist", None)
    listed = tolist() if tolist is not None else value
    if isinstance(listed, numbers.Real):
        return listed if isinstance(listed, bool | int | float) else float(listed)
    return to_plain(listed)


def _cell_value(value: Any) -> Any:
    """What a table shows: text, a number, or nothing."""
    value = _plain(value)
    return value if value is None or isinstance(value, str | bool | int | float) else dumps_json(value)


def _numeric(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers; those beyond the range of floating point are infinite."""
    return {name: _in_range(value) for name, value in data.items() if isinstance(value, int | float)}


def _in_range(value: float) -> float:
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


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

    hosted = True  # writes in a thread of its own, for which a full queue waits

    def __init__(self, info: RunInfo) -> None:
        _load("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        directory = envs.get("TENSORBOARD_DIR") or str(info.local_dir / "tensorboard")
        self._open = lambda: SummaryWriter(directory)
        self._writer: SummaryWriter | None = self._open()

    @contextmanager
    def _events(self) -> Iterator[SummaryWriter]:
        """The writer; one that could not write, for lack of space for example, never writes again and is replaced."""
        if self._writer is None:
            self._writer = self._open()
        try:
            yield self._writer
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def log(self, data: Mapping[str, Any], step: int) -> None:
        reasons: dict[str, str] = {}
        with self._events() as writer:
            for name, value in _numeric(data).items():
                try:
                    writer.add_scalar(name, value, step)
                except OSError:  # of the file
                    raise
                except Exception as error:  # noqa: BLE001 - what a package says of one name
                    reasons[name] = describe(error)
        if reasons:
            raise RefusedError(reasons)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        header = list(samples[0])
        rows = [header, ["---"] * len(header)] + [[_cell(sample.get(key)) for key in header] for sample in samples]
        with self._events() as writer:
            writer.add_text("samples", "\n".join("| " + " | ".join(row) + " |" for row in rows), step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


class WandbTracker(Tracker):
    """Weights & Biases; its own environment variables (key, mode, entity) apply."""

    hosted = True
    divides = True

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
        rows = [[sample.get(key) for key in columns] for sample in samples]
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({"samples": table}, step=step)

    def finish(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """MLflow; its own environment variables (tracking server, credentials) apply."""

    hosted = True
    divides = True

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
        columns = {key: [sample.get(key) for sample in samples] for key in samples[0]}
        self._mlflow.log_table(columns, artifact_file=f"samples/step_{step}.json")

    def finish(self) -> None:
        self._mlflow.end_run()


class SwanlabTracker(Tracker):
    """SwanLab; its own environment variables apply."""

    hosted = True
    divides = True

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
    divides = True

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


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat

"""Trackers that keep the numbers of a run: files, TensorBoard and hosted services."""

from __future__ import annotations

import importlib
import math
import numbers
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl import envs
from verl.errors import ConfigError
from verl.utils.fs import append_line, mend_lines
from verl.utils.json_text import dumps_json, to_plain, valid_text
from verl.utils.telling import describe

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
from verl.utils.tracker import TRACKERS, RefusedError, RunInfo, Sample, Tracker

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

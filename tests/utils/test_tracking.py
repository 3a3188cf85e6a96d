"""Trackers: what reaches the console, files, TensorBoard and hosted services."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.errors import ConfigError
from verl.utils.console_tracker import ConsoleTracker, console_line
from verl.utils.tracker import TRACKERS, RunInfo
from verl.utils.trackers import FileTracker
from verl.utils.tracking import Tracking, dumps_json

STEP = {
    "critic/rewards/mean": 0.7344,
    "critic/score/mean": 0.7344,
    "actor/kl_loss": 0.00012,
    "response_length/mean": 9.81,
    "actor/entropy": 0.8312,
    "actor/grad_norm": 0.41,
    "actor/lr": 5e-4,
    "timing_s/step": 1.324,
    "perf/throughput": 4123.0,
    "actor/pg_clipfrac": 0.5,
}


def test_the_console_line_of_a_step() -> None:
    assert console_line(STEP, 12, 60, 200.0) == (
        "step 12/60 ━━╌╌╌╌╌╌╌╌  20% eta 3:20 │ reward 0.734 │ kl 1.2e-04 │ len 9.8 │ entropy 0.831 │ grad 0.410"
        " │ lr 5.0e-04 │ 1.32s │ 4.1k tok/s"
    )
    assert console_line({"critic/rewards/mean": 0.5}, 3, None, None) == "step 3 │ reward 0.500"
    # With a KL penalty in the reward the two differ, and both are wanted.
    assert console_line({"critic/rewards/mean": 0.4, "critic/score/mean": 0.5}, 3, None, None) == (
        "step 3 │ score 0.500 │ reward 0.400"
    )
    assert "grad nan!" in console_line({"actor/grad_norm": float("nan")}, 1, None, None)


def test_the_console_prints_one_line_per_step_one_per_validation_and_samples() -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(RunInfo("p", "e", total_steps=10), stream=out)
    tracker.log({"val-core/gsm8k/acc/mean@1": 0.25, "val-aux/gsm8k/acc/std@1": 0.1}, 0)
    tracker.log({**STEP, "timing_s/step": 2.0, "val-core/gsm8k/acc/mean@1": 0.5}, 1)
    tracker.log_samples([{"prompt": "[sort] 3 1", "response": "1 3", "score": 1.0}], 1)
    lines = out.getvalue().splitlines()
    assert lines[0] == "validation after step 0: gsm8k/acc/mean@1 0.250"
    assert lines[1].startswith("step  1/10 ━╌╌╌╌╌╌╌╌╌  10% eta 0:18 │ reward 0.734")
    assert lines[2] == "validation after step 1: gsm8k/acc/mean@1 0.500"
    assert lines[3:] == ["samples after step 1", "   1 prompt: [sort] 3 1", "   1 response: 1 3", "   1 score: 1.0"]


def test_the_file_holds_one_strict_json_object_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    tracking = Tracking("p", "e", ["file"])
    tracking.log({"a": np.float32(0.5), "b": torch.tensor(2), "nan": float("nan"), "inf": float("-inf")}, step=1)
    tracking.log({"a": 1}, step=2)
    tracking.log({}, step=3)  # nothing to say, no record
    tracking.log_samples([{"prompt": "π", "score": np.float64(1.0)}], step=2)
    tracking.finish()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text("utf-8").splitlines())
    assert first == {"step": 1, "data": {"a": 0.5, "b": 2, "nan": "NaN", "inf": "-Infinity"}}
    assert second == {"step": 2, "data": {"a": 1}}
    samples = json.loads((tmp_path / "deep" / "metrics.samples.jsonl").read_text("utf-8"))
    assert samples == {"step": 2, "samples": [{"prompt": "π", "score": 1.0}]}
    assert np.isnan(float(first["data"]["nan"]))


def test_the_file_is_in_the_runs_directory_by_default_and_grows_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    for step in (1, 2):
        Tracking("p", "e", "file", default_local_dir=tmp_path).log({"a": step}, step=step)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_file_that_cannot_be_written_is_a_clear_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file tracker cannot write .*VERL_FILE_LOGGER_PATH"):
        FileTracker(tmp_path / "file" / "metrics.jsonl")


def test_json_takes_anything() -> None:
    record = {"array": np.array([1.0, np.nan]), "set": {1}, "path": Path("x"), 3: None, "nested": {"t": torch.ones(2)}}
    assert json.loads(dumps_json(record)) == {
        "array": [1.0, "NaN"],
        "set": [1],
        "path": "x",
        "3": None,
        "nested": {"t": [1.0, 1.0]},
    }


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    tracking = Tracking("p", "e", ["tensorboard"], default_local_dir=tmp_path)
    tracking.log({"critic/score/mean": 0.25, "note": "text"}, step=1)
    tracking.log({"critic/score/mean": 0.5}, step=2)
    tracking.log_samples([{"prompt": "a|b", "score": 1}], step=2)
    tracking.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "| prompt | score |\n| --- | --- |\n| a\\|b | 1 |"


def test_unknown_and_missing_trackers_are_errors_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    with pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\?"):
        Tracking("p", "e", ["file", "tensorbord"])
    assert not (tmp_path / "m.jsonl").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"'wandb', whose package is not installed .*verl\[tracking\]"):
        Tracking("p", "e", ["wandb"])


def test_a_tracker_that_fails_is_reported_and_counted_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    tracking = Tracking("p", "e", ["tensorboard", "file"], default_local_dir=tmp_path)

    def broken(*_: Any) -> None:
        raise OSError("connection lost")

    monkeypatch.setattr(tracking._trackers["tensorboard"], "log", broken)
    with caplog.at_level(logging.WARNING, logger="verl"):
        for step in (1, 2, 3):
            tracking.log({"a": 1.0}, step=step)
        tracking.finish()
    lines = [json.loads(line)["data"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [
        {"a": 1.0},
        {"a": 1.0, "tracking/failures": 1, "tracking/failures/tensorboard": 1},
        {"a": 1.0, "tracking/failures": 2, "tracking/failures/tensorboard": 2},
    ]
    # by identity: a handler that other code has also put on the "verl" logger is shown the same record twice
    records = {id(record): record for record in caplog.records}.values()
    reports = [record for record in records if "tracker 'tensorboard' failed" in record.message]
    assert len(reports) == 1
    assert "failed: connection lost; the run continues" in reports[0].message
    assert "tensorboard: 3 records or values of this run are lost" in caplog.text


def test_a_hosted_tracker_that_does_not_answer_costs_its_limit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    class Silent(Recorder):
        def log(self, *_: Any, **__: Any) -> None:
            answer.wait(60)

    monkeypatch.setitem(sys.modules, "wandb", Silent("wandb"))
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    monkeypatch.setattr("verl.utils.tracking._LOG_S", 0.5)
    tracking = Tracking("p", "e", ["wandb", "file"])
    started = time.monotonic()
    for step in (1, 2, 3):
        tracking.log({"a": 1.0}, step=step)
    assert time.monotonic() - started < 5
    last = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert last == {"step": 3, "data": {"a": 1.0, "tracking/failures": 2, "tracking/failures/wandb": 2}}
    answer.set()
    tracking.finish()


def test_a_hosted_tracker_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    class Silent(Recorder):
        def init(self, **_: Any) -> None:
            answer.wait(60)

    monkeypatch.setitem(sys.modules, "wandb", Silent("wandb"))
    monkeypatch.setattr("verl.utils.tracking._START_S", 0.2)
    with pytest.raises(ConfigError, match=r"'wandb', which does not start: no answer within 0\.2 s"):
        Tracking("p", "e", ["wandb"])
    answer.set()


class Recorder(types.ModuleType):
    """Stands in for a hosted tracker's package and writes down the calls it gets."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


CONFIG = {"trainer": {"seed": 1}, "tool": {"api_key": "k"}}


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_hosted_trackers_get_names_config_and_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder(name)
    monkeypatch.setitem(sys.modules, name, package)
    tracking = Tracking("proj", "exp", [name], config=CONFIG)
    tracking.log({"a": 1.5, "note": "text"}, step=3)
    tracking.finish()
    start, log, finish = package.calls
    assert start[0] == "init"
    assert start[2]["project"] == "proj"
    assert "exp" in start[2].values()
    assert start[2]["config"] == {"trainer": {"seed": 1}, "tool": {"api_key": "***"}}
    assert log == ("log", ({"a": 1.5},), {"step": 3})
    assert finish[0] == "finish"


def test_mlflow_gets_flat_parameters_and_names_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder("mlflow")
    package.info = types.SimpleNamespace(run_id="r1")
    monkeypatch.setitem(sys.modules, "mlflow", package)
    tracking = Tracking("proj", "exp", ["mlflow"], config=CONFIG)
    tracking.log({"val-core/x/acc/mean@8": 0.5}, step=3)
    tracking.finish()
    assert package.calls == [
        ("set_experiment", ("proj",), {}),
        ("start_run", (), {"run_name": "exp"}),
        ("log_params", ({"trainer.seed": "1", "tool.api_key": "***"},), {}),
        ("log_metrics", ({"val-core/x/acc/mean_at_8": 0.5},), {"step": 3}),
        ("end_run", (), {}),
    ]


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow"])
def test_a_continued_run_goes_on_under_its_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder(name)
    package.info = types.SimpleNamespace(run_id="r1")
    monkeypatch.setitem(sys.modules, name, package)
    ids = Tracking("proj", "exp", [name], config=CONFIG).state_dict()
    assert list(ids) == [name]
    package.calls.clear()
    again = Tracking("proj", "exp", [name], config=CONFIG, run_ids=ids)
    starts = [kwargs for call, _, kwargs in package.calls if call in ("init", "start_run")]
    assert ids[name] in (starts[0].get("id"), starts[0].get("run_id"))
    assert again.state_dict() == ids
    assert "log_params" not in [call for call, _, _ in package.calls]  # MLflow refuses to change them


def test_tracking_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, verl.utils.tracking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class Picky:
    """A service that takes a call whole or not at all, and refuses some names."""

    hosted, divides, run_id = False, True, None

    def __init__(self, refuses: set[str], *, down: bool = False) -> None:
        self.refuses, self.down = refuses, down
        self.taken: dict[int, dict[str, Any]] = {}
        self.calls = 0

    def log(self, data: dict[str, Any], step: int) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionError("refused")
        if bad := self.refuses & data.keys():
            raise ValueError(f"Invalid metric name: {sorted(bad)[0]!r}")
        self.taken.setdefault(step, {}).update(data)

    def finish(self) -> None:
        """Nothing to close."""


def with_tracker(name: str, tracker: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Tracking:
    """A run with a tracker of its own beside the file."""
    monkeypatch.setitem(TRACKERS._items, name, lambda info: tracker)
    return Tracking("p", "e", [name, "file"], **settings)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("count", [2, 3, 100])
def test_only_the_names_that_a_service_refuses_are_lost_there(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"a/{number}" for number in range(count)]
    bad = {names[0], names[-1]} if count > 2 else {names[0]}
    tracker = Picky(bad)
    tracking = with_tracker("picky", tracker, monkeypatch, default_local_dir=tmp_path)
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    with caplog.at_level(logging.WARNING, logger="verl"):
        for step in (1, 2, 3):
            tracking.log(dict.fromkeys(names, 1.0), step=step)
    assert [tracker.taken[step].keys() & set(names) for step in (1, 2, 3)] == [set(names) - bad] * 3
    assert tracker.calls < 40  # the second and the third step know the names
    for name in bad:
        assert len({id(r) for r in caplog.records if f"refuses {name!r}" in r.message}) == 1
    rows = lines_of(tmp_path / "metrics.jsonl")
    assert [row["data"].get("tracking/failures/picky") for row in rows] == [None, len(bad), 2 * len(bad)]
    assert all(row["data"].keys() >= set(names) for row in rows)


def test_a_service_that_is_down_is_not_asked_for_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    tracker = Picky(set(), down=True)
    tracking = with_tracker("picky", tracker, monkeypatch)
    data = {f"a/{number}": 1.0 for number in range(200)}
    tracking.log(data, step=1)
    assert tracker.calls < 12
    tracker.down = False
    tracking.log(data, step=2)
    assert tracker.taken[2].keys() >= data.keys()  # no name was blamed
    assert lines_of(tmp_path / "m.jsonl")[1]["data"]["tracking/failures/picky"] == 1


def test_a_refused_value_does_not_ban_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))

    class NoNaN(Picky):
        def log(self, data: dict[str, Any], step: int) -> None:
            if any(value != value for value in data.values()):
                raise ValueError("NaN is not supported")
            super().log(data, step)

    tracker = NoNaN(set())
    tracking = with_tracker("picky", tracker, monkeypatch)
    tracking.log({"a": float("nan"), "b": 1.0}, step=1)
    tracking.log({"a": 2.0, "b": 1.0}, step=2)
    assert (tracker.taken[1]["b"], "a" in tracker.taken[1], tracker.taken[2]["a"]) == (1.0, False, 2.0)


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("no key"), OSError("no route")])
def test_a_tracker_that_cannot_start_is_a_configuration_error_and_others_are_closed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class First(Picky):
        def finish(self) -> None:
            closed.append("first")

    def start(info: RunInfo) -> Any:
        raise error

    monkeypatch.setitem(TRACKERS._items, "first", lambda info: First(set()))
    monkeypatch.setitem(TRACKERS._items, "second", start)
    with pytest.raises(ConfigError, match="'second', which does not start"):
        Tracking("p", "e", ["first", "second"])
    assert closed == ["first"]


def test_names_and_values_of_any_kind_reach_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)

    class Broken:
        def tolist(self) -> None:
            raise RuntimeError("no")

    tracking = Tracking(
        "p\ud83d", "e", ["tensorboard", "file"], {"\udc80": "\ud83d", "o": object()}, default_local_dir=tmp_path
    )
    data = {
        "val\ud83d": 1.0,
        "val" + chr(0xD83E): 2.0,
        "huge": 10**400,
        "none": None,
        "broken": Broken(),
        3: np.int64(4),
    }
    tracking.log(data, step=1)  # type: ignore[arg-type]
    tracking.log({"a": 1.0}, step=2)
    tracking.log_samples([{"x": 1}, {"y": "\ud83d", "x": np.float32(0.5)}, {"z": [1, float("nan")]}], step=2)
    tracking.finish()
    first, second = lines_of(tmp_path / "m.jsonl")
    lost = {"tracking/failures": 1, "tracking/failures/metrics": 1}
    assert first["data"] == lost | {"val\ufffd": 1.0, "val\ufffd (2)": 2.0, "huge": 10**400, "none": None, "3": 4}
    assert second["data"]["tracking/failures/metrics"] == 1
    (samples,) = lines_of(tmp_path / "m.samples.jsonl")
    assert samples["samples"][0] == {"x": 1, "y": None, "z": None}
    assert samples["samples"][1]["y"] == "\ufffd"
    assert samples["samples"][2]["z"] == '[1, "NaN"]'


def test_a_line_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process may leave half a line, and a full disk takes half of one."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "data": {"a"')
    tracker = FileTracker(path)
    tracker.log({"a": 1}, 2)
    assert path.read_text().splitlines()[1:] == ['{"step": 2, "data": {"a": 1}}']


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_the_console_keeps_its_lines_in_every_encoding(encoding: str) -> None:
    raw = io.BytesIO()
    tracker = ConsoleTracker(RunInfo("p", "e", total_steps=10), stream=io.TextIOWrapper(raw, encoding=encoding))
    tracker.log(STEP, 1)
    tracker.log({"val-core/数学/acc/mean@1": 0.25}, 1)
    tracker.log_samples([{"output": "π\x1b[2J\ud83d"}], 1)
    text = raw.getvalue().decode(encoding)
    assert "step  1/10" in text
    assert "reward 0.734" in text
    assert "acc/mean@1 0.250" in text
    assert "\x1b[2J" not in text
    assert text.count("\n") == 4


def test_a_pipe_without_a_reader_is_the_consoles_loss_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich ends the process there."""

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w", encoding="utf-8")  # noqa: SIM115 - cannot be closed without an error
    monkeypatch.setattr(sys, "stdout", stream)
    tracking = Tracking("p", "e", ["console", "file"])
    for step in (1, 2, 3):
        tracking.log(STEP, step=step)
    monkeypatch.undo()
    rows = lines_of(tmp_path / "m.jsonl")
    assert [row["data"].get("tracking/failures/console") for row in rows] == [None, 1, 2]
    with contextlib.suppress(OSError):
        stream.close()

"""Terminals, pipes, disks and trackers that do not take what a run reports: the run goes on and says what is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.misuse.case import Case, Outcome, Place
from tests.e2e.misuse.cases_start_up import cannot_mount, file_in_the_way

FILES = ["trainer.logger=[console,file]"]
ALL = ["**/*"]
#: both variables, because Python prefers UTF-8 in the C locale
C_LOCALE = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}

ODD_REPORTS = """
import numpy as np
print("π ━ a reward function prints")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": len(set(solution_str)) / 10, "count": np.int64(3), "half": "\\ud83d", "nan": float("nan"),
        "uid": "mine", "reward": 0.5, "model": "judge", "step": 7, "object": object(), "wide": "━" * 3,
    }
"""

#: found in the working directory; it leaves the process wherever it can
LEAVING_WANDB = """
import sys

class Run:
    def log(self, data, step):
        sys.exit(9)

    def finish(self):
        raise KeyboardInterrupt("of a library")

def init(**settings):
    return Run()
"""

PICKY_MLFLOW = """
import types

def log_metrics(metrics, step):
    if "actor/entropy" in metrics:
        raise ValueError("invalid name 'actor/entropy'")
    with open("taken", "a") as file:
        file.write("".join(f"{name}\\n" for name in metrics))

def start_run(**settings):
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

set_experiment = log_params = end_run = lambda *args, **kwargs: None
"""


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, each strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{path} has {name}, which is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]


def last_metrics(place: Place) -> dict[str, Any]:
    """Metrics of the last of two steps; none is missing."""
    rows = records(place.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    found: dict[str, Any] = rows[-1]["data"]
    assert "actor/grad_norm" in found or "train/grad_norm" in found
    return found


def console_is_counted(place: Place, _: Outcome) -> None:
    """The file has every step and the count of lost lines."""
    assert last_metrics(place)["tracking/failures/console"] >= 1


def all_is_recorded(place: Place, _: Outcome) -> None:
    """Nothing was lost."""
    assert "tracking/failures" not in last_metrics(place)


def plain_lines(place: Place, done: Outcome) -> None:
    """Both steps are on the console, in ASCII."""
    all_is_recorded(place, done)
    assert done.stdout.isascii()
    assert "step 1/2 =====-----  50%" in done.stdout
    assert "step 2/2 ==========" in done.stdout


def no_colors(place: Place, done: Outcome) -> None:
    """Nothing is colored; the validation's line is bold at most."""
    assert "validation after step 2" in done.stdout
    assert "\x1b" not in done.stdout.replace("\x1b[1m", "").replace("\x1b[0m", "")


def odd_reports(place: Place) -> None:
    """A reward function that reports and prints what few expect."""
    (place.tmp / "reward.py").write_text(ODD_REPORTS, encoding="utf-8")


def odd_reports_are_kept(place: Place, done: Outcome) -> None:
    """Every reported value is in the samples, under its own name or a distinct one."""
    last_metrics(place)
    for number, samples in ((1, "rollout"), (2, "rollout"), (2, "validation")):
        for row in records(place.tmp / samples / f"{number}.jsonl"):
            assert row["count"] == 3
            assert row["half"] == "\ufffd"
            assert row["nan"] == "NaN"
            assert row["wide"] == "━━━"
            assert row["reported_uid"] == "mine" != row["uid"]
            assert row["reported_step"] == 7 != row["step"] == number
            assert row.get("reported_model", row.get("model")) == "judge"
            assert row["reward"] == 0.5
            assert row["object"].startswith("<object object")
    assert done.stderr.count("is recorded as 'reported_uid'") == 1


def bad_trackers(place: Place) -> None:
    """Packages of trackers: one leaves the process, one refuses a name."""
    (place.tmp / "wandb.py").write_text(LEAVING_WANDB)
    (place.tmp / "mlflow.py").write_text(PICKY_MLFLOW)


def each_tracker_loses_its_own(place: Place, done: Outcome) -> None:
    """One tracker loses all, one a name, and the file nothing."""
    found = last_metrics(place)
    assert found["tracking/failures/wandb"] == 1  # of the step before
    assert found["tracking/failures/mlflow"] == 1
    taken = (place.tmp / "taken").read_text().splitlines()
    assert "actor/entropy" not in taken
    assert "actor/grad_norm" in taken
    assert done.stderr.count("tracker 'wandb' failed: RuntimeError: raised SystemExit(9)") == 1
    assert done.stderr.count("refuses 'actor/entropy': ValueError: invalid name") == 1


def small(place: Place, folder: str, size: str, *, fill: bool) -> None:
    """A small file system at a folder."""
    path = place.tmp / folder
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    if not fill:
        return
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


def full_samples(place: Place) -> None:
    """Space for the lock of the run and the samples of one step."""
    small(place, "rollout", "8k", fill=False)


def full_samples_are_counted(place: Place, done: Outcome) -> None:
    """Both steps are trained; the loss is counted, and the samples of the first step are whole."""
    assert last_metrics(place)["tracking/failures/samples"] == 1
    assert done.stderr.count("writing samples to trainer.rollout_data_dir") == 1
    assert [p.name for p in (place.tmp / "rollout").iterdir()] == ["1.jsonl"]
    assert len(records(place.tmp / "rollout" / "1.jsonl")) == 16


def full_metrics(place: Place) -> None:
    """No space for the file of metrics."""
    small(place, "disk", "16k", fill=True)


def full_metrics_are_reported(place: Place, done: Outcome) -> None:
    """The steps are on the console, the file is empty and has no half line."""
    assert "step 2/2" in done.stdout
    assert (place.tmp / "disk" / "metrics.jsonl").read_bytes() == b""
    assert done.stderr.count("tracker 'file' failed") == 1
    assert "file: 2 records or values of this run are lost" in done.stderr


def full_events(place: Place) -> None:
    """Space for the start of a file of events."""
    small(place, "disk", "4k", fill=False)


def full_events_are_reported(place: Place, done: Outcome) -> None:
    """The other trackers have both steps."""
    assert last_metrics(place)["tracking/failures/tensorboard"] >= 1
    assert "tracker 'tensorboard' failed" in done.stderr


def result_is_shown(place: Place, done: Outcome) -> None:
    """The answer of a program that could not write its answer is said on standard error."""
    assert "No space left" in done.stderr


CASES = [
    Case("reader that is gone", "train", FILES, 0, leaves=ALL, messages=0, stdout="broken", check=console_is_counted),
    Case("full disk under standard output", "train", FILES, 0, leaves=ALL, messages=0, stdout="full",
         words=["standard output takes no more text", "No space left"], check=console_is_counted),
    Case("closed standard output", "train", FILES, 0, leaves=ALL, messages=0, stdout="closed", check=all_is_recorded),
    Case("closed standard output from the shell", "train", FILES, 0, leaves=ALL, messages=0, stdout="closed",
         fresh=True, limit_s=60, check=all_is_recorded),
    Case("ASCII terminal", "train", FILES, 0, leaves=ALL, messages=0, fresh=True, limit_s=60,
         environment={"PYTHONIOENCODING": "ascii"}, check=plain_lines),
    Case("C locale", "train", FILES, 0, leaves=ALL, messages=0, fresh=True, limit_s=60, environment=C_LOCALE,
         check=plain_lines),
    Case("terminal without colors", "train", ["trainer.test_freq=2"], 0, leaves=ALL, messages=0, stdout="tty",
         environment={"NO_COLOR": "1", "TERM": "xterm"}, check=no_colors),
    Case("dumb terminal", "train", ["trainer.test_freq=2"], 0, leaves=ALL, messages=0, stdout="tty",
         environment={"TERM": "dumb", "NO_COLOR": None}, check=no_colors),
    Case("odd reports of a reward function", "train",
         [*FILES, "custom_reward_function.path={tmp}/reward.py", "trainer.rollout_data_dir={tmp}/rollout",
          "trainer.validation_data_dir={tmp}/validation", "trainer.log_val_generations=2", "trainer.test_freq=2"],
         0, leaves=ALL, messages=0, prepare=odd_reports, check=odd_reports_are_kept),
    Case("trackers that leave or refuse", "train", ["trainer.logger=[wandb,mlflow,console,file]"], 0, leaves=ALL,
         messages=0, prepare=bad_trackers, check=each_tracker_loses_its_own),
    Case("full disk under the samples", "train", [*FILES, "trainer.rollout_data_dir={tmp}/rollout"], 0, leaves=ALL,
         messages=0, prepare=full_samples, check=full_samples_are_counted, skip=cannot_mount),
    Case("full disk under the metrics", "train", FILES, 0, leaves=ALL, messages=0, prepare=full_metrics,
         environment={"VERL_FILE_LOGGER_PATH": "{tmp}/disk/metrics.jsonl"}, check=full_metrics_are_reported,
         skip=cannot_mount),
    Case("full disk under TensorBoard", "train", ["trainer.logger=[tensorboard,console,file]"], 0, leaves=ALL,
         messages=0, prepare=full_events, environment={"TENSORBOARD_DIR": "{tmp}/disk"},
         check=full_events_are_reported, skip=cannot_mount),
    Case("samples where a file is", "train", ["trainer.rollout_data_dir={tmp}/blocked/x"], 1,
         prepare=file_in_the_way, words=["trainer.rollout_data_dir", "{tmp}/blocked/x"]),
    Case("validation samples where a file is", "train", ["trainer.validation_data_dir={tmp}/blocked/x"], 1,
         prepare=file_in_the_way, words=["trainer.validation_data_dir", "{tmp}/blocked/x"]),
    Case("unknown tracker", "train", ["trainer.logger=[consol]"], words=["consol", "did you mean", "console"]),
    Case("tracker without its package", "train", ["trainer.logger=[wandb]"], words=["wandb", "verl[tracking]"]),
    Case("metrics where a file is", "train", FILES, prepare=file_in_the_way, words=["VERL_FILE_LOGGER_PATH"],
         environment={"VERL_FILE_LOGGER_PATH": "{tmp}/blocked/metrics.jsonl"}),
    Case("TensorBoard where a file is", "train", ["trainer.logger=[tensorboard]"], prepare=file_in_the_way,
         words=["'tensorboard', which does not start", "blocked"], environment={"TENSORBOARD_DIR": "{tmp}/blocked/x"}),
    Case("unknown level of the log", "train", [], words=["VERL_LOGGING_LEVEL='loud'"],
         environment={"VERL_LOGGING_LEVEL": "loud"}),
    Case("names that are no text", "train", [*FILES, "trainer.experiment_name='a\udcffb'"], 0, leaves=ALL, messages=0,
         fresh=True, limit_s=60, check=all_is_recorded),
    Case("reader that is gone", "sft", FILES, 0, leaves=ALL, messages=0, stdout="broken", check=console_is_counted),
    Case("reader that is gone", "preference", FILES, 0, leaves=ALL, messages=0, stdout="broken",
         check=console_is_counted),
    Case("reader that is gone", "generate", [], 0, leaves=ALL, messages=0, stdout="broken"),
    Case("reader of a table that is gone", "eval", [], 0, leaves=ALL, messages=0, stdout="broken"),
    Case("full disk under a table", "eval", ["data.output_path=None!"], 1, stdout="full", words=["No space left"]),
    Case("full disk under the configuration", "train", ["--cfg=job"], 1, stdout="full",
         words=["No space left"]),
    Case("reader of the configuration that is gone", "train", ["--cfg=job"], 0, messages=0,
         stdout="broken"),
    Case("reader of the help that is gone", "train", argv=["--help"], code=0, messages=0, stdout="broken", fresh=True,
         limit_s=60),
    Case("full disk under a prediction", "explain", [], 1, stdout="full", words=["No space left"]),
    Case("report where a file is", "selftest", argv=["--only", "loss gspo", "--json", "{tmp}/blocked/x"],
         prepare=file_in_the_way, words=["--json", "{tmp}/blocked"]),
]  # fmt: skip

"""Runs of the trainer as a user starts them, killed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.utils.owned import Owner, owner_of

#: titles, after ``ray::``, of processes that belong to Ray itself; without its agents a node is gone
RAYS_OWN = ("IDLE", "SPILL", "RESTORE", "DELETE", "DashboardAgent", "RuntimeEnvAgent")
#: kind of process -> what its command line contains
VICTIMS = {
    "worker": "ray::ActorRolloutRefWorker",
    "server": "ray::RolloutServer",
    "agent": "ray::AgentLoopWorker",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
TAG = "VERL_TEST_RUN"  # in the environment of every process of a run, Ray's included


class RunningTrainer:
    """One start of the training command; used as a context, it leaves no process behind.

    Args:
        overrides: of the command.
        directory: of the run; the log and the metrics go there.
        program: word after ``verl``.
        environment: more variables.
    """

    def __init__(
        self,
        overrides: list[str],
        directory: Path,
        *,
        program: str = "train",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.tag = uuid.uuid4().hex
        self.directory = directory
        self.folder = (environment or {}).get("TMPDIR")  # of this run alone
        directory.mkdir(parents=True, exist_ok=True)
        variables = {
            **os.environ,
            **(environment or {}),
            TAG: self.tag,
            "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl"),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        variables.pop("RAY_ADDRESS", None)
        own = {
            "train": [
                f"trainer.default_local_dir={directory}/checkpoints",
                f"trainer.rollout_data_dir={directory}/samples",
            ],
            "generate": [f"data.output_path={directory}/answers.jsonl"],
        }.get(program, [f"trainer.default_local_dir={directory}/checkpoints"])
        self.log = (directory / "log.txt").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verl.cli", program, *overrides, *own],
            env=variables,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> RunningTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(20):  # children may be starting while we look
            processes = list(self.processes())
            if not processes:
                break
            for pid, _ in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        self.process.wait(timeout=60)
        self.log.close()

    def processes(self) -> Iterator[tuple[int, str]]:
        """(pid, command line) of every process that this start has made, its own included."""
        wanted = f"{TAG}={self.tag}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    # Ray's agents overwrite a part of their environment with their titles
                    if wanted in (entry / "environ").read_bytes().split(b"\0") or (
                        self.folder is not None and any(self._open_in(entry / "fd"))
                    ):
                        yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    def _open_in(self, descriptors: Path) -> Iterator[bool]:
        """For each open file of a process, whether it is in the folder of the run."""
        for descriptor in descriptors.iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor).startswith(f"{self.folder}/")

    def workers(self) -> list[int]:
        """Pids of the processes that hold the models."""
        titles = ((pid, command.removeprefix("ray::")) for pid, command in self.processes() if command[:5] == "ray::")
        return [pid for pid, title in titles if not title.startswith(RAYS_OWN)]

    def victims(self, kind: str) -> list[int]:
        """Pids of the processes of a kind, see :data:`VICTIMS`."""
        if kind == "controller":
            return [self.process.pid]
        return [pid for pid, command in self.processes() if VICTIMS[kind] in command.split(" --", 1)[0]]

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 180.0) -> bool:
        """Whether the condition came true while the command ran."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)
        raise AssertionError(f"nothing happened for {timeout_s} s; see {self.directory / 'log.txt'}")

    def finish(self, timeout_s: float = 240.0) -> int:
        """Exit code of the command; one that does not end tells where it is."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
            self.process.wait(timeout=30)
            raise AssertionError(f"the command did not end within {timeout_s} s: {self.text()[-8000:]}") from None

    def text(self) -> str:
        """What the command has written."""
        return (self.directory / "log.txt").read_text(errors="replace")


def left_behind(run: RunningTrainer, folder: Path, patience_s: float = 60.0) -> list[str]:
    """What is left of a run that has ended, after a time in which the rest of it may end.

    Args:
        run: that has ended.
        folder: its temporary folder, which was empty.
    """
    deadline = time.monotonic() + patience_s
    while True:
        left = [f"process {pid}: {command[:80]}" for pid, command in run.processes()]
        left += [str(path) for path in folder.iterdir()]
        left += [str(path) for path in Path("/dev/shm").glob("verl-*") if (owner_of(path) or Owner.current()).is_gone()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def steps_logged(directory: Path) -> int:
    """Newest step in the metrics of a run."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def metrics_by_step(directory: Path) -> dict[int, dict[str, Any]]:
    """Metrics without clocks and memory; where a step was repeated, the later record holds."""
    timed = ("timing", "perf/", "weight_sync/")
    records: dict[int, dict[str, Any]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        records[record["step"]] = {k: v for k, v in record["data"].items() if not k.startswith(timed)}
    return records


def saves(directory: Path) -> set[str]:
    """Checkpoints that are being written, or were when a process died."""
    return {path.name for path in (directory / "checkpoints").glob(".global_step_*.new.*")}


def kill_once(run: RunningTrainer, where: str, rng: random.Random) -> bool:
    """Kill a process of a run at a moment; False if the run was over before.

    Args:
        where: ``start`` (while it starts), ``step`` (some time within a step), ``save`` (while a checkpoint is being
            written), each of the controller, or with ``worker-`` before it of a worker.
    """
    victim, _, moment = where.rpartition("-")
    before = steps_logged(run.directory)
    if moment == "start":
        time.sleep(rng.uniform(0.0, 12.0))
    elif moment == "save":
        half_written = saves(run.directory)
        if not run.wait_until(lambda: saves(run.directory) - half_written):
            return False
        time.sleep(rng.uniform(0.0, 0.1))
    else:
        if not run.wait_until(lambda: steps_logged(run.directory) > before):
            return False
        time.sleep(rng.uniform(0.0, 0.6))
    if run.process.poll() is not None:
        return False
    targets = run.workers() if victim == "worker" else [run.process.pid]
    if not targets:
        targets = [run.process.pid]
    os.kill(rng.choice(targets), signal.SIGKILL)
    code = run.finish(timeout_s=120.0)
    assert code == (1 if targets != [run.process.pid] else -signal.SIGKILL), run.text()[-3000:]
    return True

"""Running a case: in a fork of the zygote, or in a fresh interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.misuse.case import Case, Outcome, Place
from tests.e2e.misuse.zygote import reap

ROOT = Path(__file__).resolve().parents[3]
#: seconds after which a command is ended by the test; a busy machine may stretch honest seconds a lot
PATIENCE_S = 150.0
_TESTS_OWN = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_WORKER", "RAY_ADDRESS", "VERL_FILE_LOGGER_PATH")


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a command."""
    env = {k: v for k, v in os.environ.items() if k not in _TESTS_OWN}
    paths = [str(ROOT), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env |= {"VERL_LOGGING_LEVEL": "WARNING", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


class _Streams:
    """The three standard descriptors of a command, and what it writes."""

    def __init__(self, stdout: str) -> None:
        self._threads: list[threading.Thread] = []
        self._got: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        stdin = os.open(os.devnull, os.O_RDONLY)
        error_end, stderr = os.pipe()
        self._read("stderr", error_end)
        if stdout == "full":
            out = os.open("/dev/full", os.O_WRONLY)
        elif stdout == "tty":
            terminal, out = pty.openpty()
            self._read("stdout", terminal)
        else:
            out_end, out = os.pipe()
            if stdout == "broken":
                os.close(out_end)
            else:
                self._read("stdout", out_end)
        self.descriptors = [stdin, out, stderr]

    def _read(self, name: str, fd: int) -> None:
        def read() -> None:
            with contextlib.suppress(OSError):  # a terminal without a writer
                while piece := os.read(fd, 1 << 16):
                    self._got[name] += piece
            os.close(fd)

        self._threads.append(threading.Thread(target=read, daemon=True))
        self._threads[-1].start()

    def started(self) -> None:
        """The command has the descriptors; close ours."""
        for fd in self.descriptors:
            os.close(fd)

    def text(self, name: str) -> str:
        """What was written; a process that the command left behind does not keep us."""
        for thread in self._threads:
            thread.join(timeout=3.0)
        return bytes(self._got[name]).decode("utf-8", "replace")


class _Watchdog:
    """Ends the session of a command that takes too long."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fired = False
        self._timer = threading.Timer(PATIENCE_S, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _fire(self) -> None:
        self.fired = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def cancel(self) -> None:
        """The command is over; what is left of its session ends."""
        self._timer.cancel()


class Zygote:
    """The process that forks for commands; it starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.misuse.zygote", str(theirs.fileno())],
            cwd=ROOT,
            env=environment({}),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._channel = ours
        self._lines = ours.makefile("r", encoding="utf-8")
        if not self._lines.readline():
            raise RuntimeError("the process that forks for commands did not start; its message is above")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._lines.close()
            self._channel.close()
            self._process.wait(timeout=30)
            self._process = None

    def run(self, argv: Sequence[str], env: Mapping[str, str], place: Place, case: Case) -> Outcome:
        """Run a command in a fork."""
        if self._process is None:
            self._start()
        streams = _Streams(case.stdout)
        request = {"argv": list(argv), "env": dict(env), "cwd": str(place.tmp), "closed": case.stdout == "closed"}
        socket.send_fds(self._channel, [json.dumps(request).encode()], streams.descriptors)
        pid = json.loads(self._lines.readline())["pid"]
        streams.started()
        watchdog = _Watchdog(pid)
        if case.during is not None:
            case.during(pid, place)
        answer = json.loads(self._lines.readline())
        watchdog.cancel()
        honest = answer["wall"] - answer["waited"]
        out, err = streams.text("stdout"), streams.text("stderr")
        return Outcome(answer["code"], out, err, honest, answer["wall"], watchdog.fired)


def run_fresh(argv: Sequence[str], env: Mapping[str, str], place: Place, case: Case) -> Outcome:
    """Run a command in a new interpreter, as a shell would start it."""
    streams = _Streams(case.stdout)
    command = [sys.executable, "-m", "verl.cli", *argv]
    if case.stdout == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    started = time.perf_counter()
    stdin, stdout, stderr = streams.descriptors
    process = subprocess.Popen(
        command, cwd=place.tmp, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )
    streams.started()
    watchdog = _Watchdog(process.pid)
    if case.during is not None:
        case.during(process.pid, place)
    code, waited = reap(process.pid)
    process.returncode = code
    wall = time.perf_counter() - started
    watchdog.cancel()
    return Outcome(code, streams.text("stdout"), streams.text("stderr"), wall - waited, wall, watchdog.fired)

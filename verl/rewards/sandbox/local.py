"""Run programs on this machine, each in a sandbox of its own."""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.rewards.sandbox.folders import PREFIX, remove_stale, remove_tree
from verl.rewards.sandbox.spec import Isolation, Limits, ProgramResult, Status

logger = logging.getLogger(__name__)

_ROOT = str(Path(__file__).resolve().parents[3])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from verl.rewards.sandbox.launcher import main; main()"
_START_LIMIT_S = 60.0
_ANSWER_GRACE_S = 20.0
_STOP_LIMIT_S = 5.0
_MEANS = {"auto": tuple(Isolation), **{means.value: (means,) for means in Isolation}}


@cache
def readable_paths() -> tuple[str, ...]:
    """Directories that a program may read: the system's programs and libraries, and this Python with its packages."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", sys.base_prefix, sys.prefix]
    wanted += [str(Path(sys.executable).parent), str(Path(os.path.realpath(sys.executable)).parent)]
    chosen: list[str] = []
    for path in wanted:
        if os.path.islink(path) and os.path.dirname(path) == "/":
            continue
        real = os.path.abspath(path)
        covered = any(real == other or real.startswith(f"{other}/") for other in chosen)
        if os.path.isdir(real) and real != "/" and not covered:
            chosen.append(real)
    return tuple(chosen)


class LocalSandbox:
    """A launcher process with one confined folder; runs one program after the other. Not for several threads at once.

    Args:
        limits: of each run.
        isolation: ``"auto"`` takes the strongest means that the kernel allows; the name of one insists on it.

    Raises:
        ConfigError: the kernel does not allow the means that was asked for.
        RewardError: the launcher did not start.
    """

    def __init__(self, limits: Limits | None = None, isolation: str = "auto") -> None:
        if isolation not in _MEANS:
            raise ConfigError(f"reward.sandbox.isolation={isolation!r}: choose one of {', '.join(_MEANS)}")
        self.limits = limits or Limits()
        try:
            _remove_stale_once()
            self._folder = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as error:
            raise RewardError(f"the sandbox has no folder for programs: {error}; see TMPDIR") from error
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, _ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={"LANG": "C.UTF-8", "PATH": os.environ.get("PATH", "")},
            )
        except OSError as error:
            remove_tree(self._folder)
            raise RewardError(f"the sandbox's launcher cannot be started: {error}") from error
        try:
            setup = {"folder": self._folder, "readable": readable_paths(), "isolation": _MEANS[isolation]}
            reply = self._ask(setup, _START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        if reply["isolation"] is None:
            self.close()
            reasons = "; ".join(f"{name}: {reason}" for name, reason in reply["reasons"].items())
            raise ConfigError(
                f"reward.sandbox.isolation={isolation}: not possible here ({reasons}); use auto, allow it on this "
                "machine, or set reward.sandbox.url to a remote sandbox"
            )
        self.isolation = Isolation(reply["isolation"])
        _tell_once(self.isolation, tuple(reply["reasons"].items()))

    def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
        keep: Sequence[str] = (),
        use_kept: bool = False,
    ) -> ProgramResult:
        """Run a program in a folder of its own, which is gone afterwards.

        Args:
            argv: the program and its arguments.
            files: what is in the folder, by name.
            stdin: its input.
            limits: of this run; those of the sandbox unless given.
            keep: names of files that it leaves for later runs.
            use_kept: the files that the last run with ``keep`` left are there too.

        Raises:
            RewardError: the sandbox itself failed, which says nothing about the program.
        """
        if self.isolation is Isolation.GUARD and list(argv[:2]) != [sys.executable, "-I"]:
            raise ConfigError(
                f"only Python programs can be run here, not {argv[0]!r}: the kernel offers no isolation; set "
                "reward.sandbox.url to a remote sandbox"
            )
        chosen = limits or self.limits
        request: dict[str, Any] = {
            "argv": list(argv),
            "files": dict(files or {}),
            "stdin": stdin,
            "limits": asdict(chosen),
            "keep": list(keep),
            "use_kept": use_kept,
        }
        reply = self._ask(request, chosen.wall_s + _ANSWER_GRACE_S)
        if "failure" in reply:
            raise RewardError(f"the sandbox failed: {reply['failure']}")
        result = reply["result"]
        return ProgramResult(**{**result, "status": Status(result["status"])})

    def close(self) -> None:
        """End the launcher and everything in it, and remove the folder."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._stop()
        if not remove_tree(self._folder):
            logger.warning("the folder %s of a sandbox cannot be removed", self._folder)

    def _stop(self) -> None:
        """End the launcher in the middle of a run; it takes the program along."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> LocalSandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
            return json.loads(self._line(stdout.fileno(), limit_s))
        except (OSError, ValueError) as error:
            raise RewardError(f"the sandbox gave no answer: {error or type(error).__name__}") from error

    def _line(self, stream: int, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._stop()
                    raise TimeoutError(f"nothing within {limit_s:g} s")
                piece = os.read(stream, 1 << 20)
                if not piece:
                    raise OSError("its launcher died")
                data += piece
        return bytes(data)


@cache
def _remove_stale_once() -> None:
    remove_stale(tempfile.gettempdir())


_told: set[Isolation] = set()
_lock = threading.Lock()


def _tell_once(isolation: Isolation, reasons: tuple[tuple[str, str], ...]) -> None:
    with _lock:
        if isolation in _told:
            return
        _told.add(isolation)
    because = "".join(f"; {name} is not possible ({reason})" for name, reason in reasons)
    level = logging.WARNING if isolation is Isolation.GUARD else logging.INFO
    logger.log(level, "programs under test are confined by %s%s", isolation, because)

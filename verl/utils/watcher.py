"""A small process that outlives a program and removes what the program could not remove itself.

A program that is killed (SIGKILL, out of memory) runs no clean-up of its own. Its watcher waits for its end, gives the
program's other processes a moment, ends those that remain, and sweeps shared memory and temporary folders.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from verl.utils.owned import OWNER_VARIABLE, Owner, owned_folders, processes_of, sweep

#: seconds in which processes that lost their program end by themselves, as Ray's do
GRACE_S = 4.0
_LIMIT_S = 60.0
_ENDED = b"ended"  # no path: those are absolute
_ROOT = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from verl.utils.watcher import main; main(sys.argv[2:])"
_lock = threading.Lock()
_watched: dict[int, subprocess.Popen[bytes] | None] = {}  # by process id, since a fork has this memory too


def ensure_watcher() -> None:
    """Have a watcher for this process, unless the program that started it has one on this machine."""
    with _lock:
        if os.getpid() in _watched or not Path("/proc/self/stat").exists():
            return
        _watched[os.getpid()] = None
        program = Owner.parse(os.environ.get(OWNER_VARIABLE, ""))
        current = Owner.current()
        if program is not None and program != current and program.space == current.space and not program.is_gone():
            return
        os.environ[OWNER_VARIABLE] = str(current)
        with contextlib.suppress(OSError):  # without one, the next start sweeps
            _watched[os.getpid()] = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, _ROOT, str(current), *map(str, owned_folders())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C and a killed process group are not for the watcher
                cwd="/",
            )


def also_sweep(folder: Path) -> None:
    """Have the watcher look in a further folder for what this program left."""
    ensure_watcher()
    with _lock:
        watcher = _watched.get(os.getpid())
        if watcher is not None and watcher.stdin is not None:
            with contextlib.suppress(OSError):
                watcher.stdin.write(os.fsencode(folder.absolute()) + b"\0")
                watcher.stdin.flush()


def new_program() -> None:
    """This process is a program of its own, whoever started it: it gets a watcher when it first needs one."""
    os.environ.pop(OWNER_VARIABLE, None)


def program_ended() -> None:
    """The program ended its processes itself: the watcher leaves alone what was meant to outlive it."""
    with _lock:
        watcher = _watched.get(os.getpid())
        if watcher is not None and watcher.stdin is not None:
            with contextlib.suppress(OSError):
                watcher.stdin.write(_ENDED + b"\0")
                watcher.stdin.close()
            watcher.stdin = None
            watcher.returncode = 0  # it outlives this process, and is not to be waited for


def main(arguments: list[str]) -> None:
    """Wait for the end of a process, then clean up after it.

    Args:
        arguments: the process as text, and the folders to sweep.
    """
    owner, folders = Owner.parse(arguments[0]), [Path(folder) for folder in arguments[1:]]
    if owner is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end(owner)
    told = _told()
    if _ENDED not in told:
        end_processes(str(owner), folders)
    sweep(folders + [Path(os.fsdecode(folder)) for folder in told if folder != _ENDED])


def _wait_for_end(owner: Owner) -> None:
    with contextlib.suppress(OSError):  # ended already, or no such call here
        fd = os.pidfd_open(owner.pid)
        try:
            if not owner.is_gone():
                select.select([fd], [], [])
        finally:
            os.close(fd)
    while not owner.is_gone():
        time.sleep(0.5)


def _told() -> list[bytes]:
    """What the program said: further folders, and that it ended its own processes."""
    told = b""
    while select.select([0], [], [], 0)[0] and (part := os.read(0, 65536)):
        told += part
    return told.split(b"\0")[:-1]


def end_processes(owner: str, folders: list[Path]) -> None:
    """Wait until the processes of a program have ended; kill those that do not end by themselves."""
    started = time.monotonic()
    while left := processes_of(owner, folders):
        late = time.monotonic() - started
        if late > _LIMIT_S:
            return
        if late > GRACE_S:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)

"""One run at a time in an output directory.

The lock is a file in the directory. It is held twice. The operating system holds it and frees it when the process ends
in any way. The file says who, where and since when, and its time of change is the last sign of life. The file counts
where the system's lock does not reach: between machines whose file system has no common locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.utils.fs import ensure_writable_dir, write_error
from verl.utils.owned import Owner, boot_id

logger = logging.getLogger(__name__)

LOCK_FILE = ".verl-lock"
#: a sign of life every so many seconds
BEAT_S = 15.0
#: a holder on another machine is dead when it gave no sign for so long
STALE_S = 120.0
_MOUNTS = Path("/proc/self/mountinfo")
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """Holds a directory for this process; taken again by the same process it counts.

    Args:
        directory: is created.
        purpose: the configuration key that names it, for messages.

    Raises:
        ConfigError: another live process holds it.
        CheckpointError: the directory cannot be written.
    """

    _held: ClassVar[dict[Path, DirectoryLock]] = {}
    _turn = threading.RLock()

    def __init__(self, directory: str | Path, purpose: str) -> None:
        self.directory = ensure_writable_dir(directory, purpose=f"directory ({purpose})").resolve()
        self.purpose = purpose
        self.path = self.directory / LOCK_FILE
        self._fd = -1
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._users = 1

    @classmethod
    def take(cls, directory: str | Path, purpose: str) -> DirectoryLock:
        """Hold a directory until :meth:`release`."""
        lock = cls(directory, purpose)
        with cls._turn:
            held = cls._held.get(lock.directory)
            if held is not None and held._pid == os.getpid():
                held._users += 1
                return held
            try:
                lock._acquire()
            except OSError as error:
                raise write_error(error, lock.path, f"lock of the directory ({purpose})") from error
            cls._held[lock.directory] = lock
        return lock

    def release(self) -> None:
        """Give the directory free and remove the file."""
        with self._turn:
            self._users -= 1
            if self._users or self._held.get(self.directory) is not self:
                return
            del self._held[self.directory]
            self._ended.set()
            if self._pid == os.getpid():
                with contextlib.suppress(OSError):
                    if os.fstat(self._fd).st_ino == self.path.stat().st_ino:
                        self.path.unlink()
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # ---- taking -------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            try:
                free = _lock(fd)
                holder = _read(fd)
                if not free or (holder is not None and _lives(holder, fd, self.directory)):
                    raise ConfigError(self._refusal(holder or {}))
                if os.fstat(fd).st_ino != _inode(self.path):  # its holder removed it while we opened it
                    os.close(fd)
                    continue
                if holder is not None:
                    logger.warning("%s held the lock of %s and has ended; taking it over", _who(holder), self.directory)
                _write(fd, self.directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise
            break
        self._fd = fd
        threading.Thread(target=self._beat, name="verl-lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def _refusal(self, holder: dict[str, Any]) -> str:
        message = (
            f"{self.purpose}={str(self.directory)!r}: another run works there: {_who(holder)}. Two runs in one place "
            "destroy each other's files: wait for it, end it, or choose another directory"
        )
        if holder.get("boot", boot_id()) != boot_id():
            message += (
                f". If that machine is gone, the lock counts as left behind {STALE_S:.0f} s after its last sign of "
                f"life; or remove {self.path}"
            )
        return message


@contextlib.contextmanager
def locked(directories: Mapping[str, str | Path | None]) -> Iterator[None]:
    """Hold several directories, by the configuration key that names each; None and repeated ones are left out."""
    with contextlib.ExitStack() as stack:
        for key, directory in directories.items():
            if directory is not None:
                stack.enter_context(DirectoryLock.take(directory, key))
        yield


def _lock(fd: int) -> bool:
    """Take the operating system's lock; False if another process has it. True too where there are no such locks."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _read(fd: int) -> dict[str, Any] | None:
    """What the file says; None for an empty or foreign one."""
    try:
        value = json.loads(os.pread(fd, 1 << 16, 0).decode("utf-8"))
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("owner"), str) else None


def _write(fd: int, directory: Path) -> None:
    program = " ".join(Path(word).name if number == 0 else word for number, word in enumerate(sys.argv[:2]))
    holder = {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "owner": str(Owner.current()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "program": program,
    }
    data = (json.dumps(holder, indent=1) + "\n").encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    os.fsync(fd)


def _lives(holder: dict[str, Any], fd: int, directory: Path) -> bool:
    """Whether a holder lives although the operating system gave us the lock."""
    owner = Owner.parse(holder["owner"])
    if holder.get("boot") == boot_id():
        if owner is None or owner.space != Owner.current().space:
            return False  # one kernel: its locks are right
        return owner.pid != os.getpid() and not owner.is_gone()
    # the lock is free: where all machines see it, its holder has ended
    return not _all_machines_see_locks(directory) and _age(fd, directory) < STALE_S


def _all_machines_see_locks(directory: Path) -> bool:
    """Whether the file system of a directory is certainly one whose locks count on every machine that mounts it."""
    device = directory.stat().st_dev
    try:
        lines = _MOUNTS.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return False
    for line in lines:
        mount, _, system = line.partition(" - ")
        numbers, kind = mount.split()[2:3], system.split()
        if numbers == [f"{os.major(device)}:{os.minor(device)}"] and len(kind) == 3:
            options = set(kind[2].split(","))
            if kind[0] in ("nfs", "nfs4"):
                return "local_lock=none" in options and "nolock" not in options
            return "flock" in options if kind[0] == "lustre" else kind[0] in ("ceph", "gpfs")
    return False


def _age(fd: int, directory: Path) -> float:
    """Seconds since the last sign of life, by the clock of the file system."""
    probe = directory / f"{LOCK_FILE}.{os.getpid()}.{time.time_ns()}"
    probe.touch()
    try:
        return probe.stat().st_mtime - os.fstat(fd).st_mtime
    finally:
        probe.unlink()


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "an unknown process"
    return (
        f"process {holder.get('pid', '?')} ({holder.get('program', '?')}) on {holder.get('host', '?')} since "
        f"{holder.get('since', '?')}"
    )


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1

"""Names in shared memory and temporary folders that say which process they belong to.

What a process leaves behind when it is killed has no owner any more. :func:`sweep` removes such things: at the end of
every program, and from a watcher process that outlives the program (:mod:`verl.utils.watcher`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: in the environment of every process that a program starts: the program's identity
OWNER_VARIABLE = "_VERL_RUN_OWNER"  # internal, set by programs for their children


#: inside a folder whose name has no room for its owner
OWNER_FILE = ".owner"


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


_NAME = re.compile(r"^verl-[a-z]+(?:-[a-z]+)*-(?P<owner>[0-9a-z]+\.[0-9a-z]+\.[0-9a-z]+)(?:-|$)")


_SHORT = re.compile(r"^verl-ray-[0-9a-f]{3}$")


_SHARED_MEMORY = Path("/dev/shm")


#: copies of model directories that this user's processes on this machine share
SHARED_COPIES = _SHARED_MEMORY / f"verl-models-{os.getuid()}"


_USERS = ".users"


@dataclass(frozen=True)
class Owner:
    """A process of this machine, told apart from a later one with the same id by its start.

    Attributes:
        space: of process ids; machines and containers have their own.
        pid: process id.
        started: clock ticks after the machine's start; 0 where the system does not tell.
    """

    space: int
    pid: int
    started: int

    def __str__(self) -> str:
        return ".".join(map(_short, (self.space, self.pid, self.started)))

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner that :meth:`__str__` wrote; None for other text."""
        try:
            space, pid, started = (int(part, 36) for part in text.strip().split("."))
        except ValueError:
            return None
        return cls(space, pid, started)

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(_space(), os.getpid(), start_of(os.getpid()) or 0)

    def is_gone(self) -> bool:
        """Whether the process has certainly ended; False for one of another machine or container."""
        if self.space != _space():
            return False
        started = start_of(self.pid)
        return started is None or (self.started != 0 and started not in (0, self.started))


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks after the machine's start; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            return 0
        return None if Path("/proc/self/stat").exists() else 0
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])  # a zombie holds nothing


def owned_name(kind: str) -> str:
    """A name that no one else has: ``verl-<kind>-<owner>-<random>``."""
    return f"verl-{kind}-{Owner.current()}-{secrets.token_hex(4)}"


def owner_of(path: Path) -> Owner | None:
    """The owner that a file or folder names; None for foreign ones."""
    if (match := _NAME.match(path.name)) is not None:
        return Owner.parse(match["owner"])
    if _SHORT.match(path.name) is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return Owner.parse((path / OWNER_FILE).read_text("ascii"))
    return None


@contextlib.contextmanager
def _turn(root: Path) -> Iterator[None]:
    """One process at a time below a folder of shared copies."""
    while True:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the last user of another copy removed the folder just now
            fd = os.open(root / ".turn", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if (root / ".turn").stat().st_ino == os.fstat(fd).st_ino:
                    break
            os.close(fd)
    try:
        yield
    finally:
        os.close(fd)


def _drop_unused(root: Path) -> None:
    """Remove copies whose users have all ended."""
    for users in root.glob(f"*{_USERS}"):
        for lease in users.iterdir():
            owner = Owner.parse(lease.name)
            if owner is not None and owner.is_gone():
                lease.unlink(missing_ok=True)
        if not any(users.iterdir()):
            name = users.name.removesuffix(_USERS)
            for path in (root / name, root / f"{name}.half", users):
                shutil.rmtree(path, ignore_errors=True)


def owned_folders() -> list[Path]:
    """Where programs leave owned things."""
    named = (os.environ.get(name) for name in ("RAY_TMPDIR", "TMPDIR"))
    folders = [Path(tempfile.gettempdir()), *map(Path, filter(None, named)), Path("/tmp"), _SHARED_MEMORY]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def sweep(folders: Sequence[Path] | None = None) -> list[Path]:
    """Remove what belongs to this user and to a process that has ended; returns what was removed."""
    removed = []
    for path in _ownerless(owned_folders() if folders is None else folders):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
        removed.append(path)
    if folders is None or _SHARED_MEMORY in folders:
        _sweep_copies()
    return removed


def _sweep_copies() -> None:
    """Remove shared copies without users, and their folder when it is empty."""
    with contextlib.suppress(OSError):
        if SHARED_COPIES.is_dir() and SHARED_COPIES.stat().st_uid == os.getuid():
            with _turn(SHARED_COPIES):
                _drop_unused(SHARED_COPIES)
                if set(os.listdir(SHARED_COPIES)) == {".turn"}:
                    shutil.rmtree(SHARED_COPIES, ignore_errors=True)


def _ownerless(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        try:
            names = [name for name in os.listdir(folder) if name.startswith("verl-")]
        except OSError:
            continue
        for name in names:
            path = folder / name
            with contextlib.suppress(OSError):
                owner = owner_of(path)
                if owner is not None and path.lstat().st_uid == os.getuid() and owner.is_gone():
                    yield path


def processes_of(owner: str, folders: Sequence[Path] | None = None) -> list[int]:
    """Ids of running processes that were started by a program or by its children, this one left out.

    The environment tells which program started a process. Processes of Ray overwrite a part of it when they set their
    titles. They are found by the log files that they hold in a folder of the program.

    Args:
        owner: the program, as text.
        folders: where its folders are; default: :func:`owned_folders`.
    """
    wanted = f"{OWNER_VARIABLE}={owner}".encode()
    own = [
        f"{path}/"
        for folder in (owned_folders() if folders is None else folders)
        for path in folder.glob("verl-*")
        if str(owner_of(path)) == owner
    ]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                started = wanted in (entry / "environ").read_bytes().split(b"\0") or (
                    (entry / "cmdline").read_bytes().startswith(b"ray::") and _holds_files(entry, own)
                )
                if started and start_of(int(entry.name)) is not None:
                    found.append(int(entry.name))
    return found


def _holds_files(process: Path, folders: Sequence[str]) -> bool:
    """Whether a process has a file open below one of the folders, which end in a slash."""
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(tuple(folders)):
                return True
    return False


def _space() -> int:
    """Tells this machine and its process-id namespace from others, which may share a temporary folder with it.

    The namespace alone does not: its number is the same on every machine that runs no container.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return zlib.crc32(f"{boot_id()} {namespace}".encode())


@cache
def boot_id() -> str:
    """Tells this start of this machine from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


def _short(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"

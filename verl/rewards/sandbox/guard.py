"""Run a Python program under audit hooks: ``guard.py FOLDER PROGRAM [ARGUMENT ...]``.

The last resort where the kernel confines nothing. It stops what Python code does by ordinary means; code that calls
the C library by itself gets round it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from contextlib import suppress

_REFUSED = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.startfile",
    "pty.spawn",
    "ctypes.dlsym",
    "resource.prlimit",
    "sqlite3.load_extension",
    "ftplib.",
    "smtplib.",
    "urllib.Request",
)
# modules that open files, and functions that make them, without a word to audit hooks
_MODULES = frozenset({"_dbm", "_gdbm", "_posixshmem"})
_FUNCTIONS = {
    "os": ("mkfifo", "mknod", "openpty"),
    "posix": ("mkfifo", "mknod", "openpty"),
    "_multiprocessing": ("SemLock", "sem_unlink"),
}
_CHANGES = {
    "os.chmod": 1, "os.chown": 1, "os.link": 2, "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1,
    "os.symlink": 2, "os.truncate": 1, "os.utime": 1, "os.chflags": 1, "os.setxattr": 1, "os.removexattr": 1,
    "shutil.rmtree": 1, "shutil.move": 2, "tempfile.mkstemp": 1, "tempfile.mkdtemp": 1,
}  # fmt: skip


def install(folder: str) -> None:
    """Refuse, from now on, connections, other programs, and changes to files outside ``folder``."""
    home = os.path.realpath(folder)
    realpath, fspath, join = os.path.realpath, os.fspath, os.path.join
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def inside(path: object) -> bool:
        if isinstance(path, int):
            return True  # an open file: it was checked when it was opened
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        real = realpath(fspath(path))  # type: ignore[call-overload]
        return real == home or real.startswith(join(home, "")) or real == os.devnull

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments[0], arguments[1], arguments[2]
            by_flags = isinstance(flags, int) and flags & writing
            by_mode = isinstance(mode, str) and set(mode) & set("wax+")
            if (by_flags or by_mode) and path is not None and not inside(path):
                raise PermissionError(f"the sandbox allows no writing at {path!r}")
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                if path is not None and not inside(path):
                    raise PermissionError(f"the sandbox allows no {event} at {path!r}")
        elif event == "sqlite3.connect" and arguments[0] not in (":memory:", "", b":memory:", b""):
            if str(arguments[0]).startswith("file:") or not inside(arguments[0]):
                raise PermissionError(f"the sandbox allows no database at {arguments[0]!r}")
        elif event == "import" and arguments[0] in _MODULES:
            raise ImportError(f"the sandbox does not allow {arguments[0]}")
        elif event.startswith(_REFUSED) or (event == "ctypes.dlopen" and arguments[0]):
            raise PermissionError(f"the sandbox does not allow {event}")

    for module, names in _FUNCTIONS.items():
        with suppress(ImportError):
            loaded = importlib.import_module(module)
            for name in names:
                if hasattr(loaded, name):
                    delattr(loaded, name)
    sys.addaudithook(hook)


if __name__ == "__main__":
    _, _folder, *sys.argv = sys.argv
    install(_folder)
    runpy.run_path(sys.argv[0], run_name="__main__")

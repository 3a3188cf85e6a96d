"""Temporary folders and shared copies of a program, removed when it ends, however it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from verl.utils.owned import _USERS, OWNER_FILE, SHARED_COPIES, Owner, _drop_unused, _turn, owned_name


def make_owned_dir(kind: str, folder: str | Path | None = None) -> Path:
    """A new private folder of this process in the temporary folder, or in ``folder``."""
    from verl.utils.watcher import ensure_watcher

    ensure_watcher()
    path = Path(folder or tempfile.gettempdir()) / owned_name(kind)
    path.mkdir(mode=0o700)
    return path


@contextlib.contextmanager
def owned_scratch(kind: str) -> Iterator[Path]:
    """:func:`make_owned_dir` for the time of a block."""
    path = make_owned_dir(kind)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_short_dir(folder: str | Path) -> Path:
    """A new private folder of this process for Ray, whose sockets need short paths; the owner is written inside."""
    from verl.utils.watcher import ensure_watcher

    ensure_watcher()
    while True:
        path = Path(folder) / f"verl-ray-{secrets.token_hex(2)[:3]}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            (path / OWNER_FILE).write_text(str(Owner.current()), "ascii")
            return path


def shared_copy(name: str, make: Callable[[Path], object], root: Path | None = None) -> Path:
    """A copy in shared memory that several processes use; it is removed when the last of them has ended.

    Args:
        name: of the copy; processes that give the same name share it.
        make: makes the copy at a path that does not exist.
        root: folder of all copies.
    """
    from verl.utils.watcher import ensure_watcher

    ensure_watcher()
    root = SHARED_COPIES if root is None else root
    target, users = root / name, root / f"{name}{_USERS}"
    with _turn(root):
        _drop_unused(root)
        users.mkdir(exist_ok=True)
        lease = users / str(Owner.current())
        new = not lease.exists()
        lease.touch()
        try:
            if not target.exists():
                half = root / f"{name}.half"
                shutil.rmtree(half, ignore_errors=True)
                make(half)
                half.rename(target)
        except BaseException:
            lease.unlink(missing_ok=True)
            _drop_unused(root)
            raise
    if new:
        atexit.register(_end_lease, root, lease, os.getpid())
    return target


def _end_lease(root: Path, lease: Path, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError), _turn(root):
            lease.unlink(missing_ok=True)
            _drop_unused(root)

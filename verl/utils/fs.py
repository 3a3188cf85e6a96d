"""Files that are either whole or absent, and directories that are checked before work depends on them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from verl.errors import CheckpointError


def fsync_path(path: str | Path) -> None:
    """Force a file, or the entries of a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync directories
            raise
    finally:
        os.close(fd)


def fsync_tree(root: str | Path) -> None:
    """Force everything below ``root`` to the disk: files first, then the directories that name them."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(os.path.join(folder, name))
        fsync_path(folder)


@contextlib.contextmanager
def atomic_open(path: str | os.PathLike[str], mode: str = "wb", encoding: str | None = None) -> Iterator[IO]:
    """Open a file for writing that appears under ``path`` only when the block ends without an error.

    The content goes to a temporary file beside it, is forced to the disk and renamed, so a reader, or a machine that
    loses power, sees the old content or the new one and nothing between.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    # with the permissions of any other output, as the umask says
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        with os.fdopen(fd, mode, encoding=encoding) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_path(path.parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a whole text file (UTF-8) or none."""
    with atomic_open(path, "w", encoding="utf-8") as handle:
        handle.write(text)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Write a whole binary file or none."""
    with atomic_open(path, "wb") as handle:
        handle.write(data)


def append_line(path: str | Path, line: str) -> None:
    """Append one line (UTF-8) to a file in one write: the whole line, or nothing where the disk is full."""
    data = (line + "\n").encode("utf-8")
    with open(path, "ab", buffering=0) as handle:
        before = os.fstat(handle.fileno()).st_size
        written = handle.write(data)
        if written != len(data):
            os.truncate(handle.fileno(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def mend_lines(path: str | Path) -> None:
    """Create a file of lines, or end its last line, which a process that was killed may have left without an end."""
    with open(path, "ab+", buffering=0) as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) != b"\n":
            handle.write(b"\n")


def free_bytes(path: str | Path) -> int:
    """Space that this user may still write on the file system of ``path`` or of its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def directory_bytes(root: str | Path) -> int:
    """Total size of the files below ``root``; a file that vanishes meanwhile counts as nothing."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def format_bytes(count: int) -> str:
    """``1536`` -> ``1.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def ensure_writable_dir(path: str | Path, *, purpose: str = "output directory", min_free_bytes: int = 0) -> Path:
    """Create a directory and prove by writing a byte that files can be written there.

    Args:
        path: the directory; parents are created.
        purpose: what it is, for the message; name the configuration key here.
        min_free_bytes: free space that must be there.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: it is a file, it is read-only, or the disk is full.
    """
    path = Path(path).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".write-test.", dir=path) as handle:
            handle.write(b"1")
            handle.flush()
    except OSError as error:
        raise write_error(error, path, purpose) from error
    free = free_bytes(path)
    if free < min_free_bytes:
        raise CheckpointError(
            f"{purpose} {str(path)!r} has {format_bytes(free)} free and needs {format_bytes(min_free_bytes)}; "
            "free some space or choose a directory on another disk"
        )
    return path


def write_error(error: OSError, path: str | Path, purpose: str = "output directory") -> CheckpointError:
    """The failure of a write as an error that says what to do about it."""
    where = f"{purpose} {str(path)!r}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(
            f"{where} is full ({format_bytes(free_bytes(path))} free): {error}; free some space, keep fewer "
            "checkpoints (trainer.max_ckpt_to_keep) or choose a directory on another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CheckpointError(f"{where} is not writable: {error}; check its owner and mount, or choose another one")
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return CheckpointError(f"{where} cannot be a directory, a file is in the way: {error}")
    return CheckpointError(f"cannot write to {where}: {error}")


def copy_to_local(source: str | Path, cache_dir: str | Path | None = None) -> str:
    """A local path for ``source``: itself when it is a plain path, or a copy in ``cache_dir``.

    Args:
        source: a file or directory.
        cache_dir: where a copy is wanted, for example a directory in memory (``model.use_shm``); a finished copy is
            found again by later calls.

    Raises:
        FileNotFoundError: there is nothing at ``source``.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no such file or directory: {str(source)!r}")
    if cache_dir is None:
        return str(path)
    cache = Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / path.name
    if target.exists():
        return str(target)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=cache))
    try:
        part = staging / path.name
        if path.is_dir():
            shutil.copytree(path, part)
        else:
            shutil.copy2(path, part)
        with contextlib.suppress(OSError):  # another process of this machine may have finished first
            part.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return str(target)

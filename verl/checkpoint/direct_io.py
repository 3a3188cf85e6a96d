"""Writing memory to a file beside a training that should not notice."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
from pathlib import Path

_PAGE = mmap.PAGESIZE
_CHUNK = 4 << 20  # large enough for a disk, and hashing it takes a few milliseconds
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP)  # file systems without it say so when the file is opened or written


def write_hashed(path: Path, content: memoryview) -> str:
    """Write a file, force it to the disk, and return its SHA-256, which is computed on the way.

    Where the system and the file system can, the disk reads the memory itself: a write through the page cache would
    copy everything once more, and compete with the training for memory and its bandwidth. Both hashing and writing
    leave the interpreter lock alone.

    Args:
        path: of the file; replaced if it exists.
        content: bytes. In memory that starts at a page (:class:`verl.checkpoint.staged_shards.HostMemory`), whole
            pages go to the disk directly.

    Raises:
        OSError: the disk is full or fails.
    """
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
    direct = -1
    try:
        direct = _open_direct(path) if len(content) >= _PAGE else -1
        for start in range(0, len(content), _CHUNK):
            chunk = content[start : start + _CHUNK]
            digest.update(chunk)
            whole = len(chunk) - len(chunk) % _PAGE
            if direct >= 0 and whole and not _write_all(direct, chunk[:whole], start, may_refuse=start == 0):
                os.close(direct)
                direct = -1
            written = whole if direct >= 0 else 0
            _write_all(fd, chunk[written:], start + written)
            if direct < 0:
                _forget(fd, start, len(chunk))
        os.fsync(fd)
    finally:
        if direct >= 0:
            os.close(direct)
        os.close(fd)
    return digest.hexdigest()


def _open_direct(path: Path) -> int:
    """The file opened past the page cache; -1 where that cannot be."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        return os.open(path, os.O_WRONLY | flag | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return -1
        raise


def _write_all(fd: int, content: memoryview, position: int, *, may_refuse: bool = False) -> bool:
    """Write at a position; False if the file system refuses this kind of writing at the first attempt."""
    done = 0
    while done < len(content):
        try:
            done += os.pwrite(fd, content[done:], position + done)
        except OSError as error:
            if may_refuse and done == 0 and error.errno in _NO_DIRECT:
                return False
            raise
    return True


def _forget(fd: int, start: int, length: int) -> None:
    """Write through and drop from the page cache, so that no long write-back builds up."""
    os.fdatasync(fd)
    with contextlib.suppress(OSError, AttributeError):  # not everywhere, and only a hint
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)

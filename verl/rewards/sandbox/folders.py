"""A program's folder: measured while it runs and removed afterwards, whatever it did to it. Standard library only."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress

PREFIX = "verl-sandbox-"
_DEEPEST = 100
_ATTEMPTS = 8
_STALE_S = 60.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_O_PATH = getattr(os, "O_PATH", 0)


def remove_tree(path: str) -> bool:
    """Remove a directory; whether nothing of it is left.

    Directories are moved up before they are emptied, so neither their depth nor the length of a path matters. Modes do
    not matter where this process owns the files or has root's rights. No symbolic link is followed.
    """
    parent, name = os.path.split(os.path.abspath(path))
    try:
        base = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        return any(_remove(base, name) for _ in range(_ATTEMPTS))
    finally:
        os.close(base)


def _remove(base: int, name: str) -> bool:
    waiting, number, complete = [name], 0, True
    while waiting:
        current = waiting.pop()
        try:
            directory = _open_directory(base, current)
        except FileNotFoundError:
            continue
        except OSError:
            try:
                os.unlink(current, dir_fd=base)
            except OSError:
                complete = False
            continue
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(moved := f"{name}.{os.getpid()}.{number}")
                            number += 1
                            _move(directory, entry.name, base, moved)
                        else:
                            os.unlink(entry.name, dir_fd=directory)
                    except OSError:
                        complete = False
        finally:
            os.close(directory)
        try:
            os.rmdir(current, dir_fd=base)
        except OSError:  # a file system may skip entries when others are removed: the next attempt sees them
            complete = False
    return complete


def _move(directory: int, name: str, base: int, moved: str) -> None:
    try:
        os.rename(name, moved, src_dir_fd=directory, dst_dir_fd=base)
    except PermissionError:  # a directory that its owner may not write cannot be moved
        os.close(_open_directory(directory, name))
        os.rename(name, moved, src_dir_fd=directory, dst_dir_fd=base)


def _open_directory(base: int, name: str) -> int:
    """A descriptor of a directory that its owner may read and change from now on."""
    if not _O_PATH:
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(name, dir_fd=base).st_mode):
                os.chmod(name, 0o700, dir_fd=base)
        return os.open(name, _DIRECTORY, dir_fd=base)
    anchor = os.open(name, _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base)
    try:
        if stat.S_IMODE(os.fstat(anchor).st_mode) & 0o700 != 0o700:
            with suppress(OSError):
                os.chmod(f"/proc/self/fd/{anchor}", 0o700)
        return os.open(".", _DIRECTORY, dir_fd=anchor)
    finally:
        os.close(anchor)


def usage(path: str, most: int) -> tuple[int, int]:
    """Bytes and number of the files below ``path``; the number is beyond ``most`` as soon as that is certain.

    More than 100 levels count as beyond it. A directory that cannot be read counts as one file.
    """
    try:
        return _usage(os.open(path, _DIRECTORY), most, 0)
    except OSError:
        return 0, 0


def _usage(directory: int, most: int, depth: int) -> tuple[int, int]:
    size = count = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                count += 1
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        if depth >= _DEEPEST:
                            return size, most + 1
                        inner = os.open(entry.name, _DIRECTORY, dir_fd=directory)
                        more_size, more_count = _usage(inner, most - count, depth + 1)
                        size, count = size + more_size, count + more_count
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                if count > most:
                    break
    finally:
        os.close(directory)
    return size, count


def read_regular(folder: str, name: str, most: int) -> bytes | None:
    """The contents of a regular file of at most ``most`` bytes; ``None`` where there is no such file."""
    try:
        handle = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    with os.fdopen(handle, "rb") as file:
        data = file.read(most + 1)
        return data if len(data) <= most else None


def hold(folder: str) -> int:
    """Mark a sandbox's folder as in use for the life of this process and of those that it forks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def remove_stale(parent: str) -> None:
    """Remove folders of sandboxes whose processes were all killed before they could do so themselves."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
                if not ours or time.time() - info.st_ctime < _STALE_S:
                    continue
                handle = os.open(entry.path, _DIRECTORY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(entry.path)
                finally:
                    os.close(handle)

"""Files written past the page cache, where there is a way past it."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.checkpoint.direct_io import write_hashed
from verl.checkpoint.staged_shards import HostMemory

PAGE = os.sysconf("SC_PAGE_SIZE")
PIECE = 4 << 20
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, PIECE, PIECE + PAGE, 2 * PIECE + 3 * PAGE + 5]


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On a disk, and on a file system that has no direct writes in every kernel."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no file system in memory")
    with tempfile.TemporaryDirectory(prefix="verl-test-", dir="/dev/shm") as path:
        yield Path(path)


def in_pages(content: bytes) -> memoryview:
    memory = HostMemory(len(content))
    memory.view[:] = content
    return memory.view


@pytest.mark.parametrize("size", SIZES)
def test_the_file_holds_the_memory_and_nothing_else(directory: Path, size: int) -> None:
    content, path = os.urandom(size), directory / "file"
    path.write_bytes(b"an older and perhaps longer one" * 1000)
    assert write_hashed(path, in_pages(content)) == hashlib.sha256(content).hexdigest()
    assert path.read_bytes() == content


def test_memory_that_does_not_start_at_a_page_is_written_too(directory: Path) -> None:
    content = os.urandom(3 * PAGE + 7)
    assert write_hashed(directory / "file", in_pages(b"x" + content)[1:]) == hashlib.sha256(content).hexdigest()
    assert (directory / "file").read_bytes() == content


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some say so when the file is opened, some when it is written."""
    content, plain_open = os.urandom(2 * PIECE + 9), os.open

    def no_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_direct)
    assert write_hashed(tmp_path / "file", in_pages(content)) == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        write_hashed(Path("/dev/full"), in_pages(bytes(2 * PAGE)))
    assert caught.value.errno == errno.ENOSPC

"""Files are whole or absent; directories are checked before work depends on them."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from verl.errors import CheckpointError
from verl.utils.fs import (
    atomic_open,
    atomic_write_bytes,
    atomic_write_text,
    copy_to_local,
    directory_bytes,
    ensure_writable_dir,
    format_bytes,
    write_error,
)


def test_an_interrupted_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "old π")
    with pytest.raises(RuntimeError), atomic_open(path, "w", encoding="utf-8") as handle:
        handle.write("half of the new")
        raise RuntimeError
    assert path.read_text("utf-8") == "old π"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    atomic_write_bytes(path, b"old")
    code = (
        "import os, sys\nfrom verl.utils.fs import atomic_open\n"
        "with atomic_open(sys.argv[1]) as f:\n f.write(b'new'); f.flush(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == 9
    assert path.read_bytes() == b"old"


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        atomic_write_bytes(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_writable_directory_is_created_and_left_clean(tmp_path: Path) -> None:
    path = ensure_writable_dir(tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b"
    assert list(path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match=r"outputs '.*a/b' cannot be a directory, a file is in the way"):
        ensure_writable_dir(tmp_path / "a" / "b", purpose="outputs")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a file system that refuses writes")
def test_a_read_only_directory_is_refused_by_a_real_write() -> None:
    with pytest.raises(CheckpointError, match=r"is not writable|cannot write"):
        ensure_writable_dir("/sys/kernel/verl-test")


def test_too_little_free_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"free and needs 1048576\.0 TiB; free some space"):
        ensure_writable_dir(tmp_path, min_free_bytes=2**60)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"is full \(.* free\).*trainer\.max_ckpt_to_keep"),
        (errno.EROFS, "is not writable"),
        (errno.EACCES, "is not writable"),
        (errno.ENOTDIR, "a file is in the way"),
        (errno.EIO, "cannot write to"),
    ],
)
def test_each_failure_says_what_to_do(tmp_path: Path, code: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        raise write_error(OSError(code, os.strerror(code)), tmp_path)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_directory_size_is_the_sum_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"45")
    assert directory_bytes(tmp_path) == 5


def test_a_local_path_stays_itself_and_a_copy_is_found_again(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    assert copy_to_local(source) == str(source)
    first = copy_to_local(source, tmp_path / "shm")
    assert (Path(first) / "config.json").read_text() == "{}"
    (source / "config.json").unlink()
    assert copy_to_local(source, tmp_path / "shm") == first
    assert sorted(os.listdir(tmp_path / "shm")) == ["model"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        copy_to_local(tmp_path / "nowhere")

"""One run at a time in a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.errors import CheckpointError, ConfigError
from verl.utils import run_lock
from verl.utils.run_lock import LOCK_FILE, DirectoryLock, locked

HOLDER = """
import sys
from verl.utils.run_lock import DirectoryLock
lock = DirectoryLock.take(sys.argv[1], "trainer.default_local_dir")
print("held", flush=True)
input()
lock.release()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_who_works_there(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with pytest.raises(ConfigError, match=rf"trainer.default_local_dir=.*process {process.pid} \(.*\) on .* since 20"):
        DirectoryLock.take(tmp_path, "trainer.default_local_dir")
    process.communicate("\n", timeout=30)
    assert os.listdir(tmp_path) == []
    with DirectoryLock.take(tmp_path, "trainer.default_local_dir"):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_killed_run_leaves_a_lock_that_counts_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = holder(tmp_path)
    process.kill()
    process.wait()
    assert os.listdir(tmp_path) == [LOCK_FILE]
    with DirectoryLock.take(tmp_path, "trainer.default_local_dir"):
        assert f"process {process.pid} " in caplog.text
    assert os.listdir(tmp_path) == []


def write(directory: Path, **changes: object) -> Path:
    with DirectoryLock.take(directory, "key"):
        text = (directory / LOCK_FILE).read_text()
    path = directory / LOCK_FILE
    path.write_text(json.dumps(json.loads(text) | changes))
    return path


def test_another_machine_counts_by_its_signs_of_life(tmp_path: Path) -> None:
    path = write(tmp_path, host="node7", boot="another")
    with pytest.raises(ConfigError, match=r"on node7 .* 120 s after its last sign of life; or remove .*\.verl-lock"):
        DirectoryLock.take(tmp_path, "key")
    assert os.listdir(tmp_path) == [LOCK_FILE]
    old = path.stat().st_mtime - run_lock.STALE_S - 1
    os.utime(path, (old, old))
    DirectoryLock.take(tmp_path, "key").release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("system", "takes"),
    [
        ("nfs4 server:/home rw,vers=4.2,local_lock=none,addr=10.0.0.1", True),
        ("nfs server:/home rw,vers=3,local_lock=all", False),
        ("nfs server:/home rw,vers=3,nolock,local_lock=none", False),
        ("lustre mgs:/scratch rw,flock,lazystatfs", True),
        ("lustre mgs:/scratch rw,localflock", False),
        ("gpfs /dev/gpfs rw", True),
        ("ext4 /dev/sda1 rw", False),
    ],
)
def test_a_free_lock_that_all_machines_see_is_taken_at_once(
    system: str, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a batch system kills a run and starts it again on another machine."""
    directory = tmp_path / "run"
    directory.mkdir()
    write(directory, host="node7", boot="another")
    device = directory.stat().st_dev
    mounts = tmp_path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(f"21 1 9:9 / /proc rw - proc proc rw\n36 21 {number} / /mnt rw shared:1 - {system}\n")
    monkeypatch.setattr(run_lock, "_MOUNTS", mounts)
    if takes:
        DirectoryLock.take(directory, "key").release()
    else:
        with pytest.raises(ConfigError, match="on node7"):
            DirectoryLock.take(directory, "key")


def test_a_live_process_counts_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = holder(tmp_path)

    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "lockf", none)
    with pytest.raises(ConfigError, match=f"process {process.pid} "):
        DirectoryLock.take(tmp_path, "key")
    process.communicate("\n", timeout=30)


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"owner": 5}', "\x00\xff" * 40])
def test_a_damaged_lock_that_no_process_holds_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    DirectoryLock.take(tmp_path, "key").release()
    assert os.listdir(tmp_path) == []


def test_the_same_process_may_hold_a_directory_several_times(tmp_path: Path) -> None:
    """For several keys that name one directory."""
    with locked({"a": tmp_path / "x", "b": f"{tmp_path}/./x", "c": None}):
        assert os.listdir(tmp_path / "x") == [LOCK_FILE]
    assert os.listdir(tmp_path / "x") == []


def test_a_folder_in_the_place_of_the_lock_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"\.verl-lock"):
        DirectoryLock.take(tmp_path, "key")

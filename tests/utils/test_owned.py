"""Things that outlive their process are recognised and removed; those of live processes stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.utils import owned
from verl.utils.owned import Owner, owner_of, sweep
from verl.utils.owned_dirs import make_owned_dir, make_short_dir, shared_copy


def dead_owner() -> Owner:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(Owner.current().space, process.pid, owned.start_of(process.pid) or 0)
    assert not owner.is_gone()
    process.communicate(b"\n")
    return owner


def test_an_owner_reads_back_and_is_told_apart_from_a_later_process_of_the_same_id() -> None:
    here = Owner.current()
    assert Owner.parse(str(here)) == here
    assert not here.is_gone()
    assert Owner(here.space, here.pid, here.started - 1).is_gone()
    assert dead_owner().is_gone()
    # another container's process ids say nothing here
    assert not Owner(here.space + 1, here.pid, here.started - 1).is_gone()
    for text in ("", "a", "1.2", "1.2.-", "verl.x.$"):
        assert Owner.parse(text) is None


def test_processes_of_another_machine_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may share a temporary folder, and their namespaces of process ids have equal numbers."""
    dead = dead_owner()
    (tmp_path / f"verl-weights-{dead}-ab12").write_text("")
    monkeypatch.setattr(owned, "boot_id", lambda: "another machine")
    assert not dead.is_gone()
    assert sweep([tmp_path]) == []
    monkeypatch.undo()
    assert len(sweep([tmp_path])) == 1


def test_a_sweep_takes_what_has_no_owner_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(owned.OWNER_VARIABLE, str(Owner.current()))  # this process has a watcher, so to starts none
    mine, short = make_owned_dir("weights", tmp_path), make_short_dir(tmp_path)
    dead = dead_owner()
    (tmp_path / f"verl-weights-{dead}-ab12").write_text("")
    (tmp_path / f"verl-sandbox-{dead}").mkdir()
    (tmp_path / f"verl-sandbox-{dead}" / "file").write_text("")
    left = tmp_path / "verl-ray-abc"
    left.mkdir()
    (left / owned.OWNER_FILE).write_text(str(dead))
    foreign = [tmp_path / name for name in ("verl-ray-fff", "verl-notes-2024", f"other-{dead}", "verl-models")]
    for path in foreign:
        path.mkdir()
    gone = sweep([tmp_path])
    assert {path.name for path in gone} == {f"verl-weights-{dead}-ab12", f"verl-sandbox-{dead}", "verl-ray-abc"}
    assert sorted(tmp_path.iterdir()) == sorted([mine, short, *foreign])
    assert owner_of(mine) == owner_of(short) == Owner.current()


USER = """
import sys, time
from pathlib import Path
from verl.utils.owned_dirs import shared_copy
print(shared_copy("model", lambda path: path.mkdir(), Path(sys.argv[1])), flush=True)
input()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_shared_copy_goes_with_its_last_user(tmp_path: Path, killed: bool) -> None:
    root = tmp_path / "copies"
    users = [
        subprocess.Popen(
            [sys.executable, "-c", USER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline().strip() == str(root / "model")
    users[0].communicate("\n", timeout=30)
    assert (root / "model").is_dir()
    if killed:
        users[1].kill()
        users[1].wait()
        shared_copy("another", lambda path: path.mkdir(), root)
    else:
        users[1].communicate("\n", timeout=30)
    assert not (root / "model").exists()


PROGRAM = """
import subprocess, sys, time
from verl.utils.owned_dirs import make_owned_dir
from pathlib import Path
from verl.utils.watcher import also_sweep, new_program, program_ended
new_program()
elsewhere = Path(sys.argv[2])
also_sweep(elsewhere)
make_owned_dir("weights", elsewhere)
folder = make_owned_dir("weights")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with (folder / "agent.log").open("w") as log:  # as Ray's agents, whose titles overwrite their environment
    agent = subprocess.Popen(["ray::DashboardAgent", "300"], executable="/bin/sleep", env={}, stdout=log)
print(folder, child.pid, agent.pid, flush=True)
if sys.argv[1] == "ended":
    program_ended()
else:
    time.sleep(300)
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_the_watcher_cleans_up_after_a_killed_program(end: str, tmp_path: Path) -> None:
    """A program that ended in order has ended its own processes; one that it means to stay stays."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", PROGRAM, end, str(elsewhere)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert program.stdout is not None
    folder, *children = program.stdout.readline().split()
    if end == "killed":
        assert Path(folder).is_dir()
        program.kill()
    program.wait(timeout=30)
    deadline = time.monotonic() + 30
    while (
        Path(folder).exists()
        or list(elsewhere.iterdir())
        or (end == "killed" and any(owned.start_of(int(child)) for child in children))
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [owned.start_of(int(child)) is not None for child in children] == [end == "ended"] * 2
    if end == "ended":
        for child in children:
            os.kill(int(child), signal.SIGKILL)

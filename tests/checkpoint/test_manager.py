"""Step directories are whole or absent, are found again, and go by rule."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.checkpoint import CheckpointManager, load_state, save_state
from verl.checkpoint.checksums import record_checksums
from verl.checkpoint.manager import step_of
from verl.errors import CheckpointError, ConfigError


def save(manager: CheckpointManager, step: int, parts: tuple[str, ...] = ("actor", "critic")) -> None:
    with manager.staging(step) as path:
        for part in parts:
            (path / part).mkdir()
            (path / part / "weights.bin").write_bytes(bytes([step % 256]) * 100)
        (path / "data.pt").write_bytes(b"d")


def visible(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_a_finished_save_leaves_the_directory_the_pointer_and_nothing_else(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    with manager.staging(20, info={"epoch": 1}) as path:
        assert path.name.startswith(".global_step_20.")
        (path / "actor").mkdir()
        (path / "actor" / "weights.bin").write_bytes(b"abc")
        assert not (tmp_path / "run" / "global_step_20").exists()
    root = tmp_path / "run"
    assert visible(root) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "20\n"
    assert (root / "global_step_20/actor/weights.bin").read_bytes() == b"abc"
    assert manager.find() == root / "global_step_20"
    assert manager.steps() == [20]


def test_a_failed_save_keeps_the_previous_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    with pytest.raises(RuntimeError, match="worker died"), manager.staging(2) as path:
        (path / "actor").mkdir()
        raise RuntimeError("worker died")
    assert visible(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert manager.find() == tmp_path / "global_step_1"


def test_a_full_disk_is_a_checkpoint_error_that_says_so(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    with pytest.raises(CheckpointError, match=r"is full .*max_ckpt_to_keep"), manager.staging(2):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert manager.find() == tmp_path / "global_step_1"


def test_a_disk_that_fills_during_the_commit_removes_the_staged_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    staged = manager.begin(2)
    (staged.path / "actor").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="is full"):
            staged.commit()
    assert visible(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_too_little_space_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    monkeypatch.setattr("verl.checkpoint.manager.free_bytes", lambda _: 100)
    with pytest.raises(CheckpointError, match="has 100 B free and the checkpoint of step 1 took"):
        manager.begin(2)
    assert visible(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("when", ["while writing", "before the pointer"])
def test_a_process_that_is_killed_leaves_the_last_checkpoint(tmp_path: Path, when: str) -> None:
    save(CheckpointManager(tmp_path), 1)
    script = f"""
import os
from verl.checkpoint import CheckpointManager
import verl.checkpoint.manager as module
staged = CheckpointManager({str(tmp_path)!r}).begin(2)
(staged.path / "actor").mkdir()
if {when!r} == "before the pointer":
    module.atomic_write_text = lambda *_: os._exit(9)
    staged.commit()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 9
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    manager = CheckpointManager(tmp_path)
    assert manager.find() == tmp_path / "global_step_1"
    expected = ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert visible(tmp_path) == (expected if when == "while writing" else sorted([*expected, "global_step_2"]))


def test_a_save_that_died_between_the_renames_is_undone(tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path), 3)
    dead = tmp_path / f".global_step_3.old.{socket.gethostname()}-{2**22 + 1}-0123abcd"
    (tmp_path / "global_step_3").rename(dead)
    manager = CheckpointManager(tmp_path)
    assert manager.find() == tmp_path / "global_step_3"
    assert visible(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]


def test_the_staging_of_a_live_process_is_left_alone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        alive = tmp_path / f".global_step_3.new.{socket.gethostname()}-{child.pid}-0123abcd"
        alive.mkdir()
        CheckpointManager(tmp_path)
        assert alive.is_dir()
    finally:
        child.communicate(timeout=30)
    CheckpointManager(tmp_path)
    assert not alive.exists()


def test_the_staging_of_another_machine_goes_when_it_is_old(tmp_path: Path) -> None:
    foreign = tmp_path / ".global_step_3.new.other-host-77-0123abcd"
    foreign.mkdir()
    CheckpointManager(tmp_path)
    assert foreign.is_dir()
    old = time.time() - 7200
    os.utime(foreign, (old, old))
    CheckpointManager(tmp_path)
    assert not foreign.exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 5)
    with manager.staging(5) as path:
        (path / "actor").mkdir()
        (path / "actor" / "new").write_text("x")
    names = sorted(p.name for p in (tmp_path / "global_step_5").rglob("*"))
    assert names == ["actor", "checksums.sha256", "complete.json", "new"]
    assert visible(tmp_path) == ["global_step_5", "latest_checkpointed_iteration.txt"]


def test_commit_twice_is_refused_and_abort_after_commit_does_nothing(tmp_path: Path) -> None:
    staged = CheckpointManager(tmp_path).begin(1)
    assert staged.commit() == tmp_path / "global_step_1"
    staged.abort()
    assert (tmp_path / "global_step_1").is_dir()
    with pytest.raises(CheckpointError, match="already committed"):
        staged.commit()


# ---------------------------------------------------------------------- retention


def test_whole_checkpoints_beyond_the_limit_go_oldest_first(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_ckpt_to_keep=2)
    for step in (1, 2, 10, 11):
        save(manager, step)
    assert manager.steps() == [10, 11]


def test_actor_and_critic_have_limits_of_their_own(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=2)
    for step in (1, 2, 3):
        save(manager, step)
    left = {step: sorted(p.name for p in (tmp_path / f"global_step_{step}").iterdir() if p.is_dir()) for step in (2, 3)}
    assert left == {2: ["critic"], 3: ["actor", "critic"]}
    assert not (tmp_path / "global_step_1").exists()  # neither part was left
    assert manager.steps() == [3]  # a checkpoint without its actor is not one to resume from


def test_an_actor_limit_without_a_critic_removes_the_whole_directory(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_actor_ckpt_to_keep=2)
    for step in (1, 2, 3):
        save(manager, step, parts=("actor",))
    assert visible(tmp_path) == ["global_step_2", "global_step_3", "latest_checkpointed_iteration.txt"]


def test_after_going_back_to_an_earlier_step_the_new_save_survives_the_limit(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_ckpt_to_keep=1)
    save(manager, 30)
    save(manager, 20)  # resumed from an older copy; 30 belongs to an abandoned branch
    assert 20 in manager.steps()
    assert manager.find() == tmp_path / "global_step_20"


@pytest.mark.parametrize("name", ["max_ckpt_to_keep", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"])
def test_a_limit_that_would_keep_nothing_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.{name}=0"):
        CheckpointManager(tmp_path, **{name: 0})


def test_a_loaded_checkpoint_is_deleted_only_when_another_one_is_left(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    assert manager.delete(tmp_path / "global_step_1") is False
    save(manager, 2)
    assert manager.delete(tmp_path / "global_step_1") is True
    assert visible(tmp_path) == ["global_step_2", "latest_checkpointed_iteration.txt"]


# ---------------------------------------------------------------------- finding


def test_an_empty_root_starts_from_the_beginning(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    assert manager.find() is None
    save(manager, 1)
    assert manager.find("disable") is None


@pytest.mark.parametrize("pointer", ["7\n", "seven", ""])
def test_a_pointer_that_leads_nowhere_falls_back_to_the_newest_complete_one(
    tmp_path: Path, pointer: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 2)
    save(manager, 3)
    (tmp_path / "global_step_4").mkdir()  # no marker: copied by halves
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(pointer)
    with caplog.at_level(logging.WARNING):
        assert manager.find() == tmp_path / "global_step_3"
    assert f"resuming from {tmp_path / 'global_step_3'}" in caplog.text


def test_traces_of_checkpoints_without_a_complete_one_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "global_step_4").mkdir()
    with pytest.raises(CheckpointError, match=r"incomplete: it has no readable .*resume_mode=disable"):
        CheckpointManager(tmp_path).find()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(CheckpointError, match=r"global_step_4' is incomplete"):
        CheckpointManager(tmp_path).find()


def test_resume_path_accepts_a_complete_step_directory_and_explains_others(tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(CheckpointManager(other), 8)
    manager = CheckpointManager(tmp_path / "run")
    assert manager.find("resume_path", other / "global_step_8") == other / "global_step_8"
    with pytest.raises(ConfigError, match="needs trainer.resume_from_path"):
        manager.find("resume_path")
    with pytest.raises(CheckpointError, match="no such directory"):
        manager.find("resume_path", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"not a global_step_N directory; did you mean .*global_step_8"):
        manager.find("resume_path", other)
    (other / "global_step_8" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: it has no readable complete\.json"):
        manager.find("resume_path", other / "global_step_8")
    with pytest.raises(ConfigError, match="auto, disable, resume_path"):
        manager.find("latest")


def test_a_checkpoint_that_lost_a_part_is_incomplete(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    (tmp_path / "global_step_1" / "critic").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="it lacks critic"):
        manager.find("resume_path", tmp_path / "global_step_1")


# ---------------------------------------------------------------------- checksums


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        save(manager, step)
    flip_a_bit(tmp_path / "global_step_3" / "actor" / "weights.bin")
    (tmp_path / "global_step_2" / "critic" / "weights.bin").unlink()
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(tmp_path).find() == tmp_path / "global_step_1"
    assert "actor/weights.bin has changed" in caplog.text
    assert "critic/weights.bin is missing" in caplog.text
    with pytest.raises(CheckpointError, match=r"damaged.*actor/weights\.bin has changed; choose another one"):
        manager.find("resume_path", tmp_path / "global_step_3")
    assert CheckpointManager(tmp_path, verify=False).find() == tmp_path / "global_step_3"


def test_sha256sum_reads_the_checksums(tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path), 1)
    command = ["sha256sum", "--check", "--quiet", "checksums.sha256"]
    assert subprocess.run(command, cwd=tmp_path / "global_step_1", timeout=60).returncode == 0
    flip_a_bit(tmp_path / "global_step_1" / "data.pt")
    assert subprocess.run(command, cwd=tmp_path / "global_step_1", timeout=60, capture_output=True).returncode == 1


def test_noted_checksums_are_taken_over(tmp_path: Path) -> None:
    """As a background save notes them; the file is not read again, so a wrong note shows up when loading."""
    manager = CheckpointManager(tmp_path)
    for step, content in ((1, b"weights"), (2, b"another")):
        with manager.staging(step) as path:
            (path / "actor" / "model").mkdir(parents=True)
            (path / "actor" / "model" / "0").write_bytes(b"weights")
            (path / "actor" / "engine.json").write_text("{}")
            record_checksums(path / "actor", "model-0", {"model/0": hashlib.sha256(content).hexdigest()})
    names = [line.split("  ")[1] for line in (tmp_path / "global_step_1/checksums.sha256").read_text().splitlines()]
    assert names == ["actor/engine.json", "actor/model/0"]
    assert visible(tmp_path / "global_step_1" / "actor") == ["engine.json", "model"]
    assert manager.find() == tmp_path / "global_step_1"  # the other one looks damaged


def test_a_noted_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    with pytest.raises(CheckpointError, match="No such file.*model/0"), manager.staging(2) as path:
        (path / "actor").mkdir()
        record_checksums(path / "actor", "model-0", {"model/0": "0" * 64})
    assert manager.steps() == [1]


# ---------------------------------------------------------------------- the best


@pytest.mark.parametrize(("mode", "best"), [("max", 20), ("min", 10)])
def test_the_best_stays_beside_the_newest(tmp_path: Path, mode: str, best: int) -> None:
    manager = CheckpointManager(tmp_path, max_ckpt_to_keep=1, best_mode=mode)
    for step, score in ((10, 0.1), (20, 0.9), (30, 0.9), (40, 0.5), (50, None)):
        with manager.staging(step, info={} if score is None else {"score": score}) as path:
            (path / "actor").mkdir()
    assert manager.steps() == [best, 50]
    assert manager.best_step() == best
    assert CheckpointManager(tmp_path).latest_step() == 50


def test_limits_of_parts_spare_the_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_actor_ckpt_to_keep=1, max_best_ckpt_to_keep=2)
    for step, score in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 0.0)):
        with manager.staging(step, info={"score": score}) as path:
            (path / "actor").mkdir()
    assert manager.steps() == [1, 3, 4]


def test_step_of_reads_the_step_from_the_name() -> None:
    assert step_of("a/b/global_step_120") == 120
    with pytest.raises(CheckpointError, match="not a global_step_N"):
        step_of("a/b/step_120")


# ---------------------------------------------------------------------- state files


def test_state_files_round_trip(tmp_path: Path) -> None:
    state = {"position": 17, "rng": torch.get_rng_state(), "kl_ctrl": {"value": 0.1}, "order": [3, 1], "name": "π"}
    save_state(tmp_path / "trainer_state.pt", state)
    loaded = load_state(tmp_path / "trainer_state.pt")
    assert torch.equal(loaded.pop("rng"), state.pop("rng"))
    assert loaded == state
    assert [entry.name for entry in tmp_path.iterdir()] == ["trainer_state.pt"]


class RunsCode:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_state_file_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"state": RunsCode(tmp_path / "made")}, tmp_path / "data.pt")
    with pytest.raises(CheckpointError, match=r"data\.pt' cannot be read"):
        load_state(tmp_path / "data.pt")
    assert not (tmp_path / "made").exists()


def test_missing_and_damaged_state_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no data\.pt"):
        load_state(tmp_path / "data.pt")
    (tmp_path / "data.pt").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match=r"data\.pt' cannot be read"):
        load_state(tmp_path / "data.pt")


def test_a_trained_reward_model_is_kept_as_long_as_the_critic(tmp_path):
    manager = CheckpointManager(tmp_path, max_critic_ckpt_to_keep=1)
    for step in (1, 2):
        with manager.staging(step) as directory:
            for part in ("actor", "reward_model"):
                (directory / part).mkdir()
                (directory / part / "weights").write_text("x")
    assert not (tmp_path / "global_step_1" / "reward_model").exists()
    assert (tmp_path / "global_step_1" / "actor").is_dir()
    assert (tmp_path / "global_step_2" / "reward_model").is_dir()

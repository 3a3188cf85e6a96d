"""Saving while training, best checkpoints, and disks that do not take a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.chaos import RunningTrainer, metrics_by_step, steps_logged
from tests.e2e.conftest import merge_overrides
from verl.checkpoint import CheckpointManager
from verl.errors import CheckpointError, TrainingError
from verl.trainer.run_record import RECORDS

pytestmark = pytest.mark.e2e

Run = Callable[..., list[dict[str, Any]]]

LOCAL = ["trainer.controller=local", "trainer.save_freq=1", "trainer.total_training_steps=3"]
ASYNC = ["actor_rollout_ref.actor.checkpoint.async_save=True"]
EXPORT = ["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]


def exported(step_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(step_dir / "actor" / "huggingface" / "model.safetensors")


def test_a_background_save_holds_the_state_of_its_step(run_training: Run, tmp_path: Path) -> None:
    run_training(*LOCAL, *EXPORT)
    run_training(*LOCAL, *EXPORT, *ASYNC)
    for step in (1, 2, 3):
        expected, actual = (exported(tmp_path / run / f"global_step_{step}") for run in ("run1", "run2"))
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert CheckpointManager(tmp_path / "run2").find() == tmp_path / "run2" / "global_step_3"


@pytest.mark.usefixtures("ray_local")
def test_a_background_save_of_two_workers_can_be_resumed_by_one(run_training: Run, tmp_path: Path) -> None:
    two = ["trainer.n_gpus_per_node=2", "trainer.save_freq=2", "trainer.total_training_steps=4", *ASYNC]
    whole = run_training(*two)
    assert sorted(entry.name for entry in (tmp_path / "run1").glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
    ]
    rest = run_training(
        "trainer.controller=local",
        "trainer.total_training_steps=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/run1/global_step_2",
    )
    for expected, actual in zip(whole[2:], rest, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert actual["data"][name] == pytest.approx(expected["data"][name], rel=1e-5, abs=1e-6)


def test_the_best_checkpoint_stays(run_training: Run, tmp_path: Path) -> None:
    metric = "val-core/digits/reward/mean@1"
    rows = run_training(
        *LOCAL, "trainer.test_freq=1", f"trainer.best_ckpt_metric={metric}", "trainer.max_ckpt_to_keep=1"
    )
    scores = {row["step"]: row["data"][metric] for row in rows}
    best = max(scores, key=lambda step: (scores[step], -step))
    manager = CheckpointManager(tmp_path / "run1")
    assert manager.best_step() == best
    assert manager.steps() == sorted({best, 3})
    assert (
        json.loads((tmp_path / "run1" / f"global_step_{best}" / "complete.json").read_text())["score"] == scores[best]
    )


def kept(directory: Path) -> list[str]:
    """What a run directory holds beside the record of the run and the final model."""
    records = {name.partition(".")[0] for name in RECORDS}
    return sorted(n for n in os.listdir(directory) if n.partition(".")[0] not in records and n != "huggingface")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny model and a half."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs privileges")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_leaves_the_previous_checkpoint(
    run_training: Run, small_disk: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on a disk that others fill while the checkpoint is being written
    monkeypatch.setattr("verl.checkpoint.manager.free_bytes", lambda _: 1 << 40)
    keys = [*LOCAL, f"trainer.default_local_dir={small_disk}", f"trainer.on_save_error={policy}"]
    if policy == "stop":
        with pytest.raises(CheckpointError, match=r"step 2 was not written.*No space left.*step 1 is intact"):
            run_training(*keys)
    else:
        with pytest.raises(CheckpointError, match=r"after step 3 and its final state was not saved.*of step 1"):
            run_training(*keys)
        rows = [json.loads(line) for line in (small_disk.parent / "run1.jsonl").open()]
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["data"].get("checkpoint/failed_saves", 0.0) for row in rows] == [0.0, 1.0, 1.0]
    assert kept(small_disk) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    manager = CheckpointManager(small_disk)
    assert manager.find() == small_disk / "global_step_1"  # its checksums too


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_file_system_that_becomes_read_only_leaves_the_previous_checkpoint(
    run_training: Run, small_disk: Path, policy: str, tmp_path: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    run_training(*LOCAL, f"trainer.default_local_dir={small_disk}", "trainer.total_training_steps=1")
    from verl.checkpoint.manager import CheckpointManager as Manager

    begin = Manager.begin

    def read_only_from_now(self: Manager, step: int) -> Any:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        return begin(self, step)

    keys = [*LOCAL, f"trainer.default_local_dir={small_disk}", f"trainer.on_save_error={policy}"]
    keys.append("trainer.save_final_model=False")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manager, "begin", read_only_from_now)
        # its open file would keep this test, unlike a failing disk, from making the file system read-only
        patch.setattr("verl.trainer.task_runner.TaskRunner.lock_directories", lambda _: None)
        if policy == "stop":
            with pytest.raises(CheckpointError, match=r"not writable.*step 1 is intact"):
                run_training(*keys)
        else:
            with pytest.raises(CheckpointError, match=r"final state was not saved.*of step 1"):
                run_training(*keys)
            rows = [json.loads(line) for line in (tmp_path / "run2.jsonl").open()]
            assert [row["step"] for row in rows] == [2, 3]
            assert [row["data"].get("checkpoint/failed_saves") for row in rows] == [1.0, 1.0]
    assert kept(small_disk) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert Manager(small_disk).find() == small_disk / "global_step_1"


KILLER = """
import os, signal

calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls == 20:  # in the second step of 16 samples
        os.kill(os.getpid(), signal.SIGTERM)
    return sum(c.isdigit() for c in solution_str) / 4 + len(solution_str) / 16
"""


def test_sigterm_saves_ends_and_the_next_start_goes_on(run_training: Run, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(KILLER)
    keys = [*LOCAL, f"trainer.default_local_dir={tmp_path}/same", "trainer.save_freq=100"]
    first = run_training(*keys, f"custom_reward_function.path={tmp_path}/reward.py")
    assert [row["step"] for row in first] == [1]  # the second step is given up in its middle
    assert CheckpointManager(tmp_path / "same").steps() == [1]
    (tmp_path / "reward.py").write_text(KILLER.replace("calls == 20", "False"))
    keys.append("trainer.on_resume_mismatch=allow")  # the reward file has changed
    second = run_training(*keys, f"custom_reward_function.path={tmp_path}/reward.py")
    assert [row["step"] for row in second] == [2, 3]


def test_a_process_that_is_to_end_saves_and_exits_with_75(base_overrides: list[str], tmp_path: Path) -> None:
    """As a batch system does it: SIGTERM to the command, then the same command again, and then a deadline."""
    own = ["trainer.controller=local", "trainer.save_freq=1000", "trainer.total_epochs=1000"]
    keys = merge_overrides(base_overrides, own, ["trainer.total_training_steps=1000"])
    with RunningTrainer(keys, tmp_path) as run:
        assert run.wait_until(lambda: steps_logged(tmp_path) >= 1), run.text()[-3000:]
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish() == 75, run.text()[-3000:]
    (first,) = CheckpointManager(tmp_path / "checkpoints").steps()
    assert first == steps_logged(tmp_path)
    with RunningTrainer([*keys, "trainer.time_limit_s=1000", "trainer.esi_redundant_time=999.9"], tmp_path) as run:
        assert run.finish() == 1, run.text()[-3000:]  # 75 would start it again and again
        assert "this start did not finish a single step" in run.text()
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [first]  # the next step is given up in its middle
    assert sorted(metrics_by_step(tmp_path)) == list(range(1, first + 1))


def test_a_run_that_saves_nothing_does_not_ask_to_be_started_again(run_training: Run) -> None:
    with pytest.raises(TrainingError, match=r"saved nothing \(trainer.save_freq=-1\)"):
        run_training(*LOCAL, "trainer.save_freq=-1", "trainer.time_limit_s=1000", "trainer.esi_redundant_time=999.9")


def test_a_time_limit_that_is_too_short_for_a_step_is_an_error(run_training: Run, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"trainer.time_limit_s.*did not finish a single step"):
        run_training(*LOCAL, "trainer.time_limit_s=1000", "trainer.esi_redundant_time=999.9")
    assert CheckpointManager(tmp_path / "run1").steps() == []


NAN_LOSS = """
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

calls = 0

@register_policy_loss("nan_once")
def nan_once(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
    global calls
    calls += 1
    loss = agg_loss(-advantages * torch.exp(log_prob - old_log_prob), response_mask, loss_agg_mode,
                    **config.global_batch_info)
    return (loss * float("nan") if calls == 6 else loss), {}  # two updates a step: the second of step 3
"""


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
def test_an_update_that_is_not_finite(
    run_training: Run, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"nan_once_{policy}"
    (tmp_path / f"{name}.py").write_text(NAN_LOSS.replace("nan_once", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = [
        *LOCAL,
        *EXPORT,
        "trainer.total_training_steps=4",
        "trainer.max_ckpt_to_keep=4",
        f"actor_rollout_ref.model.external_lib={name}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={name}",
        f"trainer.on_nonfinite={policy}",
    ]
    if policy == "stop":
        with pytest.raises(TrainingError, match="step 3: the loss or gradient of actor is not finite"):
            run_training(*keys)
        assert CheckpointManager(tmp_path / "run1").steps() == [1, 2]
        return
    rows = run_training(*keys)
    assert [row["data"]["actor/skipped_steps"] for row in rows] == [0.0, 0.0, 0.5, 0.0]
    two, three = (exported(tmp_path / "run1" / f"global_step_{step}") for step in (2, 3))
    went_back = all(torch.equal(two[name], three[name]) for name in two)
    assert went_back == (policy == "rollback")
    assert ("checkpoint/rollbacks" in rows[2]["data"]) == (policy == "rollback")

"""Configurations and files that cannot work, and directories that cannot be written."""

from __future__ import annotations

import subprocess
import tempfile

from tests.e2e.misuse.case import Case, Outcome, Place


def raising_reward(place: Place) -> None:
    """A reward function that fails on every sample."""
    (place.tmp / "reward.py").write_text("def compute_score(**kwargs):\n    raise KeyError('missing_answer_field')\n")


def file_in_the_way(place: Place) -> None:
    """Fails for root too, unlike permission bits."""
    (place.tmp / "blocked").write_text("")


def no_checkpoint(place: Place, done: Outcome) -> None:
    """No step directory is visible."""
    assert not list(place.out.glob("global_step_*")), done.stderr


def cannot_mount() -> str | None:
    """Whether a small file system can be made here."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"needs the right to mount a small tmpfs: {done.stderr.strip()}"
        subprocess.run(["umount", folder], check=True)
    return None


def small_disk(place: Place) -> None:
    """A real full file system (64 KiB) under the output directory."""
    place.out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place.out)], check=True)


def nothing_saved_on_the_small_disk(place: Place, done: Outcome) -> None:
    """The save fails and leaves nothing behind."""
    no_checkpoint(place, done)


CASES = [
    Case(
        "unknown key",
        "train",
        ["actor_rollout_ref.actor.optim.lrr=1e-5"],
        words=["actor_rollout_ref.actor.optim.lrr", "did you mean", "actor_rollout_ref.actor.optim.lr"],
    ),
    Case("misspelt estimator", "train", ["algorithm.adv_estimator=grop"], words=["grop", "did you mean", "grpo"]),
    Case(
        "indivisible batch",
        "train",
        ["data.train_batch_size=10"],
        words=["data.train_batch_size=10", "ppo_mini_batch_size=4"],
    ),
    Case(
        "critic path that is no model",
        "train",
        ["algorithm.adv_estimator=gae", "critic.model.path=/does/not/exist"],
        words=["critic.model.path", "/does/not/exist"],
    ),
    Case("missing file", "train", ["data.train_files=/does/not/exist.parquet"], words=["/does/not/exist.parquet"]),
    Case("wrong column", "train", ["data.prompt_key=question"], words=["question", "prompt"]),
    Case("no GPU", "train", ["trainer.device=cuda"], words=["trainer.device=cpu", "GPU"]),
    Case(
        "reward file without the function",
        "train",
        ["custom_reward_function.name=no_such_function"],
        words=["no_such_function", "compute_score"],
    ),
    Case(
        "reward that raises on every sample",
        "train",
        ["custom_reward_function.path={tmp}/reward.py"],
        code=1,
        prepare=raising_reward,
        words=["RewardError", "missing_answer_field"],
        quotes_traceback=True,
        check=no_checkpoint,
    ),
    Case(
        "a file where the output directory should be",
        "train",
        ["trainer.default_local_dir={tmp}/blocked/run"],
        code=1,
        prepare=file_in_the_way,
        words=["{tmp}/blocked"],
    ),
    Case(
        "a file where the directory of the result should be",
        "eval",
        ["data.output_path={tmp}/blocked/result.json"],
        code=1,
        prepare=file_in_the_way,
        words=["data.output_path", "{tmp}/blocked"],
    ),
    Case(
        "no space left",
        "train",
        ["trainer.save_freq=1"],
        code=1,
        words=["space"],
        prepare=small_disk,
        leaves=["**/*"],
        check=nothing_saved_on_the_small_disk,
        skip=cannot_mount,
    ),
]

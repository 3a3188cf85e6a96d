"""What a user gets wrong: one clear message, an exit code, no hang and nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import merge_overrides

pytestmark = pytest.mark.e2e


def train(overrides: list[str], timeout: float = 90) -> subprocess.CompletedProcess[str]:
    """The real command line, as a user would type it."""
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "VERL_LOGGING_LEVEL": "WARNING"},
        check=False,
    )


#: name -> (overrides, words that the message must contain)
CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (
        ["actor_rollout_ref.actor.optim.lrr=1e-5"],
        ["actor_rollout_ref.actor.optim.lrr", "did you mean", "actor_rollout_ref.actor.optim.lr"],
    ),
    "misspelt estimator": (["algorithm.adv_estimator=grop"], ["grop", "did you mean", "grpo"]),
    "indivisible batch": (
        ["data.train_batch_size=10"],
        ["data.train_batch_size=10", "ppo_mini_batch_size=4"],
    ),
    "critic path that is no model": (
        ["algorithm.adv_estimator=gae", "critic.model.path=/does/not/exist"],
        ["critic.model.path", "/does/not/exist"],
    ),
    "missing file": (["data.train_files=/does/not/exist.parquet"], ["/does/not/exist.parquet"]),
    "wrong column": (["data.prompt_key=question"], ["question", "prompt"]),
    "no GPU": (["trainer.device=cuda"], ["trainer.device=cpu", "GPU"]),
    "reward file without the function": (
        ["custom_reward_function.name=no_such_function"],
        ["no_such_function", "compute_score"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_told_at_start_up(name: str, base_overrides: list[str], tmp_path: Path) -> None:
    wrong, words = CASES[name]
    output = tmp_path / "out"
    done = train(merge_overrides(base_overrides, [f"trainer.default_local_dir={output}"], wrong))
    assert done.returncode not in (0, None)
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(output.glob("**/*")) if output.exists() else True


def test_reward_that_raises_on_every_sample(base_overrides: list[str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs):\n    raise KeyError('missing_answer_field')\n")
    output = tmp_path / "out"
    done = train(
        merge_overrides(
            base_overrides,
            [f"trainer.default_local_dir={output}", f"custom_reward_function.path={reward}"],
            ["trainer.controller=local"],
        )
    )
    assert done.returncode not in (0, None)
    assert "RewardError" in done.stderr
    assert "missing_answer_field" in done.stderr
    assert not list(output.glob("global_step_*"))


def test_output_directory_that_cannot_be_written(base_overrides: list[str], tmp_path: Path) -> None:
    """A file where the directory should be: fails for root too, unlike permission bits."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    done = train(merge_overrides(base_overrides, [f"trainer.default_local_dir={blocked}/run"]))
    assert done.returncode not in (0, None)
    assert str(blocked) in done.stderr
    assert "Traceback" not in done.stderr


def test_no_space_left(base_overrides: list[str], tmp_path: Path) -> None:
    """A real full file system (64 KiB) under the output directory; the save fails and leaves nothing behind."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        done = train(
            merge_overrides(
                base_overrides,
                [f"trainer.default_local_dir={mount}/run", "trainer.save_freq=1", "trainer.controller=local"],
                ["trainer.logger=[console]"],
            )
        )
        assert done.returncode not in (0, None)
        assert "space" in done.stderr
        assert not list((mount / "run").glob("global_step_*"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)

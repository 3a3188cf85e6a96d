"""A run that is asked to end does so in the middle of a step, saves, says so, and continues bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.chaos import RunningTrainer, metrics_by_step, steps_logged
from tests.e2e.conftest import merge_overrides

pytestmark = pytest.mark.e2e

#: from a file that the test writes: how long the function waits, and whether all answers are worth the same
SLOW_REWARD = """
import time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    control = Path(__file__).with_name("control")
    wait, constant, split = control.read_text().split() if control.exists() else ("0", "no", "train")
    if split == extra_info["split"]:
        time.sleep(float(wait))
    digits = sum(c.isdigit() for c in solution_str)
    return {"score": 1.0 if constant == "yes" else digits / 4 + len(solution_str) / 16, "digits": digits}
"""
KEYS = [
    "trainer.save_freq=3",
    "trainer.test_freq=2",
    "trainer.total_training_steps=4",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "ray_kwargs.ray_init.num_cpus=2",
    "ray_kwargs.ray_init.object_store_memory=100000000",
]


def result(directory: Path) -> tuple[bytes, object]:
    exported = directory / "checkpoints" / "global_step_4" / "actor" / "huggingface" / "model.safetensors"
    return exported.read_bytes(), metrics_by_step(directory)


@pytest.fixture
def slow(base_overrides: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    return merge_overrides(base_overrides, KEYS, [f"custom_reward_function.path={tmp_path}/reward.py"])


@pytest.mark.parametrize("controller", [pytest.param("local", marks=pytest.mark.slow), "ray"])
def test_sigterm_in_the_middle_of_a_step_saves_the_steps_before(
    controller: str, slow: list[str], tmp_path: Path
) -> None:
    """The state after step 2 was not due to be saved; it is kept for this."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    overrides = [*slow, f"trainer.controller={controller}"]
    with RunningTrainer([*slow, "trainer.controller=local"], whole) as run:
        assert run.finish() == 0, run.text()[-3000:]
    with RunningTrainer(overrides, ended) as run:
        assert run.wait_until(lambda: steps_logged(ended) == 2)
        (tmp_path / "control").write_text("30 no train")
        time.sleep(1.0)  # into the rewards of step 3, or into its generation
        asked = time.monotonic()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(timeout_s=120) == 75, run.text()[-3000:]
        assert time.monotonic() - asked < 60
        assert "ending in the middle of step 3: SIGTERM" in run.text()
    assert (ended / "checkpoints" / "global_step_2").is_dir()
    (tmp_path / "control").unlink()
    with RunningTrainer(overrides, ended) as run:
        assert run.finish() == 0, run.text()[-3000:]
    assert result(ended) == result(whole)


def test_dynamic_sampling_without_a_signal_ends_by_its_limit(slow: list[str], tmp_path: Path) -> None:
    (tmp_path / "control").write_text("0 yes train")
    overrides = [*slow, "trainer.controller=local", "algorithm.filter_groups.enable=True"]
    with RunningTrainer(overrides, tmp_path / "run") as run:
        assert run.finish() == 2
        text = run.text()
    assert "0 of 8 groups whose samples differ after generation batch 9 of at most 10" in text
    assert "step 1: 10 batches with 80 groups gave 0" in text
    assert "algorithm.filter_groups.max_num_gen_batches=10" in text


@pytest.mark.slow
def test_a_time_limit_ends_dynamic_sampling_in_the_middle(slow: list[str], tmp_path: Path) -> None:
    """Nothing is finished, so nothing is saved, and another start would not get further."""
    (tmp_path / "control").write_text("0.05 yes train")
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=0"]
    overrides = [*slow, *filtering, "trainer.controller=local", "trainer.time_limit_s=25"]
    with RunningTrainer(overrides, tmp_path / "run") as run:
        assert run.finish() == 1, run.text()[-3000:]
        text = run.text()
    assert "this start did not finish a single step" in text
    assert "ending in the middle of step 1: the deadline (trainer.time_limit_s) is near" in text
    assert not list((tmp_path / "run" / "checkpoints").glob("global_step_*"))


@pytest.mark.slow
def test_a_validation_that_was_given_up_is_made_up_for(slow: list[str], tmp_path: Path) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    overrides = [*slow, "trainer.controller=local"]
    with RunningTrainer(overrides, whole) as run:
        assert run.finish() == 0, run.text()[-3000:]
    (tmp_path / "control").write_text("30 no val")
    with RunningTrainer(overrides, ended) as run:
        assert run.wait_until(lambda: steps_logged(ended) == 1)
        time.sleep(3.0)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(timeout_s=120) == 75, run.text()[-3000:]
        assert "ending in the validation after step 2" in run.text()
    (tmp_path / "control").unlink()
    with RunningTrainer(overrides, ended) as run:
        assert run.finish() == 0, run.text()[-3000:]
    records = [line for line in (ended / "metrics.jsonl").read_text().splitlines() if '"step": 2' in line]
    assert ["val-core" in record for record in records] == [False, True]
    assert result(ended)[0] == result(whole)[0]


def test_ctrl_c_says_what_is_saved(slow: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    overrides = [*slow, "trainer.controller=local", "trainer.save_freq=1"]
    with RunningTrainer(overrides, tmp_path / "run") as run:
        assert run.wait_until(lambda: (tmp_path / "run/checkpoints/global_step_1").is_dir())
        (tmp_path / "control").write_text("30 no train")
        time.sleep(1.5)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.finish(timeout_s=60) == 130
        text = run.text()
    line = next(line for line in text.splitlines() if line.startswith("interrupted: "))
    assert f"is in {tmp_path}/run/checkpoints/global_step_" in line
    assert line.endswith("the same command continues from there")
    assert "Traceback" not in text

"""Dynamic sampling in a whole run: full batches of groups with a signal, and exact resumption with groups waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_equivalence import comparable
from tests.e2e.test_resume import deterministic, prompts

pytestmark = pytest.mark.e2e

STEPS = 4

# about a fifth of random answers end in one of these characters, so many groups of two are all wrong
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip()[-1:] in set("aeiouAEIOU0123456789"))
"""


@pytest.fixture
def dapo(tmp_path: Path) -> list[str]:
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        f"custom_reward_function.path={tmp_path}/reward.py",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.max_resp_len=8",
        "+reward_model.reward_kwargs.overlong_buffer_cfg={enable:true,len:4,penalty_factor:1.0,log:false}",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "data.train_batch_size=4",
        "data.gen_batch_size=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "trainer.controller=local",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
    ]


def test_every_group_has_a_signal_and_resuming_is_exact(
    run_training: Callable[..., list[dict[str, Any]]], dapo: list[str], tmp_path: Path
) -> None:
    whole = run_training(*dapo, f"trainer.rollout_data_dir={tmp_path}/whole")
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        samples = [json.loads(line) for line in (tmp_path / "whole" / f"{step}.jsonl").open()]
        assert len(samples) == 8
        groups: dict[str, set[float]] = {}
        for sample in samples:
            groups.setdefault(sample["uid"], set()).add(sample["acc"])
        assert len(groups) == 4
        assert all(len(outcomes) == 2 for outcomes in groups.values())
    surplus = [row["data"]["filter_groups/surplus"] for row in whole]
    batches = [row["data"]["filter_groups/num_gen_batches"] for row in whole]
    assert max(surplus) > 0, "the test must resume with groups waiting"
    assert max(batches) > 1, "the test must need several generation batches"
    start = max(range(STEPS - 1), key=lambda step: surplus[step]) + 1
    rest = run_training(
        *dapo,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/run1/global_step_{start}",
        f"trainer.rollout_data_dir={tmp_path}/rest",
    )
    assert deterministic(rest) == deterministic(whole[start:])
    for step in range(start + 1, STEPS + 1):
        assert prompts(tmp_path / "rest", step) == prompts(tmp_path / "whole", step)


@pytest.mark.usefixtures("ray_local")
def test_two_workers_choose_the_same_groups(
    run_training: Callable[..., list[dict[str, Any]]], dapo: list[str], tmp_path: Path
) -> None:
    short = [*dapo, "trainer.save_freq=-1", "trainer.total_training_steps=2"]
    one = run_training(*short, f"trainer.rollout_data_dir={tmp_path}/one")
    two = run_training(
        *short,
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        f"trainer.rollout_data_dir={tmp_path}/two",
    )
    for expected, actual in zip(one, two, strict=True):
        assert comparable(actual) == pytest.approx(comparable(expected), rel=1e-5, abs=1e-6)
    for step in (1, 2):
        assert prompts(tmp_path / "one", step) == prompts(tmp_path / "two", step)

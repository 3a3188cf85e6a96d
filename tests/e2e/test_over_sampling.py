"""Partial rollouts in a whole run: full batches, carried samples, exact resumption, servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import deterministic, prompts

pytestmark = pytest.mark.e2e

STEPS = 5


@pytest.fixture
def partial() -> list[str]:
    return [
        "data.train_batch_size=4",
        "data.max_response_length=48",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.over_sample_rate=0.5",
        "actor_rollout_ref.rollout.partial_rollout=True",
        "actor_rollout_ref.rollout.max_staleness=2",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.controller=local",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
    ]


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Metrics without clocks, those of agent loops included."""
    clocks = ("_seconds/", "engine_idle")
    return [{k: v for k, v in row.items() if not any(clock in k for clock in clocks)} for row in deterministic(rows)]


def check(rows: list[dict[str, Any]]) -> None:
    """Every step has its batch, and stays within the staleness that is allowed."""
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    carried = [row["data"]["over_sampling/carried"] for row in rows]
    assert max(carried) > 0
    staleness = [row["data"]["training/staleness/max"] for row in rows]
    assert staleness[0] == 0
    assert 0 < max(staleness) <= 2
    assert max(row["data"]["training/stale_token_fraction"] for row in rows) > 0


def test_carried_samples_are_trained_on_and_resuming_is_exact(
    run_training: Callable[..., list[dict[str, Any]]], partial: list[str], tmp_path: Path
) -> None:
    whole = run_training(*partial, f"trainer.rollout_data_dir={tmp_path}/whole")
    check(whole)
    for step in range(1, STEPS + 1):
        samples = [json.loads(line) for line in (tmp_path / "whole" / f"{step}.jsonl").open()]
        assert len(samples) == 8
        assert len({sample["uid"] for sample in samples}) == 4
    rest = run_training(
        *partial,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/run1/global_step_2",
        f"trainer.rollout_data_dir={tmp_path}/rest",
    )
    assert without_clocks(rest) == without_clocks(whole[2:])
    for step in range(3, STEPS + 1):
        assert prompts(tmp_path / "rest", step) == prompts(tmp_path / "whole", step)


def test_dropping_needs_no_state(run_training: Callable[..., list[dict[str, Any]]], partial: list[str]) -> None:
    dropped = [key for key in partial if "partial_rollout" not in key and "max_staleness" not in key]
    rows = run_training(*dropped, "trainer.total_training_steps=2", "trainer.save_freq=-1")
    for row in rows:
        assert row["data"]["over_sampling/started"] == 8
        assert row["data"]["over_sampling/dropped"] == 8
        assert row["data"]["training/staleness/max"] == 0


def test_overlong_responses_are_left_out_of_the_update(
    run_training: Callable[..., list[dict[str, Any]]], partial: list[str]
) -> None:
    """The same samples, groups and scores, another update."""
    plain = [key for key in partial if "rollout" not in key and "save_freq" not in key]
    one = [*plain, "trainer.total_training_steps=1"]
    ((whole,), (filtered,)) = (
        [row["data"] for row in run_training(*one, *more)]
        for more in ([], ["algorithm.filter_overlong_responses=True"])
    )
    assert 0 < whole["response/overlong_ratio"] < 1
    same = ("response/overlong_ratio", "critic/score/mean", "critic/advantages/max", "response_length/mean")
    assert [whole[name] for name in same] == [filtered[name] for name in same]
    assert whole["actor/pg_loss"] != filtered["actor/pg_loss"]


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_two_workers(run_training: Callable[..., list[dict[str, Any]]], partial: list[str], mode: str) -> None:
    rows = run_training(
        *partial,
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=-1",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"actor_rollout_ref.rollout.mode={mode}",
    )
    check(rows)

"""Rewards that fail now and then, within a whole training run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

FLAKY = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info, full_solution_str, prompt_str):
    assert full_solution_str == solution_str and prompt_str.endswith("")
    await asyncio.sleep(0.01)
    if extra_info["index"] % 5 == 0 and len(solution_str) % 2:
        raise ConnectionError("the judge was away")
    digits = sum(c.isdigit() for c in solution_str)
    return {"score": digits / 4 + len(solution_str) / 16, "acc": digits > 1, "pred": solution_str[:1]}
"""


def test_streaming_rewards_drop_the_groups_of_failed_samples(
    run_training: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    path = tmp_path / "flaky.py"
    path.write_text(FLAKY)
    steps = run_training(
        f"custom_reward_function.path={path}",
        "reward.reward_manager.name=streaming",
        "reward.on_error=drop_group",
        "reward.max_retries=1",
        "reward.retry_wait_s=0.01",
        "reward.timeout_s=20",
        "trainer.controller=local",
        "trainer.test_freq=3",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )
    rows = [step["data"] for step in steps]
    errors = sum(row["reward/errors"] for row in rows)
    dropped = sum(row["reward/abstained"] for row in rows)
    assert errors > 0
    assert errors <= dropped <= 2 * errors  # two samples a prompt
    assert all(row["reward/abstained"] % 2 == 0 for row in rows)
    assert all(abs(row["actor/pg_loss"]) < 10 for row in rows)
    last = rows[-1]
    assert 0.0 <= last["val-aux/digits/acc/pass@1"] <= last["val-aux/digits/acc/pass@4"] <= 1.0
    assert last["val-core/digits/acc/best@4"] == pytest.approx(last["val-aux/digits/acc/pass@4"])
    assert "val-core/digits/acc/maj@4" in last

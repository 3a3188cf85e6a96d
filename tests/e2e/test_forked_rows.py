"""Trajectories of several rows in whole runs: the same numbers for any number of ranks, with and without a critic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_over_sampling import without_clocks
from verl.trainer.ppo.glossary import undocumented

pytestmark = pytest.mark.e2e

R = "actor_rollout_ref.rollout"

# a model that forgets: one to three turns, each of which begins anew
LOOPS = """
from verl.agent_loop import AgentLoopBase, AgentLoopOutput

class Forgets(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt, rows = list(kwargs["raw_prompt_ids"]), []
        for turn in range(1 + kwargs["sample_index"] % 3):
            given = prompt[:turn]
            said = await self.generate(prompt + given, sampling_params, max_tokens=5)
            count = len(said.token_ids)
            rows.append(AgentLoopOutput(
                prompt, given + said.token_ids, [0] * len(given) + [1] * count, [0.0] * len(given) + said.log_probs,
                policy_versions=(said.policy_version, said.policy_version),
            ))
        *earlier, last = rows
        last.earlier = earlier
        last.extra_fields = {"turn_scores": [0.125 * turn for turn in range(len(rows))]}
        return last
"""

#: what depends on how the rows are cut
CUT = ("timing", "perf/", "global_seqlen/", "weight_sync/", "training/padding_rows")


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(CUT)} for row in without_clocks(rows)]


@pytest.fixture
def forgets(tmp_path: Path) -> list[str]:
    (tmp_path / "forgets.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- name: forgets\n  _target_: {tmp_path}/forgets.py:Forgets\n")
    return [
        f"{R}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{R}.agent.default_agent_loop=forgets",
        f"{R}.multi_turn.on_history_rewrite=fork",
        "data.return_raw_chat=True",
        "trainer.total_training_steps=2",
    ]


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_rows_are_trained_on_whatever_the_ranks(
    run_training: Callable[..., list[dict[str, Any]]], forgets: list[str], estimator: str
) -> None:
    own = [*forgets, f"algorithm.adv_estimator={estimator}"]
    if estimator == "gae":
        own.append("critic.ppo_mini_batch_size=8")
    one = run_training(*own, "trainer.controller=local")
    two = run_training(*own, "trainer.controller=ray", "trainer.n_gpus_per_node=2")
    for row in one:
        data = row["data"]
        # sixteen trajectories with one, two, three, one, ... rows
        assert data["training/rows"] == sum(1 + index % 3 for index in range(16))
        assert data["agent/forked_rows"] == data["training/rows"] - 16
        assert data["actor/grad_norm"] > 0
        assert undocumented(data) == []
    for single, cut in zip(numbers(one), numbers(two), strict=True):
        assert single.keys() == cut.keys()
        for name, value in single.items():
            assert cut[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name


def test_without_a_fork_nothing_changes(run_training: Callable[..., list[dict[str, Any]]]) -> None:
    own = [f"{R}.agent.default_agent_loop=single_turn_agent", "trainer.controller=local"]
    plain = numbers(run_training(*own))
    forked = numbers(run_training(*own, f"{R}.multi_turn.on_history_rewrite=fork"))
    for one, other in zip(plain, forked, strict=True):
        assert other.pop("training/rows") == 16
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name

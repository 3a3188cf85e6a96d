"""The plug-ins that docs/algorithms/own.md shows run as they stand there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from verl.algorithms.registry import get_adv_estimator_fn, make_state
from verl.config import ActorConfig
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import compute_advantage, prepare_policy_loss
from verl.workers.engine.base import GlobalBatchInfo
from verl.workers.losses import actor_loss

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "own.md"
NAN = float("nan")
MASK = torch.tensor([[1, 1], [1, 0]])
REWARDS = torch.tensor([[0.0, 3.0], [1.0, NAN]])


def batch() -> DataProto:
    return DataProto.from_dict({"token_level_rewards": REWARDS, "response_mask": MASK})


@pytest.fixture(autouse=True)
def _registered() -> None:
    namespace: dict[str, object] = {"__name__": "docs_example"}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), namespace)


def test_the_plain_estimator_and_loss() -> None:
    data = compute_advantage(batch(), adv_estimator="centred")
    assert data.batch["advantages"].tolist() == [[1.0, 1.0], [-1.0, 0.0]]

    config = ActorConfig()
    config.policy_loss.loss_mode = "no_clip"
    fields = {"response_mask": MASK, "old_log_probs": torch.zeros(2, 2), "advantages": data.batch["advantages"]}
    log_probs = torch.tensor([[math.log(2.0), 0.0], [0.0, NAN]], requires_grad=True)
    loss, metrics = actor_loss(config)({"log_probs": log_probs}, fields, GlobalBatchInfo(1, 3, 2))
    loss.backward()
    assert loss.item() == pytest.approx(-(2.0 + 1.0 - 1.0) / 3)
    assert metrics["actor/ratio"].value == pytest.approx((2.0 + 1.0 + 1.0) / 3)
    assert torch.isfinite(log_probs.grad).all()


def test_the_loss_that_needs_the_whole_batch() -> None:
    config = ActorConfig()
    config.policy_loss.loss_mode = "short_first"
    data = compute_advantage(batch(), adv_estimator="centred")
    data.batch["old_log_probs"] = torch.zeros(2, 2)
    data = prepare_policy_loss(data, config)
    loss, _ = actor_loss(config)({"log_probs": torch.zeros(2, 2)}, data.batch, GlobalBatchInfo(1, 3, 2))
    # the first response is the longer one: half its loss
    assert loss.item() == pytest.approx(-(0.5 + 0.5 - 1.0) / 3)


def test_the_estimator_that_remembers() -> None:
    state = make_state(get_adv_estimator_fn("running_mean"))
    first = compute_advantage(batch(), adv_estimator="running_mean", state=state)
    assert first.batch["advantages"].tolist() == [[3.0, 3.0], [1.0, 0.0]]
    assert state.state_dict() == {"value": pytest.approx(0.2)}
    second = compute_advantage(batch(), adv_estimator="running_mean", state=state)
    assert second.batch["advantages"][:, 0].tolist() == pytest.approx([2.8, 0.8])

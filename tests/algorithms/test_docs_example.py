"""The plug-ins that docs/algorithms.md shows run as they stand there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from verl.config import ActorConfig
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import compute_advantage
from verl.workers.engine.base import GlobalBatchInfo
from verl.workers.losses import actor_loss

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
NAN = float("nan")


def test_the_example_registers_and_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "docs_example"})

    mask = torch.tensor([[1, 1], [1, 0]])
    rewards = torch.tensor([[0.0, 3.0], [1.0, NAN]])
    data = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask})
    compute_advantage(data, adv_estimator="centred")
    assert data.batch["advantages"].tolist() == [[1.0, 1.0], [-1.0, 0.0]]

    config = ActorConfig()
    config.policy_loss.loss_mode = "no_clip"
    batch = {"response_mask": mask, "old_log_probs": torch.zeros(2, 2), "advantages": data.batch["advantages"]}
    log_probs = torch.tensor([[math.log(2.0), 0.0], [0.0, NAN]], requires_grad=True)
    loss, metrics = actor_loss(config)({"log_probs": log_probs}, batch, GlobalBatchInfo(1, 3, 2))
    loss.backward()
    assert loss.item() == pytest.approx(-(2.0 + 1.0 - 1.0) / 3)
    assert metrics["actor/ratio"].value == pytest.approx((2.0 + 1.0 + 1.0) / 3)
    assert torch.isfinite(log_probs.grad).all()

"""What a training step sends to its workers: each field once, and only what they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from verl.single_controller.ray import fields

pytestmark = pytest.mark.e2e

READ_BY_ALL = {"input_ids", "attention_mask", "position_ids", "response_mask"}


@pytest.mark.usefixtures("ray_local")
def test_a_step_sends_each_field_once(
    run_training: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO with reference and critic: five stages read the sequences, two of them values, none the scores."""
    sent: list[Counter[str]] = []
    asked: list[set[str]] = []

    place = fields.FieldStore.place

    def watched(self: fields.FieldStore, batch: Any) -> fields.Shard:
        missing = [name for name, tensor in batch.batch.items() if self._find(tensor) is None]
        if "input_ids" in missing and batch.batch["input_ids"].storage_offset() == 0:
            sent.append(Counter())
        sent[-1].update(missing)
        asked.append(set(batch.batch.keys()) | set(batch.non_tensor_batch))
        return place(self, batch)

    monkeypatch.setattr(fields.FieldStore, "place", watched)
    rows = run_training(
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "critic.optim.lr=1e-3",
    )
    assert len(rows) == len(sent) == 2
    for step in sent:
        # two workers; log-probabilities and values are where the workers made them
        assert step == dict.fromkeys([*READ_BY_ALL, "advantages", "returns"], 2)
    per_step = asked[: len(asked) // 2]
    assert per_step[0] == READ_BY_ALL
    assert per_step[-1] == READ_BY_ALL | {"old_log_probs", "advantages"}
    assert READ_BY_ALL | {"values", "returns"} in per_step

"""Achieved share of a device's peak, from the work that a worker did and the time that it took."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from verl.utils.flops import FlopsCounter
from verl.utils.metrics import MetricSet, msum
from verl.workers.engine.base import MicroBatching, ParallelLayout
from verl.workers.roles import base
from verl.workers.roles.base import RoleWorker


def run(monkeypatch: pytest.MonkeyPatch, device: str, epochs: int) -> MetricSet:
    clock = itertools.count(0, 2)  # an update takes two seconds
    monkeypatch.setattr(base.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(base, "device_name", lambda _: device)
    engine: Any = SimpleNamespace(
        flops=FlopsCounter(per_token=1e12, attention=0.0),
        layout=ParallelLayout(),
        train_batch=lambda *_, **__: MetricSet(
            pg_loss=msum(1.0), lr=msum(1.0), grad_norm=msum(1.0), skipped_steps=msum(0.0)
        ),
    )
    worker: Any = SimpleNamespace(device="cpu", updates=0, memory_metrics=lambda _: MetricSet())
    batch = TensorDict({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}, batch_size=2)
    return RoleWorker.run_update(
        worker,
        engine,
        batch,
        prefix="actor",
        loss=SimpleNamespace(want=frozenset()),
        mini_batch_size=2,
        epochs=epochs,
        micro=MicroBatching(),
    )


def test_utilisation_counts_real_tokens_forward_backward_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    # 5 tokens x 1e12 operations x 3 (forward and backward) x 2 epochs in 2 s, of 989e12 a second
    metrics = run(monkeypatch, "NVIDIA H100 80GB HBM3", epochs=2)
    assert metrics["perf/mfu/actor"].value == pytest.approx(5e12 * 3 * 2 / 2 / 989e12)


def test_a_device_of_unknown_peak_has_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = run(monkeypatch, "cpu", epochs=1)
    assert "perf/mfu/actor" not in metrics
    assert metrics["actor/pg_loss"].value == 1.0

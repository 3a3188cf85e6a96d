"""A step that changed nothing is noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.rollout.helpers import make_engine, make_model, weights_of
from verl.errors import ConfigError, WeightSyncError
from verl.workers.sharding_manager import WeightSender, WeightSync
from verl.workers.sharding_manager.change_detection import ChangeDetector, fingerprint
from verl.workers.sharding_manager.transports.disk import DiskTransport


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_one_changed_element_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, 3).to(dtype)
    before = int(fingerprint(tensor))
    assert int(fingerprint(tensor.clone())) == before
    tensor[2, 1] = 0
    assert int(fingerprint(tensor)) != before


def test_fingerprints_are_sums_of_words() -> None:
    one, two = 0x3F800000, 0x40000000
    assert int(fingerprint(torch.tensor([1.0, 2.0, 2.0, 1.0]))) == (two << 32) + one + (one << 32) + two
    assert int(fingerprint(torch.tensor(1.0, dtype=torch.bfloat16))) == 0x3F + 0x80  # what is no word counts by byte
    assert int(fingerprint(torch.zeros(0))) == 0
    # where a tensor begins in its storage makes no difference
    assert int(fingerprint(torch.arange(8.0)[1:])) == int(fingerprint(torch.arange(1.0, 8.0)))
    # the smallest step of a float32 is seen
    assert int(fingerprint(torch.nextafter(torch.ones(2), torch.tensor(2.0)))) == (0x3F800001 << 32) + 0x3F800001


def hand_over(changes: ChangeDetector, version: int, *, stepped: bool = True, **weights: float) -> int | None:
    for _ in changes.watch((name, torch.tensor([value])) for name, value in weights.items()):
        pass
    return changes.finish(version, stepped=stepped)


def test_changes_are_counted_and_their_absence_is_an_error() -> None:
    changes = ChangeDetector("error")
    assert hand_over(changes, 0, a=1.0, b=1.0) is None
    assert hand_over(changes, 1, a=1.0, b=2.0) == 1
    assert hand_over(changes, 2, a=1.0, b=2.0, stepped=False) == 0
    with pytest.raises(
        WeightSyncError, match=r"0 of 2 tensors changed .* version 3, although the optimizer made a step"
    ):
        hand_over(changes, 3, a=1.0, b=2.0)
    assert hand_over(changes, 4, a=3.0, b=4.0) == 2


def test_it_can_warn_or_not_look(caplog: pytest.LogCaptureFixture) -> None:
    changes = ChangeDetector("warn")
    hand_over(changes, 0, a=1.0)
    with caplog.at_level(logging.WARNING):
        assert hand_over(changes, 1, a=1.0) == 0
    assert "0 of 1 tensors changed" in caplog.text
    quiet = ChangeDetector()
    assert hand_over(quiet, 0, a=1.0) is None
    assert hand_over(quiet, 1, a=1.0) is None
    with pytest.raises(ConfigError, match="on_unchanged='raise': use ignore, warn, error"):
        ChangeDetector("raise")


class Source:
    def __init__(self, model: torch.nn.Module, *, live: bool) -> None:
        self.model = model
        self.live = live

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        return weights_of(self.model) if self.live else None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights_of(self.model).items()


@pytest.mark.parametrize("live", [True, False])
def test_a_step_that_the_rollout_does_not_see_is_an_error(live: bool, tmp_path: Path) -> None:
    model = make_model("qwen2")
    sync = WeightSync(Source(model, live=live), make_engine(model, tmp_path), on_unchanged="error")
    sync.sync(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.get_input_embeddings().weight.grad = torch.ones_like(model.get_input_embeddings().weight)
    optimizer.step()
    sync.sync(1)
    assert sync.last_report is not None
    assert sync.last_report.changed == 2  # tied: under both of its names
    sync.sync(2, stepped=False)
    with pytest.raises(WeightSyncError, match="0 of .* tensors changed"):
        sync.sync(3)


def test_a_sender_notices_too(tmp_path: Path) -> None:
    model = make_model("qwen2")
    side = WeightSender(Source(model, live=True), DiskTransport(tmp_path), on_unchanged="error")
    assert side.send(0).changed is None
    with pytest.raises(WeightSyncError, match="0 of .* tensors changed"):
        side.send(1)

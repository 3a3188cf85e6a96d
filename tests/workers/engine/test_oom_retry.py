"""When a micro-batch does not fit, a smaller one gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine.reference import LOG_PROBS, POLICY, TEMPERATURE, make_engine, policy_batch, policy_loss
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.oom_retry import OomRetry, halved


def test_a_rule_is_halved_down_to_one_row() -> None:
    assert halved(MicroBatching(), rows=8, longest=5) == MicroBatching(size=4)
    assert halved(MicroBatching(size=3), rows=8, longest=5) == MicroBatching(size=1)
    assert halved(MicroBatching(size=1), rows=8, longest=5) is None
    assert halved(MicroBatching(max_tokens=100), rows=8, longest=60) == MicroBatching(max_tokens=60)
    assert halved(MicroBatching(max_tokens=60), rows=8, longest=60) is None
    assert halved(MicroBatching(size=6, unit=2), rows=8, longest=5) == MicroBatching(size=2, unit=2)


def limited(engine: FSDPEngine, rows: int) -> FSDPEngine:
    """As on a device that holds so many rows at once."""
    module = engine.module
    forward = module.forward

    def run(layout: Any, want: frozenset[str], temperature: float = 1.0) -> dict[str, Tensor]:
        outputs = forward(layout, want, temperature)
        if layout.rows > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return outputs

    module.forward = run  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("micro", [MicroBatching(), MicroBatching(size=4), MicroBatching(max_tokens=80)])
def test_the_numbers_are_those_of_enough_memory(
    tiny_model_dir: str, micro: MicroBatching, caplog: pytest.LogCaptureFixture
) -> None:
    batch = policy_batch()
    whole, short = make_engine(tiny_model_dir), limited(make_engine(tiny_model_dir), rows=2)
    for engine in (whole, short):
        engine.forward(batch, LOG_PROBS, micro=micro, temperature=TEMPERATURE)
    for step in range(2):
        caplog.clear()
        expected, actual = (
            engine.train_batch(batch, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE).values_by_name()
            for engine in (whole, short)
        )
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)
        if step:
            assert "out of memory" not in caplog.text, "what was learnt is kept"
    for (name, a), (_, b) in zip(whole.named_tensors(), short.named_tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=name)  # Adam divides rounding by rounding


def test_a_row_that_does_not_fit_and_several_ranks_are_told_what_to_do(tiny_model_dir: str) -> None:
    engine = limited(make_engine(tiny_model_dir), rows=0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.forward(policy_batch(), LOG_PROBS, micro=MicroBatching(size=1))
    assert "a single row does not fit" in caught.value.__notes__[0]

    def fails(_: MicroBatching) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        OomRetry(torch.device("cpu"), world_size=2).run(MicroBatching(size=4), torch.ones(8, 3), fails)
    assert "the 2 ranks cannot repeat it together, so lower" in caught.value.__notes__[0]


def test_other_errors_pass(tiny_model_dir: str) -> None:
    def fails(_: MicroBatching) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        OomRetry(torch.device("cpu"), world_size=1).run(MicroBatching(), torch.ones(8, 3), fails)

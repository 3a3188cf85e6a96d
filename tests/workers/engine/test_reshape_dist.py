"""A run goes on with fewer ranks: 4, then 2, then 1, as if it had been one all along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import POLICY, TEMPERATURE, make_engine, policy_batch, policy_loss
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

pytestmark = pytest.mark.dist

CONTENTS = frozenset({"model", "optimizer", "extra"})
# an epsilon above the rounding of the gradients: the smallest ones would otherwise be divided by themselves
OPTIM = {"eps": 1e-3, "lr_scheduler_type": "cosine", "total_training_steps": 6}
CUTS = {4: (0, 1, 4, 6, 8), 2: (0, 5, 8), 1: (0, 8)}


def two_steps(engine: FSDPEngine, rank: int, world: int) -> list[dict[str, float]]:
    lo, hi = CUTS[world][rank : rank + 2]
    rows = {name: value[lo:hi] for name, value in policy_batch().items()}
    return [
        engine.train_batch(
            rows, policy_loss, want=POLICY, micro=MicroBatching(size=2), temperature=TEMPERATURE
        ).values_by_name()
        for _ in range(2)
    ]


def leg(rank: int, model_dir: str, work: str, before: str | None, background: bool) -> None:
    world = dist.get_world_size()
    engine = make_engine(model_dir, optim=OPTIM)
    if before is not None:
        engine.load(f"{work}/{before}", CONTENTS)
    metrics = two_steps(engine, rank, world)
    if background:
        engine.start_save(f"{work}/{world}", CONTENTS).wait()
    else:
        engine.save(f"{work}/{world}", CONTENTS)
    if rank == 0:
        torch.save(metrics, f"{work}/metrics{world}.pt")


def test_four_ranks_then_two_then_one_equal_the_straight_run(tiny_model_dir: str, tmp_path: Path) -> None:
    straight = make_engine(tiny_model_dir, optim=OPTIM)
    expected = [metrics for _ in range(3) for metrics in two_steps(straight, 0, 1)]
    run_ranks(4, leg, tiny_model_dir, str(tmp_path), None, False)
    run_ranks(2, leg, tiny_model_dir, str(tmp_path), "4", True)
    last = make_engine(tiny_model_dir, optim=OPTIM)
    last.load(tmp_path / "2", CONTENTS)
    actual = [*torch.load(tmp_path / "metrics4.pt"), *torch.load(tmp_path / "metrics2.pt"), *two_steps(last, 0, 1)]
    for here, there in zip(actual, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-6, abs=1e-6)
    parameters = dict(last.named_tensors())
    for name, tensor in straight.named_tensors():
        torch.testing.assert_close(parameters[name], tensor, rtol=0, atol=1e-6, msg=name)

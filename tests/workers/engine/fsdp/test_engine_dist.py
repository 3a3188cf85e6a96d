"""The FSDP engine on 2 and 4 gloo ranks: the numbers of one rank, and nobody left waiting.

Starting processes costs more than the checks, so each group of processes runs many.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.models.families import make_batch, make_config
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import (
    LOG_PROBS,
    POLICY,
    TEMPERATURE,
    VALUES,
    make_engine,
    policy_batch,
    policy_loss,
    run_reference,
    value_loss,
)
from verl.errors import CheckpointError, DataError
from verl.models.shape import model_shape
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

pytestmark = pytest.mark.dist

TRAINED = frozenset({"model", "optimizer", "extra"})
WHOLE = MicroBatching()


def rows(batch: dict[str, Tensor], lo: int, hi: int) -> dict[str, Tensor]:
    return {name: value[lo:hi] for name, value in batch.items()}


def parameters(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], atol: float) -> None:
    assert list(got) == list(want)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def train(engine: FSDPEngine, batch: dict[str, Tensor], micro: MicroBatching = WHOLE) -> dict[str, float]:
    return engine.train_batch(batch, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE).values_by_name()


def check_against_reference(
    model_dir: str, reference: dict[str, Any], lo: int, hi: int, *, packed: bool, micro: MicroBatching, **options: Any
) -> FSDPEngine:
    """Forward and two steps on this rank's rows give the whole batch's reference numbers."""
    batch = policy_batch()
    engine = make_engine(model_dir, packed=packed, **options)
    assert engine.layout.dp_size == dist.get_world_size()
    out = engine.forward(rows(batch, lo, hi), POLICY, micro=micro, temperature=TEMPERATURE)
    for name in POLICY:
        torch.testing.assert_close(out[name], reference[name][lo:hi], rtol=1e-6, atol=2e-6)
    for step in range(2):
        metrics = train(engine, rows(batch, lo, hi), micro)
        assert metrics["loss"] == pytest.approx(reference["loss"][step], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"][step], rel=1e-5)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, metrics)
        assert all(other == metrics for other in seen)
        assert_same(parameters(engine), reference["params"][step], atol=2e-4)
    return engine


def raises_everywhere(kind: type[Exception], action: Any) -> None:
    """Every rank gets the error, and gets it soon."""
    with pytest.raises(kind):
        action()
    dist.barrier()


def two_ranks(rank: int, model_dir: str, moe_dir: str, work: str) -> None:
    reference = torch.load(f"{work}/reference.pt")
    batch = policy_batch()
    uneven = ((0, 3), (3, 8))[rank]
    alone = ((0, 8), (8, 8))[rank]
    check_against_reference(model_dir, reference, *uneven, packed=True, micro=WHOLE)
    check_against_reference(model_dir, reference, *uneven, packed=True, micro=MicroBatching(size=2), checkpointing=True)
    check_against_reference(
        model_dir, reference, *uneven, packed=False, micro=MicroBatching(size=1), fsdp={"reshard_after_forward": False}
    )
    check_against_reference(
        model_dir, reference, *alone, packed=False, micro=WHOLE, fsdp={"offload_policy": True, "forward_prefetch": True}
    )
    # a rank without any row, while the other needs several micro-batches
    engine = check_against_reference(model_dir, reference, *alone, packed=True, micro=MicroBatching(max_tokens=24))

    # parameters are really sharded, names are those of Transformers, ties survive
    assert engine.local_tensors() is None
    shape = model_shape(engine.model_config, "lm")
    held = [torch.tensor(0) for _ in range(2)]
    dist.all_gather(held, torch.tensor(engine.state_bytes()["parameters"]))
    assert int(held[0]) == 4 * shape.shard(2)
    assert int(sum(held)) == 4 * shape.count
    assert engine.state_bytes()["optimizer"] == 2 * engine.state_bytes()["parameters"]
    embedding = engine.module.model.model.embed_tokens.weight
    assert isinstance(embedding, DTensor)
    assert embedding.to_local().shape[0] < embedding.shape[0]
    assert engine.module.model.lm_head.weight is embedding

    # a resumed run continues bit for bit
    engine.save(f"{work}/two", TRAINED | {"hf_model"})
    again = make_engine(model_dir)
    again.load(f"{work}/two", TRAINED)
    mine = rows(batch, *uneven)
    assert train(engine, mine) == train(again, mine)
    assert_same(parameters(engine), parameters(again), atol=0)
    continued = parameters(engine)
    if rank == 0:
        torch.save(continued, f"{work}/continued.pt")

    # a checkpoint of one rank continues on two
    one = make_engine(model_dir)
    one.load(f"{work}/one", TRAINED)
    train(one, mine)
    assert_same(parameters(one), torch.load(f"{work}/one_continued.pt"), atol=2e-4)

    # trouble on one rank reaches all of them
    raises_everywhere(
        DataError,
        lambda: engine.forward(
            rows(batch, 7, 8) if rank else rows(batch, 4, 5), LOG_PROBS, micro=MicroBatching(max_tokens=6)
        ),
    )
    raises_everywhere(CheckpointError, lambda: engine.load(f"{work}/nothing", TRAINED))
    raises_everywhere(CheckpointError, lambda: engine.load(f"{work}/two" if rank else f"{work}/nothing", TRAINED))

    def broken(outputs: Any, rows: Any, info: Any) -> tuple[Tensor, MetricSet]:
        return outputs["log_probs"].sum() * (float("nan") if rank == 1 else 1.0), MetricSet()

    before = parameters(engine)
    metrics = engine.train_batch(mine, broken, want=LOG_PROBS, micro=WHOLE).values_by_name()
    assert metrics["skipped_steps"] == 1
    assert_same(parameters(engine), before, atol=0)

    # bfloat16 computing, float32 weights
    half = make_engine(model_dir, compute="bfloat16", checkpointing=True)
    out = half.forward(mine, POLICY, micro=MicroBatching(size=2), temperature=TEMPERATURE)
    torch.testing.assert_close(out["log_probs"], reference["log_probs"][slice(*uneven)], rtol=0.02, atol=0.05)
    assert train(half, mine, MicroBatching(size=2))["grad_norm"] == pytest.approx(reference["grad_norm"][0], rel=0.05)
    assert {t.dtype for _, t in half.named_tensors()} == {torch.float32}

    # a critic, and experts that get no token on one rank
    critic = make_engine(model_dir, head="value")
    losses = [
        critic.train_batch(mine, value_loss, want=VALUES, micro=MicroBatching(size=2)).values_by_name()["loss"]
        for _ in range(3)
    ]
    assert losses == pytest.approx(torch.load(f"{work}/critic.pt"), rel=1e-5)
    experts = make_engine(moe_dir)
    metrics = train(experts, rows(moe_batch(), *((0, 1), (1, 4))[rank]), MicroBatching(size=2))
    want = torch.load(f"{work}/moe.pt")
    assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert_same(parameters(experts), want["params"], atol=2e-4)


def four_ranks(rank: int, model_dir: str, work: str) -> None:
    reference = torch.load(f"{work}/reference.pt")
    bounds = ((0, 1), (1, 5), (5, 5), (5, 8))[rank]
    hybrid = {"fsdp_size": 2}
    engine = check_against_reference(
        model_dir, reference, *bounds, packed=True, micro=MicroBatching(size=2), fsdp=hybrid
    )
    embedding = engine.module.model.model.embed_tokens.weight
    assert isinstance(embedding, DTensor)
    assert embedding.device_mesh.shape == (2, 2)
    check_against_reference(model_dir, reference, *bounds, packed=False, micro=WHOLE)
    # a checkpoint of two ranks
    engine.load(f"{work}/two", TRAINED)
    assert engine.step == 2
    train(engine, rows(policy_batch(), *bounds))
    assert_same(parameters(engine), torch.load(f"{work}/continued.pt"), atol=2e-4)


def moe_batch() -> dict[str, Tensor]:
    batch = make_batch([2, 6, 6, 9], [1, 5, 7, 3])
    generator = torch.Generator().manual_seed(3)
    batch["advantages"] = torch.randn(batch["response_mask"].shape, generator=generator)
    return batch


def test_two_and_four_ranks(tiny_model_dir: str, tmp_path: Path) -> None:
    batch = policy_batch()
    torch.save(run_reference(tiny_model_dir, batch), tmp_path / "reference.pt")

    moe_dir = str(tmp_path / "moe")
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(make_config("deepseek_v3")).save_pretrained(moe_dir)
    moe = make_engine(moe_dir)
    torch.save({**train(moe, moe_batch()), "params": parameters(moe)}, tmp_path / "moe.pt")

    one = make_engine(tiny_model_dir)
    train(one, batch)
    one.save(tmp_path / "one", TRAINED)
    train(one, batch)
    torch.save(parameters(one), tmp_path / "one_continued.pt")
    critic = make_engine(tiny_model_dir, head="value")
    losses = [
        critic.train_batch(batch, value_loss, want=VALUES, micro=WHOLE).values_by_name()["loss"] for _ in range(3)
    ]
    torch.save(losses, tmp_path / "critic.pt")

    run_ranks(2, two_ranks, tiny_model_dir, moe_dir, str(tmp_path))

    # what two ranks saved continues on one, optimizer included
    resumed = make_engine(tiny_model_dir)
    resumed.load(tmp_path / "two", TRAINED)
    assert resumed.step == 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "huggingface")
    assert_same({n: p.detach() for n, p in exported.named_parameters()}, parameters(resumed), atol=0)
    train(resumed, batch)
    assert_same(parameters(resumed), torch.load(tmp_path / "continued.pt"), atol=2e-4)

    run_ranks(4, four_ranks, tiny_model_dir, str(tmp_path))

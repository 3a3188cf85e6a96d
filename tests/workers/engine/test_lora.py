"""The engine with low-rank adapters, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import (
    LOG_PROBS,
    POLICY,
    TEMPERATURE,
    check_forms,
    make_engine,
    policy_batch,
    policy_loss,
)
from verl.errors import CheckpointError
from verl.models.lora import is_adapter_name
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

WHOLE = MicroBatching()
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
TRAINED = frozenset({"model", "optimizer", "extra"})


def log_probs(engine: FSDPEngine, batch: dict[str, Tensor], **options: bool) -> Tensor:
    return engine.forward(batch, LOG_PROBS, micro=WHOLE, temperature=TEMPERATURE, **options)["log_probs"]


def train(engine: FSDPEngine, batch: dict[str, Tensor]) -> dict[str, float]:
    return engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE).values_by_name()


@pytest.mark.parametrize("fsdp", [{}, {"offload_policy": True}])
def test_training_moves_the_adapters_alone_and_off_is_the_base(tiny_model_dir: str, fsdp: dict[str, bool]) -> None:
    batch = policy_batch()
    base = log_probs(make_engine(tiny_model_dir), batch)
    engine = make_engine(tiny_model_dir, model=LORA, fsdp=fsdp)
    frozen = {name: t.clone() for name, t in engine.hf_tensors().items() if not is_adapter_name(name)}
    torch.testing.assert_close(log_probs(engine, batch), base, rtol=0, atol=1e-6)
    for _ in range(3):
        assert train(engine, batch)["grad_norm"] > 0
    assert (log_probs(engine, batch) - base).abs().max() > 1e-3
    torch.testing.assert_close(log_probs(engine, batch, adapter=False), base, rtol=0, atol=1e-6)
    for name, tensor in engine.hf_tensors().items():
        if name in frozen:
            assert torch.equal(tensor, frozen[name]), name


def test_the_exported_and_the_handed_over_model_compute_what_the_adapters_do(
    tiny_model_dir: str, tmp_path: Path
) -> None:
    batch = policy_batch()
    engine = make_engine(tiny_model_dir, model=LORA)
    for _ in range(3):
        train(engine, batch)
    engine.save(tmp_path / "a", TRAINED | {"hf_model"})
    plain = make_engine(str(tmp_path / "a" / "huggingface"))
    torch.testing.assert_close(log_probs(plain, batch), log_probs(engine, batch), rtol=0, atol=2e-5)
    assert engine.local_tensors() is None  # there is no live tensor that a rollout could alias
    check_forms(engine, 2.0)
    live = engine.local_tensors("apart")
    assert live is not None
    assert all(live[name].data_ptr() == tensor.data_ptr() for name, tensor in engine.hf_tensors().items())
    alone = engine.local_tensors("adapters")
    assert alone is not None
    assert alone.keys() == {name for name in live if is_adapter_name(name)}
    handed = dict(engine.named_tensors())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "huggingface", dtype=torch.float32).state_dict()
    assert handed.keys() <= exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in handed.items())


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_exactly(tiny_model_dir: str, tmp_path: Path) -> None:
    batch = policy_batch()
    engine, whole = make_engine(tiny_model_dir, model=LORA), make_engine(tiny_model_dir)
    train(engine, batch)
    engine.save(tmp_path / "a", TRAINED)
    whole.save(tmp_path / "whole", TRAINED)
    size = {name: sum(f.stat().st_size for f in (tmp_path / name / "model").iterdir()) for name in ("a", "whole")}
    assert size["a"] < size["whole"] / 2
    again = make_engine(tiny_model_dir, model=LORA)
    again.load(tmp_path / "a", TRAINED)
    assert train(again, batch) == train(engine, batch)
    with pytest.raises(CheckpointError, match=r"was saved with adapters .*'rank': 4.*None; set model\.lora_rank"):
        whole.load(tmp_path / "a", TRAINED)
    adapter = make_engine(tiny_model_dir, model={**LORA, "lora_adapter_path": str(tmp_path / "a" / "lora_adapter")})
    again.load(tmp_path / "a", TRAINED)
    assert torch.equal(log_probs(adapter, batch), log_probs(again, batch))


def two_ranks(rank: int, model_dir: str, work: str) -> None:
    batch = policy_batch()
    rows = {name: value[(0, 3)[rank] : (3, 8)[rank]] for name, value in batch.items()}
    engine = make_engine(model_dir, model=LORA)
    expected = torch.load(f"{work}/expected.pt")
    for step in range(2):
        assert train(engine, rows)["grad_norm"] == pytest.approx(expected["grad_norm"][step], rel=1e-5)
    check_forms(engine, 2.0)
    for name, tensor in engine.named_tensors():
        torch.testing.assert_close(tensor, expected["weights"][name], rtol=0, atol=1e-5)
    task = engine.start_save(f"{work}/two", TRAINED)
    task.wait()


@pytest.mark.dist
def test_two_ranks_train_like_one_and_one_goes_on_from_two(tiny_model_dir: str, tmp_path: Path) -> None:
    batch = policy_batch()
    engine = make_engine(tiny_model_dir, model=LORA)
    norms = [train(engine, batch)["grad_norm"] for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    torch.save({"grad_norm": norms, "weights": weights}, tmp_path / "expected.pt")
    run_ranks(2, two_ranks, tiny_model_dir, str(tmp_path))
    again = make_engine(tiny_model_dir, model=LORA)
    again.load(tmp_path / "two", TRAINED)
    assert train(again, batch)["grad_norm"] == pytest.approx(train(engine, batch)["grad_norm"], rel=1e-5)

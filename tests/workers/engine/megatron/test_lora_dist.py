"""Low-rank adapters on Megatron-core, on two gloo ranks: the numbers and the files of the FSDP2 engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.models.families import make_config
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import POLICY, VALUES, check_forms, policy_batch, policy_loss, value_loss
from tests.workers.engine.reference import make_engine as make_fsdp_engine
from verl.errors import CheckpointError, ConfigError
from verl.model_merger import merge
from verl.models.lora import is_adapter_name, read_adapter
from verl.workers.engine.base import MicroBatching

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]

WHOLE, PARTS = MicroBatching(), MicroBatching(size=2)
TRAINED = frozenset({"model", "optimizer", "extra"})
LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
#: chosen so that a fused weight has adapters for a part of what is in it, and a stage has none at all
SOME: dict[str, dict[str, Any]] = {
    "parts": LORA | {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "first": LORA | {"target_modules": [r".*layers\.0\..*_proj"]},
}
FAMILIES = ("deepseek_v3", "gemma3_text")


def two_ranks(rank: int, model_dir: str, work: str) -> None:
    from tests.workers.engine.megatron import ranks as ours
    from verl.workers.engine.megatron.parallel import leave_parallel_groups

    def reference(name: str) -> dict[str, Any]:
        numbers: dict[str, Any] = torch.load(f"{work}/{name}.pt")
        return numbers

    batch = policy_batch()
    everything, parts, first = reference("all"), reference("parts"), reference("first")
    ours.check_lora(model_dir, everything, PARTS, batch, tp=2)
    ours.check_lora(model_dir, parts, WHOLE, batch, tp=2)
    engine = ours.check_lora(model_dir, everything, WHOLE, batch, tp=2, sequence_parallel=True, checkpointing=True)
    check_forms(engine, 2.0)
    assert engine.shards() is None
    assert engine.local_tensors() is None

    # a checkpoint holds what trains, and goes on under other sizes
    saved = Path(work) / "saved"
    engine.save(saved, TRAINED)
    tensors, settings = read_adapter(saved / "lora_adapter")
    assert (settings["r"], settings["base_model_name_or_path"]) == (3, model_dir)
    ours.assert_close(dict(sorted(tensors.items())), ours.adapters(engine), 0.0, "adapter file")
    stored = sum(f.stat().st_size for f in (saved / "model").iterdir())
    assert stored < 0.7 * (Path(model_dir) / "model.safetensors").stat().st_size
    merged = ours.parameters(engine)
    if rank == 0:
        merge(saved, Path(work) / "merged", backend="megatron")
        whole = AutoModelForCausalLM.from_pretrained(Path(work) / "merged", dtype=torch.float32)
        ours.assert_close({n: p.detach() for n, p in whole.named_parameters()}, merged, 1e-6, "merged")
    dist.barrier()
    after = train(engine)
    weights = ours.adapters(engine)
    for options in ({"tp": 2}, {"pp": 2}, {}):
        leave_parallel_groups()
        again = ours.make_megatron_engine(model_dir, model=LORA, **options)
        again.load(saved, TRAINED)
        got = train(again)
        assert got["loss"] == pytest.approx(after["loss"], rel=1e-5), options
        assert got["grad_norm"] == pytest.approx(after["grad_norm"], rel=1e-5), options
        ours.assert_close(ours.adapters(again), weights, 1e-4, f"resumed {options}")
    with pytest.raises(CheckpointError, match="saved with adapters"):
        ours.make_megatron_engine(model_dir).load(saved, TRAINED)
    with pytest.raises(CheckpointError, match="saved with adapters"):
        ours.make_megatron_engine(
            model_dir, model=LORA, use_dist_checkpointing=True, dist_checkpointing_path=str(saved)
        )

    ours.check_lora(model_dir, everything, PARTS, batch, pp=2, checkpointing=True)
    ours.check_lora(model_dir, first, PARTS, batch, pp=2)
    ours.check_lora(model_dir, everything, PARTS, batch)  # two data-parallel ranks
    ours.check_lora(model_dir, parts, PARTS, batch, use_distributed_optimizer=False)
    ours.check_lora(model_dir, everything, WHOLE, batch, cp=2)
    leave_parallel_groups()

    critic = ours.make_megatron_engine(model_dir, head="value", model=LORA, tp=2, sequence_parallel=True)
    losses = [
        critic.train_batch(batch, value_loss, want=VALUES, micro=PARTS).values_by_name()["loss"] for _ in range(3)
    ]
    expected = torch.load(f"{work}/critic.pt")
    assert losses == pytest.approx(expected["losses"], rel=1e-4)
    ours.assert_close(ours.parameters(critic), expected["weights"], 2e-4, "critic")
    half = ours.make_megatron_engine(model_dir, model=LORA, tp=2, dtype="bfloat16")
    assert half.train_batch(batch, policy_loss, want=POLICY, micro=PARTS).values_by_name()["grad_norm"] > 0
    assert {tensor.dtype for tensor in ours.adapters(half).values()} == {torch.bfloat16}

    small = policy_batch(vocab=60)
    for family in FAMILIES:
        ours.check_lora(f"{work}/{family}", reference(family), PARTS, small, tp=2)
    ours.check_lora(f"{work}/deepseek_v3", reference("deepseek_v3"), PARTS, small, ep=2)
    with pytest.raises(ConfigError, match="shared experts with adapters"):
        ours.make_megatron_engine(
            f"{work}/deepseek_v3", ep=2, model=LORA, override_transformer_config={"moe_shared_expert_overlap": True}
        )
    with pytest.raises(ConfigError, match="q_prjo"):
        ours.make_megatron_engine(f"{work}/deepseek_v3", ep=2, model=LORA | {"target_modules": ["q_prjo"]})


def train(engine: Any) -> dict[str, float]:
    from tests.workers.engine.megatron.ranks import rows_of

    mine = rows_of(policy_batch(), engine.layout.dp_rank, engine.layout.dp_size)
    metrics: dict[str, float] = engine.train_batch(mine, policy_loss, want=POLICY, micro=PARTS).values_by_name()
    return metrics


def start(path: str, directory: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model that goes on from an adapter whose second matrices are not zero."""
    engine = make_fsdp_engine(path, model=model)
    generator = torch.Generator().manual_seed(11)
    for name, tensor in engine.hf_tensors().items():
        if is_adapter_name(name):
            tensor.data.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    engine.save(directory, frozenset({"model"}))
    return model | {"lora_adapter_path": str(directory / "lora_adapter")}


def test_adapters(tiny_model_dir: str, tmp_path: Path) -> None:
    from tests.workers.engine.megatron.ranks import lora_reference

    batch = policy_batch()
    for name, model in {"all": LORA, **SOME}.items():
        settings = start(tiny_model_dir, tmp_path / f"{name}.start", model)
        lora_reference(tiny_model_dir, tmp_path / f"{name}.pt", settings, batch)
    for family in FAMILIES:
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(make_config(family)).save_pretrained(tmp_path / family)
        settings = start(str(tmp_path / family), tmp_path / f"{family}.start", LORA)
        lora_reference(str(tmp_path / family), tmp_path / f"{family}.pt", settings, policy_batch(vocab=60))
    critic = make_fsdp_engine(tiny_model_dir, head="value", model=LORA)
    losses = [
        critic.train_batch(batch, value_loss, want=VALUES, micro=WHOLE).values_by_name()["loss"] for _ in range(3)
    ]
    weights = {name: tensor.clone() for name, tensor in critic.named_tensors()}
    torch.save({"losses": losses, "weights": weights}, tmp_path / "critic.pt")
    run_ranks(2, two_ranks, tiny_model_dir, str(tmp_path))

"""What the Megatron tests run on their ranks: engines, and the comparison with plain Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.engine.reference import (
    BETAS,
    CLIP,
    EPS,
    LR,
    POLICY,
    TEMPERATURE,
    WEIGHT_DECAY,
    policy_batch,
    policy_loss,
)
from verl.config import MegatronConfig, ModelConfig, OptimConfig
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.megatron import MegatronEngine
from verl.workers.engine.megatron_parallel import leave_parallel_groups

#: short names of the keys that tests set
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def make_megatron_engine(
    path: str,
    *,
    head: str = "lm",
    checkpointing: bool = False,
    trained: bool = True,
    optim: dict[str, Any] | None = None,
    **megatron: Any,
) -> MegatronEngine:
    """A built engine on CPU; sizes by their short names, other keys of the section by their own."""
    section = {SIZES.get(name, name): value for name, value in megatron.items()}
    optim_config = OptimConfig(
        **{
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "clip_grad": CLIP,
            "betas": list(BETAS),
            "eps": EPS,
            **(optim or {}),
        }
    )
    engine = MegatronEngine(
        ModelConfig(path=path, enable_gradient_checkpointing=checkpointing),
        MegatronConfig(**{"sequence_parallel": False, **section}),
        optim_config if trained else None,
        head=head,
        device="cpu",
    )
    engine.build()
    return engine


def rows_of(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """An uneven share of the rows for each data-parallel rank."""
    bounds = [0, *(1 + (len(batch["input_ids"]) - 1) * (i + 1) // ranks for i in range(ranks))]
    return {name: value[bounds[rank] : bounds[rank + 1]] for name, value in batch.items()}


def parameters(engine: MegatronEngine) -> dict[str, Tensor]:
    """Whole parameters by Hugging Face name."""
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Whole gradients by Hugging Face name, as the last :meth:`train_batch` reduced them."""
    local = engine.bridge.local
    engine.bridge.local = {name: getattr(p, "main_grad", torch.zeros_like(p)) for name, p in local.items()}
    try:
        return {name: tensor.clone() for name, tensor in engine.named_tensors()}
    finally:
        engine.bridge.local = local


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], atol: float, what: str) -> None:
    assert list(got) == list(want), what
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, want[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{what}, {name}: {text}"
        )


def check_layout(
    model_dir: str, reference: dict[str, Any], micros: list[MicroBatching], **options: Any
) -> MegatronEngine:
    """Forward and two steps under one set of sizes give the numbers of plain Transformers on every rank."""
    leave_parallel_groups()
    batch = policy_batch()
    engine: MegatronEngine | None = None
    for micro in micros:
        engine = make_megatron_engine(model_dir, **options)
        layout = engine.layout
        mine = rows_of(batch, layout.dp_rank, layout.dp_size)
        what = f"{options} {micro}"
        out = engine.forward(mine, POLICY, micro=micro, temperature=TEMPERATURE)
        for name in POLICY:
            want = rows_of({name: reference[name], "input_ids": batch["input_ids"]}, layout.dp_rank, layout.dp_size)
            torch.testing.assert_close(out[name], want[name], rtol=1e-5, atol=5e-6, msg=lambda t, w=what: f"{w}: {t}")
        for step in range(2):
            metrics = engine.train_batch(
                mine, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE
            ).values_by_name()
            assert metrics["loss"] == pytest.approx(reference["loss"][step], rel=1e-4, abs=2e-6), what
            assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"][step], rel=1e-4), what
            seen: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(seen, metrics)
            assert all(other == metrics for other in seen), what
            assert_close(parameters(engine), reference["params"][step], 2e-4, f"{what} step {step}")
    assert engine is not None
    return engine

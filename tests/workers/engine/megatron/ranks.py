"""What the Megatron tests run on their ranks: engines, and the comparison with plain Transformers."""

from __future__ import annotations

from pathlib import Path
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
from tests.workers.engine.reference import make_engine as make_fsdp_engine
from verl.config import MegatronConfig, ModelConfig, OptimConfig
from verl.models.lora import is_adapter_name
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.megatron.engine import MegatronEngine
from verl.workers.engine.megatron.parallel import leave_parallel_groups

WHOLE = MicroBatching()

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
    model: dict[str, Any] | None = None,
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
        ModelConfig(path=path, enable_gradient_checkpointing=checkpointing, **(model or {})),
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


# ---- adapters ---------------------------------------------------------------------------------------------------


def adapters(engine: MegatronEngine) -> dict[str, Tensor]:
    """Whole adapter matrices by name."""
    return {name: tensor.clone() for name, tensor in sorted(engine.bridge.export_adapters())}


def lora_reference(path: str, file: Path, model: dict[str, Any], batch: dict[str, Tensor]) -> None:
    """What the FSDP2 engine makes of adapters: log-probs with and without them, and two updates."""
    engine = make_fsdp_engine(path, model=model)
    numbers: dict[str, Any] = {"model": model, "losses": [], "norms": [], "adapters": []}
    for name, adapter in (("on", True), ("off", False)):
        out = engine.forward(batch, POLICY, micro=WHOLE, temperature=TEMPERATURE, adapter=adapter)
        numbers[name] = out["log_probs"]
    for _ in range(2):
        metrics = engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE)
        numbers["losses"].append(metrics.values_by_name()["loss"])
        numbers["norms"].append(metrics.values_by_name()["grad_norm"])
        tensors = sorted(engine.hf_tensors().items())
        numbers["adapters"].append({name: t.detach().clone() for name, t in tensors if is_adapter_name(name)})
    numbers["merged"] = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    torch.save(numbers, file)


def check_lora(
    path: str, reference: dict[str, Any], micro: MicroBatching, batch: dict[str, Tensor], **options: Any
) -> MegatronEngine:
    """Adapters under one set of sizes give the numbers of the FSDP2 engine, and nothing else moves."""
    leave_parallel_groups()
    engine = make_megatron_engine(path, model=reference["model"], **options)
    layout = engine.layout
    what = f"{options} {micro} {reference['model'].get('target_modules')}"
    mine = rows_of(batch, layout.dp_rank, layout.dp_size)
    for name, adapter in (("on", True), ("off", False)):
        out = engine.forward(mine, POLICY, micro=micro, temperature=TEMPERATURE, adapter=adapter)
        want = rows_of({**batch, "log_probs": reference[name]}, layout.dp_rank, layout.dp_size)["log_probs"]
        torch.testing.assert_close(
            out["log_probs"], want, rtol=1e-5, atol=5e-6, msg=lambda text, name=name: f"{what} {name}: {text}"
        )
    frozen = {name: t.clone() for name, t in engine.bridge.local.items() if not is_adapter_name(name)}
    for step in range(2):
        metrics = engine.train_batch(mine, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE)
        got = metrics.values_by_name()
        assert (what, got["loss"]) == (what, pytest.approx(reference["losses"][step], rel=1e-4, abs=2e-6))
        assert (what, got["grad_norm"]) == (what, pytest.approx(reference["norms"][step], rel=1e-4))
        assert_close(adapters(engine), reference["adapters"][step], 2e-4, f"{what} step {step}")
    assert_close(parameters(engine), reference["merged"], 2e-4, what)
    assert all(torch.equal(engine.bridge.local[name], tensor) for name, tensor in frozen.items()), what
    return engine

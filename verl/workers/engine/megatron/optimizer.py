"""Megatron-core's optimizer, as this engine uses it: made from our section, clipped and stepped here."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config import OptimConfig

logger = logging.getLogger(__name__)

#: fields of Megatron-core's ``OptimizerConfig`` that are left to ``optim.override_optimizer_config``: how the state is
#: stored and moved, and how weight decay is applied. The others follow from our keys.
_FREE = frozenset(
    {
        "decoupled_weight_decay",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "fp8_recipe",
        "main_grads_dtype",
        "main_params_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "store_param_remainders",
        "use_precision_aware_optimizer",
        "use_torch_optimizer_for_cpu_offload",
    }
)
#: of these, the ones that say what is kept on the host: without meaning where the host is the device
_TO_HOST = frozenset(
    {
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_torch_optimizer_for_cpu_offload",
    }
)


def add_optimizer(
    models: Sequence[Any],
    config: Any,
    optim: OptimConfig,
    *,
    dtype: torch.dtype,
    distributed: bool,
    device: torch.device,
) -> tuple[list[Any], Any]:
    """Wrap the pieces of a model for the reduction of gradients, and make their optimizer.

    Args:
        models: the pieces.
        config: their ``TransformerConfig``.
        optim: the section.
        dtype: of the parameters.
        distributed: divide the optimizer's state over the data-parallel ranks.
        device: of the parameters.

    Returns:
        The wrapped pieces, and the optimizer.

    Raises:
        ConfigError: Megatron-core refuses the settings.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunks = [DistributedDataParallel(config=config, ddp_config=reduction, module=model) for model in models]
    _count_padding(chunks)
    config.finalize_model_grads_func = finalize_model_grads
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    overrides = optimizer_overrides(optim.override_optimizer_config, known)
    if device.type == "cpu":
        overrides = {name: value for name, value in overrides.items() if name not in _TO_HOST}
    if overrides.get("use_precision_aware_optimizer") and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "optim.override_optimizer_config.use_precision_aware_optimizer=True: needs Transformer Engine, which is "
            "not installed; leave it out"
        )
    try:
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=float(optim.betas[0]),
            adam_beta2=float(optim.betas[1]),
            adam_eps=optim.eps,
            clip_grad=0.0,  # clipped here, after a look at the norm
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            **overrides,
        )
        # no exceptions from weight decay: every engine decays every parameter
        optimizer = get_megatron_optimizer(
            settings, chunks, config_overrides={}, use_gloo_process_groups=device.type != "cpu"
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Megatron-core refuses these settings of the optimizer: {error}") from error
    return chunks, optimizer


def _count_padding(chunks: Sequence[Any]) -> None:
    """Let the positions of parameters hold in what Megatron-core 0.16 saves of the optimizer's state.

    They count the padding between the buckets of a buffer, and the tensor that it cuts them from leaves it out: the
    state of an embedding that stages share, which has a bucket of its own, would be saved from the wrong place.
    """
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()


def optimizer_overrides(overrides: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Values of ``optim.override_optimizer_config`` in Megatron-core's types.

    Args:
        overrides: they.
        known: fields of Megatron-core's ``OptimizerConfig``.

    Raises:
        ConfigError: a name that it does not have, or a setting that belongs to another key.
    """
    found = {}
    for name, value in overrides.items():
        key = f"optim.override_optimizer_config.{name}"
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known & _FREE), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key}: Megatron-core's OptimizerConfig has no such field{hint}")
        if name not in _FREE:
            raise ConfigError(
                f"{key}={value!r}: follows from the keys of the optim and megatron sections; set those. Fields that "
                f"can be set here: {', '.join(sorted(_FREE))}"
            )
        if name.endswith("_dtype"):
            dtype = getattr(torch, str(value).removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ConfigError(f"{key}={value!r}: is no type of torch; use float32, bfloat16, float16 or uint8")
            value = dtype
        found[name] = value
    return found


def clip_and_step(optimizer: Any, *, largest: float, lr: float, step: int) -> tuple[float, bool]:
    """One step with the gradients that the parameters have; nothing changes if they are not finite. Collective.

    Args:
        optimizer: Megatron-core's.
        largest: norm that gradients are scaled down to; 0 for no limit.
        lr: learning rate.
        step: its number, for the log.

    Returns:
        The norm before clipping, and whether it was finite.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        logger.warning(
            "gradient norm is %s at step %d: parameters stay as they are; look at the inputs of the loss", norm, step
        )
        return norm, False
    if 0 < largest < norm:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # the precision-aware optimizer keeps gradients of another type than the parameters under a name of its own
        grads = [g for p in parameters for g in (p.grad, getattr(p, "decoupled_grad", None)) if g is not None]
        if grads:
            torch._foreach_mul_(grads, largest / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step_with_ready_grads()
    return norm, True


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers behind Megatron-core's: one for experts, one for the rest; none where nothing is trained."""
    for one in optimizer.chained_optimizers:
        if isinstance(one.optimizer, torch.optim.Optimizer):
            yield one.optimizer


def state_tensors(optimizer: Any) -> list[Tensor]:
    """Moments of the parameters on this rank, without step counters."""
    return [
        value
        for inner in inner_optimizers(optimizer)
        for values in inner.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]


def materialise(optimizer: Any) -> None:
    """Make the state tensors of an optimizer that has not stepped yet."""
    for inner in inner_optimizers(optimizer):
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            state = inner.state[parameter]
            if not state:
                state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                if isinstance(inner, torch.optim.Adam):  # AdamW is one; others count steps per group
                    state["step"] = torch.tensor(0.0)

"""Placing a model on its ranks with FSDP2."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.errors import ConfigError
from verl.models.decoder import decoder_layers
from verl.models.heads import HeadModel
from verl.models.loading import DTYPES
from verl.models.sliced import local_part
from verl.utils.device import default_compute_dtype

if TYPE_CHECKING:
    from verl.config import FSDPConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Precision:
    """Numeric types of one model.

    Attributes:
        master: in which parameters are kept and updated.
        compute: of the forward and backward pass.
        reduce: of the gradient reduction over ranks.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, config: FSDPConfig, device: torch.device, *, trained: bool) -> Precision:
        """Resolve ``auto``: bfloat16 computing on CUDA, float32 on CPU; trained parameters are kept in float32."""
        compute_name = config.mixed_precision.param_dtype
        compute = default_compute_dtype(device) if compute_name == "auto" else DTYPES[compute_name]
        if config.model_dtype == "auto":
            master = torch.float32 if trained else compute
        else:
            master = DTYPES[config.model_dtype]
            if compute_name == "auto" and master != torch.float32:
                compute = master  # kept in half precision: computing in another type would only copy
        return cls(master, compute, DTYPES[config.mixed_precision.reduce_dtype])


def make_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """All ranks as one line of shards, or for 0 < ``fsdp_size`` < world size as replicas x shards.

    Raises:
        ConfigError: the world does not divide.
    """
    world = dist.get_world_size()
    if fsdp_size < 0 or fsdp_size >= world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
    if fsdp_size == 0 or world % fsdp_size:
        raise ConfigError(f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks; use a divisor or -1")
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


def make_sequence_mesh(device: torch.device, size: int) -> DeviceMesh:
    """All ranks as data-parallel groups of ``size`` neighbours that share sequences: dimensions ``dp`` and ``sp``.

    Raises:
        ConfigError: the world does not divide.
    """
    world = dist.get_world_size()
    if world % size:
        raise ConfigError(
            f"fsdp_config.ulysses_sequence_parallel_size={size} does not divide the {world} ranks; use a divisor"
        )
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("dp", "sp"))


#: (parameters by name, number of shards) -> ``shard_placement_fn`` of ``fully_shard``
ShardPlacement = Callable[[Iterable[tuple[str, nn.Parameter]], int], Callable[[nn.Parameter], Any]]


def shard_model(
    model: HeadModel,
    mesh: DeviceMesh,
    config: FSDPConfig,
    precision: Precision,
    device: torch.device,
    placement: ShardPlacement | None = None,
) -> FSDPModule:
    """Apply ``fully_shard`` to each decoder layer and to the whole; returns ``model``, now managed by FSDP.

    Args:
        model: with its whole parameters.
        mesh: from :func:`make_mesh`.
        config, precision, device: how to run it.
        placement: which dimension of each parameter is cut; None: the first one.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if precision.compute == precision.master else precision.compute,
        reduce_dtype=precision.reduce if precision.reduce != precision.compute else None,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if config.offload_policy:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    if placement is not None:
        shared["shard_placement_fn"] = placement(model.named_parameters(), mesh["fsdp"].size())
    layers = decoder_layers(model.model, list(config.wrap_policy.transformer_layer_cls_to_wrap))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **shared)
    # The root's parameters are needed again at the start of the backward pass: freeing them would be waste.
    # Its inputs are token ids and the row layout, which hold nothing to cast.
    shared["mp_policy"] = replace(policy, cast_forward_inputs=False)
    root = fully_shard(model, reshard_after_forward=False, **shared)
    # A rank may leave a parameter without gradient (no token for an expert): it must still join the reduction.
    root.set_reduce_scatter_unused_params(True)
    if config.forward_prefetch:
        for layer, following in itertools.pairwise(layers):
            cast(FSDPModule, layer).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
    return root


def whole_tensor(tensor: Tensor) -> Tensor:
    """The full value of a tensor; collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(
    parameters: list[nn.Parameter], max_norm: float, shard_group: dist.ProcessGroup | None
) -> tuple[float, bool]:
    """Global L2 norm of all gradients; scales them down to ``max_norm`` if they are larger.

    Each element counts once: shards add up over the shard group, replicas hold equal gradients. The sum is taken in
    float32 (float64 across tensors).

    Args:
        parameters: of the model.
        max_norm: largest norm to leave; 0 or less only measures.
        shard_group: ranks that hold the other shards; None when this rank holds whole parameters.

    Returns:
        The norm before clipping and whether it is finite. Nothing is scaled if it is not.
    """
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    grads = [g for g in grads if g.numel()]
    device = grads[0].device if grads else torch.device("cpu")
    if grads:
        norms = torch.stack(torch._foreach_norm(grads, 2, torch.float32))
        square = norms.double().square().sum()
    else:
        square = torch.zeros((), dtype=torch.float64, device=device)
    if shard_group is not None:
        dist.all_reduce(square, group=shard_group)
    norm = float(square.sqrt())
    finite = norm < float("inf")  # false for nan too
    if finite and 0 < max_norm < norm:
        torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
    return norm, finite

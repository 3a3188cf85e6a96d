"""Process groups: one set-up for worker processes, torchrun and a plain single process."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from verl.errors import ConfigError
from verl.utils.device import dist_backend, local_device_index, resolve_device, set_device

logger = logging.getLogger(__name__)


def env_rank() -> int:
    """Global rank from the environment variable ``RANK``; 0 when unset."""
    return _int_env("RANK", 0)


def env_world_size() -> int:
    """Number of processes from ``WORLD_SIZE``; 1 when unset."""
    return _int_env("WORLD_SIZE", 1)


def env_local_rank() -> int:
    """Rank within the machine from ``LOCAL_RANK``; the global rank when unset."""
    return _int_env("LOCAL_RANK", env_rank())


def env_local_world_size() -> int:
    """Number of this job's processes on this machine from ``LOCAL_WORLD_SIZE``; all of them when unset."""
    return _int_env("LOCAL_WORLD_SIZE", env_world_size())


def init_process_group(device: str = "auto", timeout_s: float = 600.0) -> torch.device:
    """Join the default process group as the environment says; a second call changes nothing.

    With ``WORLD_SIZE`` unset or 1 and no ``MASTER_ADDR`` the group is this process alone and its store lives in
    memory, so nothing needs a free port.

    Args:
        device: ``"auto"``, ``"cpu"`` (gloo) or ``"cuda"`` (NCCL for CUDA tensors, gloo for CPU ones).
        timeout_s: seconds after which a collective that does not complete raises instead of waiting on.

    Returns:
        The device of this process; on CUDA it is made the current one.

    Raises:
        ConfigError: several processes without a meeting point, or a rank outside the world.
    """
    kind = resolve_device(device)
    target = torch.device(kind, local_device_index(env_local_rank())) if kind == "cuda" else torch.device("cpu")
    set_device(target)
    if dist.is_initialized():
        return target
    rank, world_size = env_rank(), env_world_size()
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is outside WORLD_SIZE={world_size}; ranks count from 0 to {world_size - 1}")
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(dist_backend(target), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return target
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world_size} but {' and '.join(missing)} unset; start the processes with torchrun, "
            "or set the address and port of rank 0 for all of them"
        )
    dist.init_process_group(
        dist_backend(target), init_method="env://", rank=rank, world_size=world_size, timeout=timeout
    )
    logger.debug("joined the process group as rank %d of %d on %s", rank, world_size, target)
    return target


def destroy_process_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Rank in the group; before a group exists, the environment's rank."""
    return dist.get_rank(group) if dist.is_initialized() else env_rank()


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Size of the group; before a group exists, the environment's world size."""
    return dist.get_world_size(group) if dist.is_initialized() else env_world_size()


def is_rank_zero() -> bool:
    """Whether this process is the one that writes shared files and console lines."""
    return get_rank() == 0


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank; nothing when alone."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.barrier(group)


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Reduce in place over the group and return the tensor; ``op`` is ``"sum"``, ``"max"`` or ``"min"``."""
    if op not in _REDUCE_OPS:
        raise ValueError(f"unknown reduction {op!r}; use one of {', '.join(_REDUCE_OPS)}")
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, _REDUCE_OPS[op], group)
    return tensor


def all_reduce_numbers(
    values: Sequence[float],
    op: str = "sum",
    *,
    device: str | torch.device = "cpu",
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Reduce plain numbers in float64 over the group, in one collective."""
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        return [float(v) for v in values]
    packed = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)
    return [float(v) for v in all_reduce(packed, op, group).tolist()]


def free_port(host: str = "") -> int:
    """A TCP port that was free a moment ago; the meeting point of a new group should use it at once."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _int_env(name: str, default: int) -> int:
    raw = os.environ.get(name)
    if raw is None or raw == "":
        return default
    try:
        return int(raw)
    except ValueError:
        raise ConfigError(f"environment variable {name}={raw!r} is not an integer") from None

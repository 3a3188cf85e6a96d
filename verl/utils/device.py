"""The one place that asks which accelerator there is; everything else takes a device as an argument."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass

import psutil
import torch

from verl.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str = "auto") -> str:
    """Turn ``trainer.device`` into ``"cpu"`` or ``"cuda"``.

    Args:
        name: ``"auto"`` (CUDA when this process sees a GPU), ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: the name is unknown, or CUDA was asked for and this process sees no GPU.
    """
    if name not in DEVICES:
        raise ConfigError(f"unknown device {name!r}; use one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if name == "cuda" and not available:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise ConfigError(
            f"device 'cuda' was asked for, but torch {torch.__version__} sees no GPU{why}; "
            "set trainer.device=cpu, or install a CUDA build of torch and check the driver"
        )
    return name


def get_torch_device(name: str, index: int | None = None) -> torch.device:
    """The ``torch.device`` that this process uses; on CUDA the one at ``index``, by default the current one."""
    name = resolve_device(name)
    if name == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def device_name(device: str | torch.device) -> str:
    """The product name of the current CUDA device; ``"cpu"`` for a CPU."""
    return str(torch.cuda.get_device_name()) if torch.device(device).type == "cuda" else "cpu"


def local_device_index(local_rank: int) -> int:
    """Index of the GPU that a rank uses: its local rank, or 0 when it sees one GPU only (as under Ray)."""
    count = torch.cuda.device_count()
    return local_rank % count if count else 0


def set_device(device: str | torch.device) -> None:
    """Make a CUDA device the current one; nothing on CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def dist_backend(device: str | torch.device) -> str:
    """Backend string for ``torch.distributed``: gloo for CPU tensors, and NCCL for CUDA ones where there are any."""
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


def synchronize(device: str | torch.device) -> None:
    """Wait until the device is idle; nothing on CPU, where work is synchronous."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: str | torch.device) -> None:
    """Give cached device memory back to the driver; nothing on CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def default_compute_dtype(device: str | torch.device) -> torch.dtype:
    """What a ``dtype`` of ``"auto"`` computes in: bfloat16 on CUDA, float32 on CPU."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes used by this process.

    Attributes:
        allocated: device memory held by tensors now; 0 on CPU.
        reserved: device memory held by the allocator now; 0 on CPU.
        max_allocated: peak of ``allocated`` since :func:`reset_peak_memory`.
        max_reserved: peak of ``reserved`` since :func:`reset_peak_memory`.
        cpu_used: resident set size of the process.
    """

    allocated: int
    reserved: int
    max_allocated: int
    max_reserved: int
    cpu_used: int

    def as_dict(self) -> dict[str, int]:
        """The numbers by name."""
        return asdict(self)


def device_memory_stats(device: str | torch.device = "auto") -> DeviceMemory:
    """Memory of this process in bytes, on the device and on the host."""
    kind = resolve_device("auto") if device == "auto" else torch.device(device).type
    rss = int(psutil.Process().memory_info().rss)
    if kind != "cuda":
        return DeviceMemory(0, 0, 0, 0, rss)
    return DeviceMemory(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        max_allocated=torch.cuda.max_memory_allocated(),
        max_reserved=torch.cuda.max_memory_reserved(),
        cpu_used=rss,
    )


def reset_peak_memory(device: str | torch.device) -> None:
    """Start new peak measurements; nothing on CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def cpu_count() -> int:
    """Cores that this process may use (affinity counts, not only what the machine has)."""
    with contextlib.suppress(AttributeError):  # not every platform has affinity
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

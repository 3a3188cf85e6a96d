"""Devices by name."""

from __future__ import annotations

import pytest
import torch

from verl.errors import ConfigError
from verl.utils import device as device_module
from verl.utils.device import default_compute_dtype, device_memory_stats, dist_backend, get_torch_device, resolve_device

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_cpu_is_always_there() -> None:
    assert resolve_device("cpu") == "cpu"
    assert get_torch_device("cpu") == torch.device("cpu")
    assert dist_backend("cpu") == "gloo"
    assert default_compute_dtype("cpu") == torch.float32
    assert default_compute_dtype("cuda") == torch.bfloat16
    assert dist_backend("cuda:1") == "cpu:gloo,cuda:nccl"


@no_gpu
def test_without_a_gpu_auto_is_cpu_and_cuda_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"sees no GPU \(CUDA_VISIBLE_DEVICES=''\); set trainer\.device=cpu"):
        resolve_device("cuda")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu'; use one of auto, cpu, cuda"):
        resolve_device("gpu")


def test_auto_takes_a_gpu_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda"


def test_memory_grows_with_what_is_held() -> None:
    before = device_memory_stats("cpu").cpu_used
    held = torch.ones(64 * 2**20 // 4)  # written, and too large for memory that the allocator kept
    after = device_memory_stats("cpu")
    assert after.cpu_used - before > 56 * 2**20
    assert (after.allocated, after.reserved) == (0, 0)
    del held

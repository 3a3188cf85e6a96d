"""Slots of shared memory, and what of CUDA's can be tested without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from verl.errors import WeightSyncError
from verl.workers.sharding_manager.transports.colocated import SharedMemoryTransport, _make_slot, _open_slot, on_device


def test_a_slot_is_the_same_memory_on_both_sides_and_leaves_no_file() -> None:
    slot = _make_slot(128, torch.device("cpu"))
    other = _open_slot(slot.address)
    slot.buffer[3] = 7
    assert other.buffer[3] == 7
    path = Path(slot.address[1][0])
    assert path.exists()
    slot.forget_name()
    assert not path.exists()
    other.buffer[4] = 9  # mapped memory outlives its name
    assert slot.buffer[4] == 9
    with pytest.raises(WeightSyncError, match="must be on one machine"):
        _open_slot(slot.address)
    dropped = _make_slot(128, torch.device("cpu"))
    path = Path(dropped.address[1][0])
    del dropped
    assert not path.exists()


def test_memory_that_is_not_there_is_an_error_not_a_crash() -> None:
    with pytest.raises(WeightSyncError, match=r"cannot get 1024.0 TiB of shared memory"):
        _make_slot(1 << 50, torch.device("cpu"))


def test_roles_are_checked() -> None:
    store = dist.HashStore()
    with pytest.raises(WeightSyncError, match="receiver=2 is outside the 2 receivers"):
        SharedMemoryTransport(store, receivers=2, receiver=2)
    with pytest.raises(WeightSyncError, match="receiver 0 of the shared memory cannot send"):
        SharedMemoryTransport(store, receiver=0).send(1, [])
    with pytest.raises(WeightSyncError, match="sender of the shared memory cannot receive"):
        SharedMemoryTransport(store).receive()


def test_a_gpu_handle_names_the_gpu_as_the_receiver_counts_it() -> None:
    import inspect

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"
    assert on_device(tuple("abcdefgh"), 3) == ("a", "b", "c", "d", "e", "f", 3, "h")


def _receive(folder: str, results: mp.Queue) -> None:
    transport = SharedMemoryTransport(dist.FileStore(f"{folder}/store", -1), receiver=0, device="cuda")
    delivery = transport.receive()
    results.put({name: tensor.cpu().tolist() for bucket in delivery.buckets for name, tensor in bucket})


@pytest.mark.dist
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_reach_another_process(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_receive, args=(str(tmp_path), results))
    process.start()
    store = dist.FileStore(str(tmp_path / "store"), -1)
    with SharedMemoryTransport(store, bucket_bytes=256, device="cuda") as transport:
        tensors = {f"w{number}": torch.full((40,), float(number), device="cuda") for number in range(8)}
        transport.send(1, tensors.items())
        assert results.get(timeout=60) == {name: tensor.tolist() for name, tensor in tensors.items()}
    process.join()

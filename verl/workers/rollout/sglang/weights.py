"""How weights get to an SGLang server: by shared memory or CUDA handles on one machine, else by a process group.

Either way the server reads whole tensors one bucket at a time, between ``begin_weight_update`` and
``end_weight_update``, and its own loaders fuse and split them in place.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import reductions

from verl.errors import WeightSyncError
from verl.utils.distributed import free_port
from verl.workers.rollout.policy_weights import Named
from verl.workers.rollout.sglang.connection import Connection

_ALIGNMENT = 16
_GROUP = "verl-weights"
#: place of the device in the arguments of torch's function that opens a CUDA tensor
_DEVICE_ARGUMENT = 6


class WeightChannel(ABC):
    """Brings buckets to a server."""

    @abstractmethod
    async def send(self, bucket: Sequence[Named], dtypes: Sequence[torch.dtype]) -> None:
        """Let the server load whole tensors; they may be reused after the call.

        Args:
            bucket: names and tensors.
            dtypes: types in which they are sent.

        Raises:
            RolloutError: the server is gone or refuses.
        """


# ---------------------------------------------------------------------------- same machine


class HandleChannel(WeightChannel):
    """Weights to a server on the same machine, which opens the memory that they lie in.

    Args:
        connection: to the server; None on ranks that share the server of another rank.
        group: ranks that share the server, one for each of its devices, the one with the connection first; None when
            a rank has its server alone.
        device: of the staging buffer.
    """

    def __init__(self, connection: Connection | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.connection = connection
        self.group = group
        self.device = device

    async def send(self, bucket: Sequence[Named], dtypes: Sequence[torch.dtype]) -> None:
        """See :meth:`WeightChannel.send`. Collective over the ranks that share the server."""
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        # on CPUs all devices of the server read the first rank's memory
        own = self.device.type == "cuda" or self.connection is not None
        staged = stage(bucket, dtypes, self.device) if own else []
        handles = pickled(staged) if own else ""
        everyone: list[Any] = [handles] * ranks
        if self.group is not None and self.device.type == "cuda":
            dist.all_gather_object(everyone, handles, group=self.group)
        if self.connection is not None:
            await self.connection.call(
                "/update_weights_from_tensor", {"serialized_named_tensors": everyone, "flush_cache": False}
            )
        if self.group is not None:
            dist.barrier(self.group)  # the memory must stay until every device has read it
        del staged
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def stage(bucket: Sequence[Named], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Named]:
    """Copies of tensors in one piece of memory that other processes can open."""
    used = [tensor.numel() * dtype.itemsize for (_, tensor), dtype in zip(bucket, dtypes, strict=True)]
    sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in used]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if device.type == "cpu":
        with _files_as_shared_memory():
            buffer.share_memory_()
    staged: list[Named] = []
    for (name, tensor), dtype, piece, size in zip(bucket, dtypes, buffer.split(sizes), used, strict=True):
        view = piece[:size].view(dtype).view(tensor.shape)
        staged.append((name, view.copy_(tensor.detach())))
    return staged


def pickled(tensors: list[Named] | dict[str, torch.Tensor]) -> str:
    """Handles of tensors, as SGLang reads them: it expects a GPU's UUID, for ranks number their GPUs differently."""
    stream = io.BytesIO()
    pickler: Any = ForkingPickler(stream)
    pickler.dispatch_table[torch.Tensor] = _reduce
    with _files_as_shared_memory():
        pickler.dump(tensors)
    return base64.b64encode(stream.getvalue()).decode()


def _reduce(tensor: torch.Tensor) -> Any:
    function, arguments = reductions.reduce_tensor(tensor)
    if function is reductions.rebuild_cuda_tensor:
        index = arguments[_DEVICE_ARGUMENT]
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        arguments = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
    return function, arguments


@contextlib.contextmanager
def _files_as_shared_memory() -> Iterator[None]:
    """Shared memory that any process can open by name; torch's default hands file descriptors to children only."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)


# ---------------------------------------------------------------------------- another machine


class GroupChannel(WeightChannel):
    """Weights to a server anywhere, through a process group that it joins: gloo from CPUs, NCCL from GPUs.

    Args:
        connection: to the server.
        ranks: devices of the server.
        device: of the worker.
        timeout_s: for joining the group and for a broadcast.
    """

    def __init__(self, connection: Connection, ranks: int, device: torch.device, *, timeout_s: float = 300.0) -> None:
        self.connection = connection
        self.size = ranks + 1
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self._name = f"{_GROUP}-{threading.get_native_id()}-{free_port()}"
        self._group: Any = None

    async def send(self, bucket: Sequence[Named], dtypes: Sequence[torch.dtype]) -> None:
        """See :meth:`WeightChannel.send`."""
        if self._group is None:
            self._group = await self._join()
        request = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,
        }
        tensors = [
            tensor.detach().to(self.device, dtype).contiguous()
            for (_, tensor), dtype in zip(bucket, dtypes, strict=True)
        ]
        await self._both("/update_weights_from_distributed", request, lambda: self._broadcast(tensors))

    async def _join(self) -> Any:
        address = address_towards(self.connection.url)
        port = free_port()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        request = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self.size,
            "group_name": self._name,
            "backend": backend,
        }
        return await self._both("/init_weights_update_group", request, lambda: self._make_group(address, port))

    def _make_group(self, address: str, port: int) -> Any:
        """Rank 0 of the group that SGLang's scheduler makes with the same names."""
        store: Any = dist.TCPStore(address, port, self.size, is_master=True, timeout=self.timeout)
        for prefix in (self._name, f"{self._name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, 0, self.size, self.timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(store, 0, self.size, options)

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        for work in [self._group.broadcast(tensor, 0) for tensor in tensors]:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    async def _both(self, path: str, request: Any, own_part: Any) -> Any:
        """Ask the server for something that this process takes part in."""
        call = asyncio.create_task(self.connection.call(path, request))
        part = asyncio.create_task(asyncio.to_thread(own_part))
        await asyncio.wait([call, part], return_when=asyncio.FIRST_EXCEPTION)
        if call.done() and call.exception() is not None:  # it explains why the other part waits in vain
            part.cancel()
            call.result()
        try:
            result = await part
        except RuntimeError as error:
            call.cancel()
            raise WeightSyncError(
                f"the server at {self.connection.url} and this worker do not reach each other for {path}: {error}"
            ) from error
        await call
        return result


def address_towards(url: str) -> str:
    """This machine's address as a server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])

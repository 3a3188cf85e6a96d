"""Transport over a process group: one trainer rank sends, every rollout rank gets the same buckets."""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import ConfigError, WeightSyncError
from verl.workers.sharding_manager.transports.base import (
    Bucket,
    Delivery,
    Message,
    Transport,
    Unpacker,
    Weights,
    messages,
    require_newer,
)


def transfer_group(
    store: dist.Store, rank: int, size: int, *, device: str | torch.device = "cpu", timeout_s: float = 600.0
) -> Any:
    """A process group of its own, beside the default groups of trainer and rollout. All its ranks call this.

    Args:
        store: that all ranks reach.
        rank: 0 is the sender.
        size: number of ranks.
        device: ``"cpu"`` talks over gloo, ``"cuda"`` over NCCL.
        timeout_s: how long an operation may take.
    """
    kind = torch.device(device).type
    own = dist.PrefixStore("verl-weight-broadcast", store)
    timeout = timedelta(seconds=timeout_s)
    try:
        if kind == "cpu":
            return dist.ProcessGroupGloo(own, rank, size, timeout)
        if kind == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(own, rank, size, options)
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} of {size} could not join the group for weights: {error}; all ranks must join, and reach each "
            "other"
        ) from error
    raise ConfigError(f"device {device!r} has no process group here; use cpu or cuda")


class BroadcastTransport(Transport):
    """Rank 0 of a group broadcasts; the others receive. Bytes leave the sender once for each bucket.

    Trainer ranks outside the group still have to draw the source's tensors; see ``WeightSender``.

    Args:
        group: from :func:`transfer_group`, or any process group with the sender as rank 0.
        bucket_bytes: size of the staging buffer; only the sender's counts.
        device: where buffers are: the device that the group talks from.
    """

    def __init__(self, group: Any, *, bucket_bytes: int = 512 << 20, device: str | torch.device = "cpu") -> None:
        self.group = group
        self.rank = int(group.rank())
        self.size = int(group.size())
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self._buffer: Tensor | None = None
        self._version = -1

    def send(self, version: int, weights: Weights, *, live: bool = False) -> int:
        """See :meth:`Transport.send`; the bytes count once, whatever the number of receivers."""
        if self.rank != 0:
            raise WeightSyncError(f"rank {self.rank} of the weight broadcast cannot send; rank 0 does")
        require_newer(version, self._version)
        self._version = version
        sent = 0
        for message, buffer in messages(version, weights, self.bucket_bytes, self._staging):
            header = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8).to(self.device)
            self._broadcast(torch.tensor([header.numel(), message.nbytes], device=self.device))
            self._broadcast(header)
            if message.nbytes:
                self._broadcast(buffer[: message.nbytes])
            sent += message.nbytes
        self._buffer = None
        return sent

    def _staging(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def receive(self, *, newer_than: int = -1) -> Delivery:
        """See :meth:`Transport.receive`."""
        if self.rank == 0:
            raise WeightSyncError("rank 0 of the weight broadcast sends and cannot receive")
        message, buffer = self._next_message()
        if message.version <= newer_than:
            self._skip(message)
            require_newer(message.version, newer_than)
        return Delivery(message.version, False, self._buckets(message, buffer))

    def _buckets(self, message: Message, buffer: Tensor) -> Generator[Bucket, None, None]:
        unpacker = Unpacker()
        while True:
            try:
                bucket = unpacker.take(message, buffer)
                if bucket:
                    yield bucket
            except BaseException:  # also when the consumer stops drawing: the group expects this rank to go on
                self._skip(message)
                raise
            if message.last:
                self._buffer = None
                return
            message, buffer = self._next_message()

    def _skip(self, message: Message) -> None:
        while not message.last:
            message, _ = self._next_message()
        self._buffer = None

    def _next_message(self) -> tuple[Message, Tensor]:
        sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._broadcast(sizes)
        header_size, used = (int(size) for size in sizes.tolist())
        header = torch.empty(header_size, dtype=torch.uint8, device=self.device)
        self._broadcast(header)
        if self._buffer is None or self._buffer.numel() < used:
            self._buffer = None
            self._buffer = torch.empty(used, dtype=torch.uint8, device=self.device)
        buffer = self._buffer[:used]
        if used:
            self._broadcast(buffer)
        return Message.decode(header.cpu().numpy().tobytes()), buffer

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            self.group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"the weight broadcast broke on rank {self.rank} of {self.size}: {error}; a rank is gone or slower "
                "than the time limit"
            ) from error

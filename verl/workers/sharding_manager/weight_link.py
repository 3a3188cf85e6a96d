"""Where a trainer and rollout servers in other processes meet for a weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from verl.errors import ConfigError
from verl.workers.sharding_manager.base import WeightSink
from verl.workers.sharding_manager.sync import WeightReceiver
from verl.workers.sharding_manager.transports.base import Transport
from verl.workers.sharding_manager.transports.broadcast import BroadcastTransport, transfer_group
from verl.workers.sharding_manager.transports.colocated import SharedMemoryTransport
from verl.workers.sharding_manager.transports.disk import DiskTransport

LinkKind = Literal["shared_memory", "broadcast", "disk"]


@dataclass(frozen=True)
class WeightLink:
    """The address of one sender and its receivers; both sides make their transport from it.

    A link lasts for many versions, as long as its receivers stay the same. When one was replaced, all need a link with
    another name, because the new one does not know how far the others got.

    Attributes:
        kind: how weights travel: ``"shared_memory"`` on one machine, ``"broadcast"`` over a group, ``"disk"`` through
            a directory that all see.
        name: unique among the links of a store.
        receivers: how many there are.
        host, port: of the ``TCPStore`` where they meet.
        bucket_bytes: size of a piece.
        directory: of ``"disk"``.
        device: where the buffers of ``"shared_memory"`` are: on ``"cuda"`` the sender and its receivers share a GPU.
        timeout_s: longest wait of one side for the other.
    """

    kind: LinkKind
    name: str
    receivers: int
    host: str
    port: int
    bucket_bytes: int = 512 << 20
    directory: str | None = None
    device: str = "cpu"
    timeout_s: float = 600.0

    def sender(self, *, most_bytes: int | None = None) -> Transport:
        """The sender's transport.

        Args:
            most_bytes: size of all weights, when known: no buffer needs to be larger.
        """
        bucket = self.bucket_bytes if most_bytes is None else max(1, min(self.bucket_bytes, most_bytes))
        return self._transport(None, bucket)

    def receiver(self, index: int, sink: WeightSink) -> WeightReceiver:
        """The receiving side number ``index`` for a rollout engine.

        Joining a broadcast group waits for the others.
        """
        return WeightReceiver(sink, self._transport(index, self.bucket_bytes))

    def _transport(self, receiver: int | None, bucket_bytes: int) -> Transport:
        if self.kind == "disk":
            if self.directory is None:
                raise ConfigError("a link through the disk needs a directory that all sides see")
            return DiskTransport(self.directory, bucket_bytes=bucket_bytes, timeout_s=self.timeout_s)
        limit = timedelta(seconds=self.timeout_s)
        store = dist.PrefixStore(self.name, dist.TCPStore(self.host, self.port, is_master=False, timeout=limit))
        if self.kind == "shared_memory":
            return SharedMemoryTransport(
                store,
                receivers=self.receivers,
                receiver=receiver,
                bucket_bytes=bucket_bytes,
                device=self.device,
                timeout_s=self.timeout_s,
            )
        rank = 0 if receiver is None else receiver + 1
        group = transfer_group(store, rank, self.receivers + 1, timeout_s=self.timeout_s)
        return BroadcastTransport(group, bucket_bytes=bucket_bytes)

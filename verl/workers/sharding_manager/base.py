"""Interfaces of weight sync (source, sink) and its reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from verl.workers.engine.base import SlicedWeight
from verl.workers.rollout.types import WeightPart


class WeightSource(Protocol):
    """The part of a training engine that gives weights; every ``TrainEngine`` is one."""

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        """Hugging Face name -> the live parameter, when this rank holds all of them whole; else None."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and whole tensor, made one at a time; collective."""
        ...


@runtime_checkable
class ShardedSource(WeightSource, Protocol):
    """The part of a training engine whose tensors are spread over ranks; every ``TrainEngine`` is one."""

    def shards(self) -> Mapping[str, torch.Tensor | SlicedWeight] | None:
        """This rank's parts of what ``named_tensors`` yields; None where they must be put together."""
        ...


class OwnedMemory(Protocol):
    """The part of ``RolloutMemory`` that reports need."""

    @property
    def owned_weights(self) -> int: ...

    @property
    def aliased_weights(self) -> int: ...


class WeightSink(Protocol):
    """The part of a rollout engine that takes weights; every ``RolloutEngine`` is one."""

    supports_lora_update: bool

    @property
    def needs_base_weights(self) -> bool: ...

    @property
    def policy_version(self) -> int: ...

    async def begin_update(self, version: int) -> None: ...

    async def load(self, bucket: Iterable[tuple[str, torch.Tensor]], *, live: bool = True) -> None: ...

    def shard_views(self, names: Iterable[str]) -> dict[str, list[WeightPart]] | None: ...

    def mark_loaded(self, names: Iterable[str]) -> None: ...

    async def end_update(self) -> None: ...

    async def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]: ...

    def memory(self) -> OwnedMemory: ...


@dataclass(frozen=True)
class SyncReport:
    """One weight sync, as the receiving side sees it.

    Attributes:
        version: policy version that the rollout has now.
        seconds: wall time.
        bytes_copied: bytes that were written to memory of the rollout; of an adapter alone those that arrived.
        bytes_shared: bytes that the rollout reads in the training engine's own memory.
        tensors: weights synced.
        buckets: calls to the rollout's ``load``.
        changed: weights that differ from the last weight sync; None when nobody looked.
        bytes_received: bytes that came from other ranks by a plan; None where there was none.
    """

    version: int
    seconds: float
    bytes_copied: int
    bytes_shared: int
    tensors: int
    buckets: int
    changed: int | None = None
    bytes_received: int | None = None

    def metrics(self) -> dict[str, float]:
        """The report's numbers under the names of the metrics glossary."""
        metrics = {
            "weight_sync/version": float(self.version),
            "weight_sync/seconds": self.seconds,
            "weight_sync/copied_mb": self.bytes_copied / 2**20,
            "weight_sync/shared_mb": self.bytes_shared / 2**20,
            "weight_sync/buckets": float(self.buckets),
        }
        if self.changed is not None:
            metrics["weight_sync/changed_tensors"] = float(self.changed)
        if self.bytes_received is not None:
            metrics["weight_sync/received_mb"] = self.bytes_received / 2**20
        return metrics


@dataclass(frozen=True)
class SendReport:
    """One weight sync, as a sending side in another process sees it.

    Attributes:
        version: policy version that was sent.
        seconds: wall time until everything was on its way.
        bytes_sent: bytes written to the transport; 0 on a rank that only takes part in the source's collectives.
        tensors: weights sent.
        changed: as in :class:`SyncReport`.
    """

    version: int
    seconds: float
    bytes_sent: int
    tensors: int
    changed: int | None = None

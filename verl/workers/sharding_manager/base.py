"""What the hand-over of weights needs from the training side, and what it reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


class WeightSource(Protocol):
    """The part of a training engine that gives weights; every ``TrainEngine`` is one."""

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        """Hugging Face name -> the live parameter, when this rank holds all of them whole; else None."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and whole tensor, made one at a time; collective."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """One hand-over.

    Attributes:
        version: policy version that the rollout has now.
        seconds: wall time.
        bytes_copied: bytes that were written to memory of the rollout.
        bytes_shared: bytes that the rollout reads in the training engine's own memory.
        tensors: weights handed over.
        buckets: calls to the rollout's ``load``.
    """

    version: int
    seconds: float
    bytes_copied: int
    bytes_shared: int
    tensors: int
    buckets: int

    def metrics(self) -> dict[str, float]:
        """The report's numbers under the names of the metrics glossary."""
        return {
            "weight_sync/version": float(self.version),
            "weight_sync/seconds": self.seconds,
            "weight_sync/copied_mb": self.bytes_copied / 2**20,
            "weight_sync/shared_mb": self.bytes_shared / 2**20,
            "weight_sync/buckets": float(self.buckets),
        }

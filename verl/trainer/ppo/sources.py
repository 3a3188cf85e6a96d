"""Where training batches come from.

A source owns the execution mode: when prompts are drawn and when responses are generated. The trainer asks
for the next batch and never learns how it was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from verl.errors import DataError
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup


class Source(Protocol):
    """What the trainer needs of a source."""

    #: epoch that the last batch came from, counted from 0
    epoch: int

    def next_batch(self, step: int) -> DataProto:
        """A batch of prompts with responses for ``step`` (counted from 1)."""

    def state_dict(self) -> dict[str, Any]:
        """All that decides which batches are still to come."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""


def with_samples(prompts: DataProto, n: int, uid_prefix: str) -> DataProto:
    """Repeat every prompt ``n`` times, the samples of a prompt next to each other.

    Adds ``uid``, the same for a prompt's samples, and ``sample_index``, the row's place in the whole batch:
    the seed of a sample derives from it, so a sample does not depend on which worker makes it.
    """
    prompts.non_tensor_batch["uid"] = np.array([f"{uid_prefix}-{i}" for i in range(len(prompts))], dtype=object)
    batch = prompts.repeat(n, interleave=True)
    batch.batch["sample_index"] = torch.arange(len(batch))
    return batch


def generate(rollout: WorkerGroup, batch: DataProto, *, step: int, validate: bool) -> DataProto:
    """Let the rollout workers answer every row and join the answers to the rows."""
    request = batch.select(
        batch_keys=["input_ids", "attention_mask", "sample_index"], non_tensor_batch_keys=[], meta_info_keys=[]
    )
    request.meta_info.update(step=step, validate=validate)
    responses = rollout.generate_sequences(request)
    # the prompt-only forms are superseded by the whole sequences
    rows = batch.select(batch_keys=["sample_index"])
    return rows.union(responses)


class SyncSource:
    """Generate when asked: every batch is sampled from the newest weights.

    Args:
        dataloader: yields dicts of prompts and remembers its position.
        rollout: worker group with ``generate_sequences``.
        n: samples per prompt.
    """

    def __init__(self, dataloader: Any, rollout: WorkerGroup, n: int) -> None:
        self.dataloader = dataloader
        self.rollout = rollout
        self.n = n
        self.epoch = 0
        self._iterator: Iterator[dict[str, Any]] | None = None

    def next_batch(self, step: int) -> DataProto:
        """Draw prompts, starting the next epoch when this one is used up, and generate their responses."""
        self.epoch = self.dataloader.epoch
        prompts = DataProto.from_single_dict(self._next_rows())
        batch = with_samples(prompts, self.n, uid_prefix=f"{step}")
        return generate(self.rollout, batch, step=step, validate=False)

    def _next_rows(self) -> dict[str, Any]:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.dataloader)
            if (rows := next(self._iterator, None)) is not None:
                return rows
            self._iterator = None
        raise DataError("the training data gives no batch")

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position in it."""
        return dict(self.dataloader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved epoch and position."""
        self.dataloader.load_state_dict(state)
        self._iterator = None


def steps_in_run(batches_per_epoch: int, total_epochs: int, total_training_steps: int | None) -> int:
    """Number of steps of a run: the given total, otherwise whole epochs."""
    return total_training_steps or batches_per_epoch * total_epochs

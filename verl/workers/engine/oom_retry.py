"""Retry with smaller micro-batches after an out-of-memory error. Results do not depend on the micro-batch size."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from verl.utils.device import empty_cache
from verl.workers.engine.base import MicroBatching

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HOST = "can't allocate memory"  # what torch says of host memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _HOST in str(error)


def halved(micro: MicroBatching, rows: int, longest: int) -> MicroBatching | None:
    """The rule with half as much in a micro-batch; None where one row, or unit of rows, is all that is left.

    Args:
        micro: the rule.
        rows: of the batch.
        longest: tokens of the longest row, or unit of rows.
    """
    if micro.max_tokens is not None:
        tokens = max(micro.max_tokens // 2, longest)
        return None if tokens == micro.max_tokens else replace(micro, max_tokens=tokens)
    size = micro.size or rows
    half = size // 2 // micro.unit * micro.unit
    return None if half == 0 else replace(micro, size=half)


class OomRetry:
    """Repeats work with smaller micro-batches when memory runs out, and begins with those from then on.

    Only for an engine of one rank: other ranks would be waiting in collectives that a repeated pass does not match.

    Args:
        device: whose cache to empty.
        world_size: ranks of the engine.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.device = device
        self.world_size = world_size
        self._smaller: dict[MicroBatching, MicroBatching] = {}

    def run(self, micro: MicroBatching, attention_mask: torch.Tensor, action: Callable[[MicroBatching], T]) -> T:
        """The result of ``action``, which must be repeatable, under ``micro`` or a smaller rule.

        Args:
            micro: the rule that is asked for.
            attention_mask: (B,S) of the rows.
            action: does the work of the whole batch from the start.
        """
        asked = micro
        micro = self._smaller.get(micro, micro)
        while True:
            try:
                return action(micro)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                smaller = self._next(micro, attention_mask)
                if smaller is None or self.world_size > 1:
                    error.add_note(self._advice(micro, smaller))
                    raise
                reason = str(error).splitlines()[0]
            # outside of the handler, so that its frames no longer hold the tensors
            gc.collect()
            empty_cache(self.device)
            logger.warning("out of memory (%s): micro-batches of %s from now on, before %s", reason, smaller, micro)
            self._smaller[asked] = micro = smaller

    @staticmethod
    def _next(micro: MicroBatching, attention_mask: torch.Tensor) -> MicroBatching | None:
        rows = int(attention_mask.shape[0])
        lengths = (attention_mask != 0).sum(-1).reshape(-1, micro.unit).sum(-1)
        return halved(micro, rows, int(lengths.max()) if rows else 0)

    def _advice(self, micro: MicroBatching, smaller: MicroBatching | None) -> str:
        if smaller is None:
            return f"a single row does not fit into memory ({micro}); shorten the responses, or off-load more"
        return (
            f"a micro-batch of {micro} did not fit; the {self.world_size} ranks cannot repeat it together, so lower "
            "*_micro_batch_size_per_gpu or *_max_token_len_per_gpu of this role (no choice changes a result)"
        )

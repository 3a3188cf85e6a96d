"""Noticing that an optimizer step changed nothing that the rollout gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from verl.errors import ConfigError, WeightSyncError
from verl.workers.sharding_manager.transport import Weights

logger = logging.getLogger(__name__)

OnUnchanged = Literal["ignore", "warn", "error"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A 0-dim int64 that differs when a value differs, up to chance: the sum of the bit patterns.

    It reads the tensor once and needs no other memory; on a device it waits for nothing.
    """
    bits = tensor.detach().contiguous().view(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).reshape(-1)
    if bits.dtype == torch.bool:
        bits = bits.view(torch.uint8)
    return bits.view(_INTEGERS[bits.element_size()]).sum(dtype=torch.int64)


class ChangeDetector:
    """Compares the weights of a hand-over with those of the one before.

    Identical weights after an optimizer step mean that the rollout goes on with an old policy: a copy that is never
    refreshed, parameters that are not those being trained. A learning rate of 0 or a skipped step looks the same, so
    the caller says whether a step was made.

    Args:
        on_unchanged: what to do when no tensor changed: ``"ignore"`` does not even look.
    """

    def __init__(self, on_unchanged: OnUnchanged = "ignore") -> None:
        if on_unchanged not in get_args(OnUnchanged):
            raise ConfigError(f"on_unchanged={on_unchanged!r}: use {', '.join(get_args(OnUnchanged))}")
        self.on_unchanged = on_unchanged
        self._before: dict[str, int] = {}
        self._now: dict[str, Tensor] = {}

    def watch(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors through, taking fingerprints on the way."""
        self._now = {}
        for name, tensor in weights:
            if self.on_unchanged != "ignore":
                self._now[name] = fingerprint(tensor)
            yield name, tensor

    def finish(self, version: int, *, stepped: bool = True) -> int | None:
        """After a hand-over.

        Args:
            version: that was handed over.
            stepped: an optimizer step lies between this hand-over and the last.

        Returns:
            How many tensors changed; None for the first time or when not looking.

        Raises:
            WeightSyncError: none changed after a step, and that is to be an error.
        """
        if self.on_unchanged == "ignore":
            return None
        now = {name: int(value) for name, value in self._now.items()}
        before, self._before, self._now = self._before, now, {}
        if not before:
            return None
        changed = sum(before.get(name) != value for name, value in now.items())
        if changed or not stepped:
            return changed
        problem = (
            f"0 of {len(now)} tensors changed between the last hand-over and version {version}, although the optimizer "
            "made a step: the rollout would go on with the old policy (is the learning rate 0, was the step skipped, "
            "or are other parameters trained than those handed over?)"
        )
        if self.on_unchanged == "error":
            raise WeightSyncError(problem)
        logger.warning(problem)
        return changed

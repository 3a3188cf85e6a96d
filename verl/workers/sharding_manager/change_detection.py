"""Noticing that an optimizer step changed nothing that the rollout gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from verl.errors import ConfigError, WeightSyncError
from verl.workers.sharding_manager.transports.base import Weights

logger = logging.getLogger(__name__)

ON_UNCHANGED = ("ignore", "warn", "error")

_WORD = 8


def fingerprint(tensor: Tensor) -> Tensor:
    """A 0-dim int64 that differs when a value differs, up to chance: the sum of the tensor's bytes as 64-bit words.

    It reads the tensor once, as fast as memory allows; on a device it waits for nothing.
    """
    raw = tensor.detach().contiguous().view(-1)
    raw = raw.view(torch.uint8)
    if raw.storage_offset() % _WORD:  # words begin at multiples of their size
        raw = raw.clone()
    whole = len(raw) // _WORD * _WORD
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)


class ChangeDetector:
    """Compares the weights of a weight sync with those of the one before.

    Identical weights after an optimizer step mean that the rollout goes on with an old policy: a copy that is never
    refreshed, parameters that are not those being trained. A learning rate of 0 or a skipped step looks the same, so
    the caller says whether a step was made.

    Args:
        on_unchanged: what to do when no tensor changed: ``"ignore"`` does not even look.
    """

    def __init__(self, on_unchanged: str = "ignore") -> None:
        if on_unchanged not in ON_UNCHANGED:
            raise ConfigError(f"on_unchanged={on_unchanged!r}: use {', '.join(ON_UNCHANGED)}")
        self.on_unchanged = on_unchanged
        self._before: dict[str, int] = {}
        self._now: dict[str, Tensor] = {}

    def watch(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors through, taking fingerprints on the way; those of one name add up."""
        self._now = {}
        for name, tensor in weights:
            if self.on_unchanged != "ignore":
                mark = fingerprint(tensor)
                self._now[name] = self._now[name] + mark if name in self._now else mark
            yield name, tensor

    def finish(
        self, version: int, *, stepped: bool = True, combine: Callable[[Tensor], object] | None = None
    ) -> int | None:
        """After a weight sync.

        Args:
            version: that was synced.
            stepped: an optimizer step lies between this weight sync and the last.
            combine: adds up, in place, the fingerprints (N,) int64 of the parts that ranks have seen.

        Returns:
            How many tensors changed; None for the first time or when not looking.

        Raises:
            WeightSyncError: none changed after a step, and that is to be an error.
        """
        if self.on_unchanged == "ignore":
            return None
        marks = torch.stack(list(self._now.values())) if self._now else torch.zeros(0, dtype=torch.int64)
        if combine is not None:
            combine(marks)
        now = dict(zip(self._now, marks.tolist(), strict=True))
        before, self._now = self._before, {}
        self._before = before | now  # what is not in every weight sync (frozen weights) is remembered
        if not before:
            return None
        changed = sum(before.get(name) != value for name, value in now.items())
        if changed or not stepped:
            return changed
        problem = (
            f"0 of {len(now)} tensors changed between the last weight sync and version {version}, although the "
            "optimizer made a step: the rollout would continue with the old policy. Are the trained parameters others "
            "than the synced ones, or is the learning rate too small for their dtype? (rollout.on_unchanged_weights)"
        )
        if self.on_unchanged == "error":
            raise WeightSyncError(problem)
        logger.warning(problem)
        return changed

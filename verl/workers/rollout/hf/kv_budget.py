"""How many sequences the key-value cache takes: now, and as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: columns that a batch gets at least when it is laid out anew, so that moving it pays
STRIDE = 16
#: parts of a completion's limit, between which its end is forecast
_PARTS = 32
#: completions that the first guess counts for: ends that are spread evenly up to the limit
_GUESS = 8.0
#: completions after which older ones count for half
_MEMORY = 2048.0


class Progress(NamedTuple):
    """How far a sequence is.

    Attributes:
        length: tokens that it has: prompt and completion.
        sampled: of them the completion's.
        limit: most tokens of the completion.
    """

    length: int
    sampled: int
    limit: int

    @property
    def remaining(self) -> int:
        """Most tokens still to sample."""
        return self.limit - self.sampled

    @property
    def total(self) -> int:
        """Most tokens that it may have at its end."""
        return self.length + self.remaining


class CacheBudget:
    """Decides how many sequences run side by side in a cache of limited size.

    The cache is a rectangle, rows x columns, as wide as its longest row. Were every row given room for the longest
    answer that it may give, most of it would stay empty, because answers end at all lengths; were rows admitted until
    it is full, all of them would meet its end together. Rows are admitted as long as the rectangle is expected to fit
    at every moment to come: it gets wider by a column a token and loses rows as answers end. When they end is known
    from those that have (a Kaplan-Meier estimate, so that answers which still run count as not having ended); what
    turns out longer is preempted.

    Args:
        tokens: most rows x columns; None for no limit.
    """

    def __init__(self, tokens: int | None = None) -> None:
        self.tokens = tokens
        self._ended = np.zeros(_PARTS)

    def ended(self, sampled: int, limit: int) -> None:
        """Learn that a completion has ended after ``sampled`` of at most ``limit`` tokens."""
        if not sampled:
            return
        self._ended[min(_PARTS, -(-sampled * _PARTS // limit)) - 1] += 1
        if self._ended.sum() > _MEMORY:
            self._ended /= 2

    def survival(self, running: Sequence[Progress]) -> np.ndarray:
        """Share of completions that is longer than k/n of its limit, for k = 0..n.

        Args:
            running: completions that have not ended; they tell that they are longer than what they have.
        """
        ended = self._ended + _GUESS / _PARTS
        alive = np.zeros(_PARTS)
        if running:
            parts = [item.sampled * _PARTS // item.limit for item in running]
            alive = np.bincount(parts, minlength=_PARTS)[:_PARTS].astype(float)
        reached = np.cumsum(ended[::-1])[::-1]  # ended in this part or later
        reached[:-1] += np.cumsum(alive[::-1])[::-1][1:]  # and those that are beyond it
        return np.concatenate([[1.0], np.cumprod(1 - ended / reached)])

    def forecast(self, running: Sequence[Progress], horizon: int) -> Forecast:
        """Room beside the sequences that run.

        Args:
            running: those.
            horizon: most tokens that one of the sequences in question has still to sample.
        """
        return Forecast(self, running, horizon)


class Forecast:
    """The rectangle of a batch at moments to come, to which sequences are added."""

    def __init__(self, budget: CacheBudget, running: Sequence[Progress], horizon: int) -> None:
        self._budget = budget
        self._running = running
        self._horizon = max([horizon, *(item.remaining for item in running)])
        self._added: list[tuple[Progress, int]] = []
        self._count = len(running)
        self._widest = max((item.total for item in running), default=0)
        self._longest = max((item.length for item in running), default=0)
        self._curves: _Curves | None = None

    def room(self, entering: Progress, wanted: int) -> int:
        """How many of ``wanted`` sequences like this one may enter."""
        tokens = self._budget.tokens
        if tokens is None:
            return wanted
        certain = tokens // max(self._widest, entering.total) - self._count
        if certain >= wanted:
            return wanted
        now = tokens // (max(self._longest, entering.length) + STRIDE) - self._count
        if now > max(certain, 0):
            now = min(now, self._expected(tokens, entering))
        return min(wanted, max(0, certain, now))

    def add(self, entering: Progress, count: int) -> None:
        """Let ``count`` sequences like this one enter."""
        self._added.append((entering, count))
        self._count += count
        self._widest = max(self._widest, entering.total)
        self._longest = max(self._longest, entering.length)

    def _expected(self, tokens: int, entering: Progress) -> int:
        """How many more rows fit at every moment, as far as is known."""
        if self._curves is None:
            survival = self._budget.survival(self._running)
            self._curves = _Curves(survival, self._horizon)
            self._curves.add(self._running, np.ones(len(self._running)))
        curves = self._curves
        if self._added:
            curves.add([item for item, _ in self._added], np.array([count for _, count in self._added], dtype=float))
            self._added.clear()
        alive, length = curves.of([entering])
        spare = tokens / np.maximum(curves.columns, length).clip(1).ravel() - curves.rows
        return int((spare / alive.ravel().clip(1e-9)).min().clip(0, tokens))


class _Curves:
    """Expected rows, and columns, of a batch at moments up to a horizon."""

    def __init__(self, survival: np.ndarray, horizon: int) -> None:
        self._known = np.arange(_PARTS + 1) / _PARTS
        self._survival = survival
        self._moments = np.linspace(0, horizon, _PARTS + 1)
        self.rows = np.zeros(_PARTS + 1)
        self.columns = np.zeros(_PARTS + 1)

    def add(self, sequences: Sequence[Progress], counts: np.ndarray) -> None:
        """Add ``counts`` rows like each of the sequences."""
        if sequences:
            alive, length = self.of(sequences)
            self.rows += counts @ alive
            self.columns = np.maximum(self.columns, length.max(0))

    def of(self, sequences: Sequence[Progress]) -> tuple[np.ndarray, np.ndarray]:
        """(sequences, moments): the chance that each still runs, and its tokens then, 0 beyond its limit."""
        length, sampled, limit = np.array(sequences, dtype=float).T[:, :, None]
        share = np.interp((sampled + self._moments) / limit, self._known, self._survival)
        alive = share / np.interp(sampled / limit, self._known, self._survival).clip(1e-9)
        return alive, np.where(self._moments < limit - sampled, length + self._moments, 0)

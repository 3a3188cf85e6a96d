"""Sandboxes that are kept for the next program; at most so many at work at a time."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from verl.rewards.sandbox.local import LocalSandbox


class SandboxPool:
    """Lends sandboxes. One that failed, or whose borrower was interrupted, is thrown away.

    Args:
        isolation: see :class:`LocalSandbox`.
        size: programs that run at the same time; more wait for their turn.
    """

    def __init__(self, isolation: str = "auto", size: int | None = None) -> None:
        self.isolation = isolation
        self.size = size or os.cpu_count() or 1
        self._places = threading.BoundedSemaphore(self.size)
        self._idle: list[LocalSandbox] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self) -> Iterator[LocalSandbox]:
        """A sandbox for one borrower at a time."""
        with self._places:
            with self._lock:
                box = self._idle.pop() if self._idle else None
            if box is None:
                box = LocalSandbox(isolation=self.isolation)
            try:
                yield box
            except BaseException:
                box.close()
                raise
            with self._lock:
                self._idle.append(box)

    def close(self) -> None:
        """End all sandboxes that are not lent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for box in idle:
            box.close()


_pools: dict[tuple[str, int | None], SandboxPool] = {}
_pools_lock = threading.Lock()


def shared_pool(isolation: str = "auto", size: int | None = None) -> SandboxPool:
    """This process's pool with these settings."""
    with _pools_lock:
        return _pools.setdefault((isolation, size), SandboxPool(isolation, size))


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()

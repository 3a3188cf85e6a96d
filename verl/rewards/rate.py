"""At most so many calls a minute."""

from __future__ import annotations

import threading
import time


class RateLimiter:
    """Spaces the starts of calls evenly, over all threads and coroutines that share it.

    Args:
        per_minute: calls started per minute; ``None`` never waits.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def reserve(self) -> float:
        """Take the next start and return the seconds until it."""
        if self._gap == 0.0:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._gap
            return start - now

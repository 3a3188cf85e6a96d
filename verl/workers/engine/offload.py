"""Reference-counted on- and offloading of model and optimizer state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class OffloadContext:
    """Counts the users of each part. The first one loads it, the last one off-loads it, so uses may be nested.

    Args:
        load: brings a part to the device, if it is not there.
        offload: frees the part's device memory, if the engine off-loads it.
    """

    def __init__(self, load: Callable[[str], None], offload: Callable[[str], None]) -> None:
        self._load = load
        self._offload = offload
        self._users: Counter[str] = Counter()

    @contextmanager
    def of(self, parts: Sequence[str]) -> Iterator[None]:
        """Within the context these parts are on the device."""
        for part in parts:
            self._users[part] += 1
            if self._users[part] == 1:
                self._load(part)
        try:
            yield
        finally:
            for part in reversed(parts):
                self._users[part] -= 1
                self.release(part)

    def release(self, part: str) -> None:
        """Off-load a part that has no user."""
        if not self._users[part]:
            self._offload(part)

"""Reference-counted on- and offloading of model and optimizer state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Residency:
    """Counts who needs a part: it comes with the first and leaves after the last, so that uses may be nested.

    Args:
        fetch: brings a part to the device, where it is not there.
        park: lets it leave, where the engine is to do without it.
    """

    def __init__(self, fetch: Callable[[str], None], park: Callable[[str], None]) -> None:
        self._fetch = fetch
        self._park = park
        self._users: Counter[str] = Counter()

    @contextmanager
    def of(self, parts: Sequence[str]) -> Iterator[None]:
        """Within the context these parts are on the device."""
        for part in parts:
            self._users[part] += 1
            if self._users[part] == 1:
                self._fetch(part)
        try:
            yield
        finally:
            for part in reversed(parts):
                self._users[part] -= 1
                self.settle(part)

    def settle(self, part: str) -> None:
        """Let a part leave that nobody needs."""
        if not self._users[part]:
            self._park(part)

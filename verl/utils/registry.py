"""A name -> object table with helpful errors; every plug-in point of the library is one of these."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from verl.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by name.

    Args:
        kind: what is registered, used in messages, for example ``"advantage estimator"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under ``name``; another object under a known name is an error."""

        def add(item: T) -> T:
            known = self._items.setdefault(name, item)
            if known is not item:
                raise ConfigError(f"{self.kind} {name!r} is already registered as {known!r}; choose another name")
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            near = difflib.get_close_matches(str(name), self._items, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(sorted(self._items))})")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

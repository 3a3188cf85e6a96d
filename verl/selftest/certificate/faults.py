"""Faults to switch on, so that anyone can see the certificate fail (``verl selftest --model DIR --plant NAME``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from verl.errors import ConfigError

#: planted now, in this process
ACTIVE: list[str] = []

FAULTS: dict[str, Callable[[ExitStack], None]] = {}


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Run the block with a fault in the library.

    Raises:
        ConfigError: no such fault.
    """
    if name not in FAULTS:
        raise ConfigError(f"unknown fault {name!r}; the faults are {', '.join(FAULTS)}")
    with ExitStack() as stack:
        FAULTS[name](stack)
        ACTIVE.append(name)
        stack.callback(ACTIVE.remove, name)
        yield

"""How a side's process talks to the benchmark: one line of JSON for each finished step, one line in to start a step."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Reporter:
    """Measures the phases of a step and waits between steps until the benchmark says go.

    Standard output belongs to the protocol; whatever libraries print goes to standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began: tuple[float, float] | None = None
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.numbers: dict[str, float] = {}

    def wait(self) -> None:
        """Announce readiness and block until the next step is wanted; the process ends when none is."""
        self._send({"ready": True})
        if sys.stdin.readline().strip() != "go":
            os._exit(0)  # nothing to save, and libraries would take seconds to unwind
        self.cpu, self.wall, self.numbers = {}, {}, {}
        self._began = (time.process_time(), time.perf_counter())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as part of phase ``name``."""
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu
            self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall

    def add(self, **numbers: float) -> None:
        """Add to numbers of this step, such as tokens."""
        for name, value in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + value

    def finish(self) -> None:
        """Report the step that :meth:`wait` began."""
        assert self._began is not None
        cpu, wall = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
        self._send(
            {
                "cpu_s": cpu,
                "wall_s": wall,
                "phases_cpu_s": self.cpu,
                "phases_wall_s": self.wall,
                # Linux counts in KiB
                "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
                **self.numbers,
            }
        )
        self._began = None

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

"""Charts that the benchmarks write with ``--plot FILE``; need matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def saved_figure(path: Path, panels: int = 1, size: tuple[float, float] = (6.0, 3.0)) -> Iterator[list[Any]]:
    """The axes of ``panels`` charts beside each other, each of ``size`` inches; written to ``path`` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = size
    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, height), squeeze=False)
    yield list(axes[0])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

"""What a tracker is, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.utils.registry import Registry

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run.

    Attributes:
        project_name: groups runs.
        experiment_name: names this run.
        config: the whole configuration as nested plain values, secrets already hidden.
        local_dir: directory of the run's outputs.
        total_steps: the last step, when known.
        run_ids: tracker -> the id under which it knows a run that is continued.
    """

    project_name: str
    experiment_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    local_dir: Path = Path("outputs")
    total_steps: int | None = None
    run_ids: Mapping[str, str] = field(default_factory=dict)


class Tracker:
    """One destination. Subclasses override what they can do."""

    #: under which the destination knows the run; None where a run has no id
    run_id: str | None = None
    #: whether calls go to another machine or thread, which may not answer
    hosted: ClassVar[bool] = False
    #: whether one refused metric loses all of a call, so that a call that failed is repeated in parts
    divides: ClassVar[bool] = False

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step; raise :class:`RefusedError` for those that cannot be recorded."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record a table of samples: rows of the same keys, for example prompt, response and score."""

    def finish(self) -> None:
        """Flush and close."""


class RefusedError(Exception):
    """A tracker has recorded the metrics of a step, some excepted.

    Args:
        reasons: name of a metric that was not recorded -> why.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(f"refused: {', '.join(reasons)}")
        self.reasons = dict(reasons)


TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry("tracker")

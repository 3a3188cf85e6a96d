"""Where the numbers of a step go: the console, a file, TensorBoard, hosted trackers.

Packages of trackers load only when their tracker is asked for. A tracker that cannot start is an error, before any
work is done. One that fails later, or does not answer, never stops the run and costs the others nothing. A name or a
value that a tracker refuses is lost there alone. Each loss is reported once and counted, see
:mod:`verl.utils.telling`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl.errors import ConfigError
from verl.utils import console_tracker as console_tracker  # registers itself
from verl.utils.background import Courier
from verl.utils.json_text import distinct_name, to_plain, valid_text
from verl.utils.json_text import dumps_json as dumps_json  # also known under this module
from verl.utils.logging import redact
from verl.utils.telling import BOUNDARY, Guard, describe, is_failure
from verl.utils.tracker import TRACKERS, RefusedError, RunInfo, Sample, Tracker
from verl.utils.trackers import _cell_value, _plain

R = TypeVar("R")


#: how often the metrics of a step are divided to find those that a tracker refuses, and how often without success
_MAX_CALLS, _MAX_FAILURES = 64, 8


#: refused metrics that are reported by name
_MAX_NAMED = 20


#: longest wait for a hosted tracker: to start, to take the metrics of a step, and to end with all that it still holds
_START_S, _LOG_S, _FINISH_S = 300.0, 30.0, 300.0


class Tracking:
    """All trackers of a run (``trainer.logger``).

    Args:
        project_name: ``trainer.project_name``.
        experiment_name: ``trainer.experiment_name``.
        loggers: names of trackers, see :data:`TRACKERS`.
        config: the configuration as nested plain values; values named like secrets are hidden before they leave.
        default_local_dir: directory of the run's outputs.
        total_steps: number of the last step, for the progress and the remaining time on the console.
        run_ids: from :meth:`state_dict` of the run that is continued, whose record then goes on.

    Raises:
        ConfigError: an unknown tracker, or one whose package is not installed.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        loggers: Sequence[str] | str = ("console",),
        config: Mapping[str, Any] | None = None,
        *,
        default_local_dir: str | Path = "outputs",
        total_steps: int | None = None,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        names = [loggers] if isinstance(loggers, str) else list(dict.fromkeys(loggers))
        info = RunInfo(
            valid_text(project_name),
            valid_text(experiment_name),
            to_plain(redact(config or {})),
            Path(default_local_dir),
            total_steps,
            run_ids or {},
        )
        factories = {name: TRACKERS[name] for name in names}  # all names are checked before the first one starts
        BOUNDARY.start()
        self._couriers = {
            name: Courier(f"verl-{name}") for name, factory in factories.items() if getattr(factory, "hosted", False)
        }
        self._trackers: dict[str, Tracker] = {}
        self._refused: dict[str, set[str]] = {name: set() for name in factories}
        try:
            for name, factory in factories.items():
                self._trackers[name] = self._start(name, factory, info)
        except BaseException:
            self._close()
            raise

    def _start(self, name: str, factory: Callable[[RunInfo], Tracker], info: RunInfo) -> Tracker:
        try:
            return self._call(name, partial(factory, info), _START_S)
        except ConfigError:
            raise
        except TimeoutError as error:
            raise ConfigError(
                f"trainer.logger contains {name!r}, which does not start: {error}; is its server reachable from here?"
            ) from error
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ConfigError(
                f"trainer.logger contains {name!r}, which does not start: {describe(error)}; check its settings, or "
                "leave it out"
            ) from error

    def _call(self, name: str, call: Callable[[], R], limit_s: float) -> R:
        """Hosted trackers live in threads of their own, which their packages may tie runs to."""
        courier = self._couriers.get(name)
        return call() if courier is None else courier.do(call, limit_s)

    def state_dict(self) -> dict[str, str]:
        """Tracker -> id of this run there, for a checkpoint."""
        return {name: tracker.run_id for name, tracker in self._trackers.items() if tracker.run_id is not None}

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Send the metrics of a step to every tracker; numbers may be NumPy or torch scalars. No metrics, no record.

        Once something was lost, ``tracking/failures`` and ``tracking/failures/<destination>`` count all so far.
        """
        if not data:
            return
        plain = _valid_metrics(data) | BOUNDARY.metrics()
        for name, tracker in self._trackers.items():
            with self._guard(name):
                self._log(name, tracker, plain, step)

    def _log(self, name: str, tracker: Tracker, data: dict[str, Any], step: int) -> None:
        """Send the metrics of a step to one tracker, without those that it refuses."""
        refused = self._refused[name]
        if known := refused & data.keys():  # reported when they were refused first
            BOUNDARY.lose(name, f"tracker {name!r} refuses {sorted(known)}", count=len(known), silent=True)
            data = {key: value for key, value in data.items() if key not in refused}
        deadline = time.monotonic() + _LOG_S

        def send(part: dict[str, Any]) -> None:
            self._call(name, partial(tracker.log, part, step), max(0.0, round(deadline - time.monotonic(), 1)))

        try:
            send(data)
        except RefusedError as error:
            reasons = error.reasons
        except BaseException as error:
            if not is_failure(error) or not tracker.divides:
                raise
            found = _narrow(send, data, deadline)
            if found is None:  # nothing was taken: the tracker fails, not a name
                raise
            reasons = found
        else:
            return
        for key, reason in reasons.items():
            value = data[key]
            if isinstance(value, int | float) and math.isfinite(value):
                refused.add(key)  # the name is at fault, as the value is an ordinary one
            kind = f"refused {key}" if len(refused) <= _MAX_NAMED else "refused others"
            BOUNDARY.lose(name, f"tracker {name!r} refuses {key!r}: {reason}", kind=kind)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Send a table of samples to every tracker that can show one; a row may lack what others have."""
        columns = list(dict.fromkeys(key for sample in samples for key in sample))
        names = _valid_names(columns)
        rows = [{names[key]: _cell_value(sample.get(key)) for key in columns} for sample in samples]
        if rows:
            self._each("log_samples", _LOG_S, rows, step)

    def finish(self) -> None:
        """Flush and close every tracker, and report what the records of the run lack."""
        self._close()
        BOUNDARY.summarize()

    def _close(self) -> None:
        self._each("finish", _FINISH_S)
        for courier in self._couriers.values():
            courier.end()

    def _each(self, method: str, limit_s: float, *args: Any) -> None:
        for name, tracker in self._trackers.items():
            with self._guard(name):
                self._call(name, partial(getattr(tracker, method), *args), limit_s)

    def _guard(self, name: str) -> Guard:
        return BOUNDARY.guard(name, f"tracker {name!r}")


def _narrow(send: Callable[[dict[str, Any]], None], data: Mapping[str, Any], deadline: float) -> dict[str, str] | None:
    """Send metrics in halves of halves, until those that are refused stand alone.

    Returns:
        The metrics that were not taken, with the reason; None if none was taken, so that no name is to blame.
    """
    parts, reasons, taken, calls = _halves(dict(data)), dict[str, str](), False, 0
    while parts:
        part = parts.pop()
        calls += 1
        try:
            if calls > _MAX_CALLS or time.monotonic() > deadline:
                raise TimeoutError("too many of the step's metrics are refused")
            send(part)
            taken = True
        except BaseException as error:
            if not is_failure(error):
                raise
            if not taken and (calls >= _MAX_FAILURES or isinstance(error, TimeoutError)):
                return None
            if len(part) > 1 and calls <= _MAX_CALLS:
                parts += _halves(part)
            else:
                reasons |= dict.fromkeys(part, describe(error))
    return reasons if taken else None


def _halves(part: dict[str, Any]) -> list[dict[str, Any]]:
    items = list(part.items())
    middle = len(items) // 2
    return [dict(half) for half in (items[middle:], items[:middle]) if half]


def _valid_metrics(data: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics under names of valid text, with plain values."""
    names, plain = _valid_names(data), {}
    for key, value in data.items():
        with BOUNDARY.guard("metrics", f"metric {names[key]!r}"):
            plain[names[key]] = _plain(value)
    return plain


def _valid_names(keys: Iterable[Any]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for key in keys:
        text = key if isinstance(key, str) else str(key)
        names[key] = distinct_name(valid_text(text), set(names.values()))
        if names[key] != text:
            BOUNDARY.lose("metrics", f"a name is no valid text and becomes {names[key]!r}", kind="name", count=0)
    return names

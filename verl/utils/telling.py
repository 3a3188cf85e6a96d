"""The boundary between a run and what only reports on it: console, log, files of metrics, samples, traces, trackers.

A failure of reporting never ends the run and never keeps another destination from its part. Each loss is a warning
once and counted always: ``tracking/failures`` and ``tracking/failures/<destination>`` are metrics of the next step.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from verl.errors import VerlError

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 100  # kinds of losses that are remembered as reported
#: failures whose sentence says enough; of others it is said where they were raised
_PLAIN_FAILURES = (OSError, VerlError)


class Boundary:
    """Swallows failures of reporting, reports each kind once and counts all.

    Counts are of this process. Threads may share one: a count that two of them raise at the same time may be one short.
    """

    def __init__(self) -> None:
        self._lost = Counter[str]()
        self._reported: set[tuple[str, str]] = set()

    def guard(self, destination: str, subject: str) -> Guard:
        """A context in which an exception is a loss of ``destination``.

        Signals still end the run: ``KeyboardInterrupt``, and ``SystemExit`` where a signal handler raised it. Any other
        ``SystemExit`` comes from a library and is a failure like others.

        Args:
            destination: what the loss is counted under, a tracker's name or ``console``, ``log``, ``samples``, ...
            subject: names the tracker, file or directory in the warning.
        """
        return Guard(self, destination, subject)

    def lose(
        self,
        destination: str,
        sentence: str,
        *,
        kind: str = "",
        count: int = 1,
        silent: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """Count a loss, and warn of the first one of its kind.

        Args:
            destination: what it is counted under.
            sentence: says what is lost and why.
            kind: losses of one destination and kind are reported once.
            count: how many records or values are lost; 0 for a change that loses nothing.
            silent: only count, because the log itself is what failed.
            error: whose traceback is logged at level DEBUG.
        """
        if count:
            self._lost[destination] += count
        if silent or (destination, kind) in self._reported or len(self._reported) >= _MAX_WARNINGS:
            return
        self._reported.add((destination, kind))
        if count:
            sentence += f"; the run continues, and tracking/failures/{destination} counts such losses"
        logger.warning("%s", sentence)
        if error is not None:
            logger.debug("the traceback of this loss:", exc_info=error)

    @property
    def counts(self) -> Mapping[str, int]:
        """Losses so far by destination."""
        return dict(self._lost)

    def metrics(self) -> dict[str, int]:
        """The counts as metrics; none while nothing is lost."""
        if not self._lost:
            return {}
        parts = {f"tracking/failures/{destination}": count for destination, count in sorted(self._lost.items())}
        return {"tracking/failures": self._lost.total(), **parts}

    def start(self) -> None:
        """Begin a run: nothing is lost and nothing is reported yet."""
        self._lost.clear()
        self._reported.clear()

    def summarize(self) -> None:
        """Report at the end of a run what its records lack."""
        for destination, count in sorted(self._lost.items()):
            logger.warning("%s: %d records or values of this run are lost", destination, count)


class Guard:
    """The context of :meth:`Boundary.guard`.

    Attributes:
        failed: whether the block ended with a failure.
    """

    def __init__(self, boundary: Boundary, destination: str, subject: str) -> None:
        self._boundary = boundary
        self._destination = destination
        self._subject = subject
        self.failed = False

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not is_failure(error):
            return False
        self.failed = True
        sentence = f"{self._subject} failed: {describe(error)}"
        if not isinstance(error, _PLAIN_FAILURES):
            sentence += _raised_at(error)
        self._boundary.lose(self._destination, sentence, kind=type(error).__name__, error=error)
        return True


#: of this process
BOUNDARY = Boundary()


def is_failure(error: BaseException) -> bool:
    """Whether an exception is a failure of the code that raised it, not a request to end the process."""
    if isinstance(error, SystemExit):
        return not _raised_by_signal(error)
    return isinstance(error, Exception)


def describe(error: BaseException) -> str:
    """The exception in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception's own method may raise anything
        text = ""
    if isinstance(error, OSError | VerlError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _raised_at(error: BaseException) -> str:
    """The line of code that raised it, or what it was made of, in another thread for example."""
    trace = (error.__cause__ or error).__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"


def _raised_by_signal(error: BaseException) -> bool:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False

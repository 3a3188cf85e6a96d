"""Ending a run in time: on a signal of the system, or before a deadline that will kill it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from verl import envs
from verl.errors import TrainingError
from verl.utils.timing import format_duration

logger = logging.getLogger(__name__)

#: exit code of a run that saved and ended early; starting it again goes on (sysexits.h: EX_TEMPFAIL)
EXIT_UNFINISHED = 75
#: the deadline that the configuration sets
TIME_LIMIT = "trainer.time_limit_s"
_DEADLINES = (
    "SLURM_JOB_END_TIME",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


class StopRequested(KeyboardInterrupt):
    """A signal or a deadline ends what is being done now; raised within :meth:`StopWatch.interruptible`.

    Like Ctrl-C it passes through code that handles errors.
    """


def _not_cancelled() -> bool:
    return False


_cancelled: Callable[[], bool] = _not_cancelled


def set_cancel_check(check: Callable[[], bool]) -> None:
    """Say how a process that works for another one learns that its present call is not wanted any more."""
    global _cancelled
    _cancelled = check


def call_is_cancelled() -> bool:
    """Whether the caller of what this process does gave up; long loops ask between their rounds."""
    return _cancelled()


_accounts: list[Callable[[], str]] = []


@contextmanager
def account(describe: Callable[[], str]) -> Iterator[None]:
    """Within the context, :func:`state_of_work` is what ``describe`` returns."""
    _accounts.append(describe)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _last[:] = [describe()]  # for who catches it further out
        raise
    finally:
        _accounts.remove(describe)


_last: list[str] = []


def state_of_work() -> str:
    """What an interrupted program has saved and how to go on, in one sentence."""
    if _accounts:
        return _accounts[-1]()
    return _last.pop() if _last else "nothing was begun that would have to be saved"


def require_saved(save_freq: int, watch: StopWatch, steps: int) -> None:
    """Refuse to call a run unfinished that got nowhere: started again and again, it would never end.

    Args:
        save_freq: setting of the run; without saves the next start begins anew.
        watch: what ended the run.
        steps: that this process finished. A signal or the end of a machine may come at any time, but a time limit of
            the configuration that is too short for one step is too short at the next start too.

    Raises:
        TrainingError: the next start would not get further than this one.
    """
    if save_freq <= 0:
        raise TrainingError(
            f"the run ended before its last step and saved nothing (trainer.save_freq={save_freq}), so the next start "
            "begins anew; set trainer.save_freq to be able to go on"
        )
    if watch.expired and not watch.signalled and not steps and watch.source == TIME_LIMIT:
        raise TrainingError(
            f"{watch.why()}, and this start did not finish a single step, so another one would not get further; raise "
            f"{TIME_LIMIT}, or make a step shorter (data.train_batch_size, data.max_response_length)"
        )


_current: list[StopWatch] = []


def look() -> None:
    """:meth:`StopWatch.look` of the watch in whose interruptible context this is called; nothing outside of one.

    For loops whose rounds call users' code, which may have caught what a signal raised.
    """
    if _current:
        _current[-1].look()


class StopWatch:
    """Says when a run should save and end. Used as a context it also listens for SIGTERM and for the deadline.

    The first signal asks the run to end: at once where :meth:`interruptible` allows it, else after the step. The second
    one ends the process as it would without this.

    Args:
        time_limit_s: seconds from now; None for no limit of its own. The end of a batch job or a rented machine, where
            the environment tells it, counts too.
        spare_s: seconds to keep free before the deadline.
    """

    def __init__(self, time_limit_s: float | None = None, spare_s: float = 0.0) -> None:
        now = time.time()
        known = {name: float(end) for name in _DEADLINES if (end := envs.get(name)) is not None}
        if time_limit_s is not None:
            known[TIME_LIMIT] = now + time_limit_s
        self._deadline, self.source = min(((end, name) for name, end in known.items()), default=(float("inf"), ""))
        self._spare_s = spare_s
        self._longest = 0.0
        self._save_s = 0.0
        self._before: Any = None
        self._depth = 0  # of interruptible contexts
        self._ended = threading.Event()
        self._alarmed = False
        self.signalled = False
        self.expired = False  # the deadline came in the middle of a step

    @contextmanager
    def interruptible(self, save_s: float = 0.0) -> Iterator[None]:
        """Within the context a signal or the deadline raises :class:`StopRequested` at once.

        For work that can be given up without a loss but its own time.

        Args:
            save_s: how long a save takes, for which time is kept before the deadline.
        """
        self._save_s = max(self._save_s, save_s)
        self.look()
        self._depth += 1
        _current.append(self)
        try:
            yield
        finally:
            self._depth -= 1
            _current.remove(self)

    def look(self) -> None:
        """Raise :class:`StopRequested` if the run is to end now; loops that can be given up ask in every round."""
        if self._left() < 0:
            self.expired = True
        if self.signalled or self.expired:
            raise StopRequested(self.why())

    def why(self) -> str:
        """What ends the run."""
        return "SIGTERM" if self.signalled else f"the deadline ({self.source}) is near"

    def _left(self) -> float:
        """Seconds until the save must begin."""
        return self._deadline - time.time() - self._save_s - self._spare_s

    def reason(self, step_s: float = 0.0, save_s: float = 0.0) -> str | None:
        """Why the run should save and end now; None to go on.

        Args:
            step_s: how long the last step took; the longest one is reckoned with.
            save_s: how long a save takes.
        """
        self._longest = max(self._longest, step_s)
        self._save_s = max(self._save_s, save_s)
        if self.signalled or self.expired:
            return self.why()
        left = self._deadline - time.time()
        needed = self._longest + save_s + self._spare_s
        if left < needed:
            return (
                f"{format_duration(max(0.0, left))} are left until the deadline ({self.source}), and another step "
                f"with its save needs {format_duration(needed)}"
            )
        return None

    def __enter__(self) -> StopWatch:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            self._ended.clear()
            if self._deadline != float("inf"):
                threading.Thread(target=self._watch_clock, name="verl-deadline", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _watch_clock(self) -> None:
        """Interrupt the main thread when the time is over; the signal also wakes it from waiting."""
        while not self._ended.wait(max(0.05, min(self._left(), 60.0))):
            if self._left() < 0 and self._depth and not self._ended.is_set():
                self._alarmed = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._alarmed:
            self._alarmed, self.expired = False, True
        elif self.signalled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        else:
            self.signalled = True
        when = "now" if self._depth else "after what is being updated or saved"
        logger.warning(
            "%s: the run ends %s, and saves if trainer.save_freq is set; a second SIGTERM ends it at once",
            self.why(),
            when,
        )
        if self._depth:
            raise StopRequested(self.why())

"""Run a reward function over samples, each within its time limit, and never lose a sample.

Three ways to run, the same outcomes:

* :class:`ThreadScorer`: one sample after the other in a thread of this process. After a time-out the thread is told to
  stop and another one goes on; a call that blocks inside C code lingers as an idle thread.
* :class:`~verl.rewards.process_scorer.ProcessScorer`: samples go to worker processes; after a time-out, or when one
  dies, it is killed and replaced. For functions that crash, hang in C code, use signals, or are slow.
* :class:`~verl.rewards.async_scorer.AsyncScorer`: ``async`` functions run concurrently in an event loop of their own.

:class:`~verl.rewards.streaming.StreamScorer` runs any of them on samples that come one by one.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.rewards.function import ScoreFunction
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import OutcomeKind, RewardOutcome, as_outcome
from verl.rewards.rate import RateLimiter
from verl.rewards.witness import witnessed

logger = logging.getLogger(__name__)


Call = Mapping[str, Any]


#: what Python says to a function that uses signals in another thread
NEEDS_MAIN_THREAD = "signal only works in main thread"


class Scorer(ABC):
    """Scores samples with one function.

    Args:
        function: called with the keywords of each call.
        options: time limit, retries, rate; the consequences in it are the caller's affair.
        limiter: shared with other scorers of the same run; made from ``options.max_rpm`` if not given.
    """

    def __init__(self, function: ScoreFunction, options: ScoringOptions, limiter: RateLimiter | None = None) -> None:
        self.function = function
        self.options = options
        self.timeout_s = options.timeout_s
        self.limiter = limiter or RateLimiter(options.max_rpm)

    def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        """One outcome per call, in order; those that failed are called again as often as the options say."""
        outcomes = self.score_once(calls)
        for attempt in range(self.options.max_retries):
            failed = [index for index, outcome in enumerate(outcomes) if is_retryable(outcome)]
            if not failed:
                break
            time.sleep(self.options.retry_wait_s * 2**attempt)
            for index, outcome in zip(failed, self.score_once([calls[index] for index in failed]), strict=True):
                outcomes[index] = outcome
        return outcomes

    @abstractmethod
    def score_once(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        """One outcome per call, in order, without retries."""

    def close(self) -> None:
        """Give back processes and threads; a scorer without any has nothing to do."""
        return


def is_retryable(outcome: RewardOutcome) -> bool:
    """Whether another call could end differently."""
    return outcome.kind in (OutcomeKind.ERROR, OutcomeKind.TIMEOUT) and not outcome.fatal


def call_function(function: ScoreFunction, call: Call) -> RewardOutcome:
    """Call and read the result; whatever the function raises becomes an error outcome with its traceback."""
    try:
        return as_outcome(function(**call))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary to users' code, which may call sys.exit
        return error_outcome(error)


def error_outcome(error: BaseException) -> RewardOutcome:
    """An exception as an outcome; configuration errors concern every sample and are fatal."""
    if isinstance(error, ConfigError):
        return RewardOutcome.error(str(error), fatal=True)
    text = "".join(traceback.format_exception(error))
    if NEEDS_MAIN_THREAD in str(error):
        text += "The function uses signals, which need a process of its own: set reward.num_workers to 2 or more.\n"
    return RewardOutcome.error(text)


class SampleTimeout(BaseException):
    """Raised inside a thread whose sample ran out of time."""


def interrupt(thread: threading.Thread) -> None:
    """Stop pure-Python code at its next bytecode; code blocked in C sees it when it returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SampleTimeout))


class _ThreadRun:
    """One thread's way through the calls; ``cancelled`` makes everything it still does void."""

    def __init__(self, scorer: ThreadScorer, calls: Sequence[Call], begin: int, results: list[Any]) -> None:
        self.scorer, self.calls, self.results = scorer, calls, results
        self.index = begin
        self.started = time.monotonic()
        self.cancelled = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="verl-reward", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self.index < len(self.calls) and not self.cancelled:
                delay = self.scorer.limiter.reserve()
                with self.changed:
                    self.started = time.monotonic() + delay
                time.sleep(delay)
                with witnessed(self.scorer.function, self.calls[self.index], self.scorer.place(self.index)):
                    outcome = call_function(self.scorer.function, self.calls[self.index])
                with self.changed:
                    if self.cancelled:
                        return
                    self.results[self.index] = outcome
                    self.index += 1
                    self.started = time.monotonic()
            with self.changed:
                self.changed.notify()
        except SampleTimeout:
            return

    def wait(self, timeout_s: float) -> bool:
        """Wait until every call is done (True) or the current one is over its limit (False, and the run is void)."""
        with self.changed:
            while self.index < len(self.calls):
                left = self.started + timeout_s - time.monotonic()
                if left <= 0:
                    self.cancelled = True
                    break
                self.changed.wait(left)
            else:
                return True
        interrupt(self.thread)
        return False


class ThreadScorer(Scorer):
    """One sample after the other in this process; without a time limit in the calling thread.

    A function that uses signals, which only the main thread may, runs in the calling thread too: such a function limits
    its own time.
    """

    _uses_signals = False
    #: whether calls come one by one, so that their place in a batch is not known
    streams = False

    def place(self, index: int) -> int | None:
        """The place of a call in its batch, for messages."""
        return None if self.streams else index

    def score_once(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        results: list[Any] = [None] * len(calls)
        begin = 0
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self.timeout_s is None or (self._uses_signals and in_main_thread):
            for index, call in enumerate(calls):
                time.sleep(self.limiter.reserve())
                with witnessed(self.function, call, self.place(index)):
                    results[index] = call_function(self.function, call)
            return results
        while begin < len(calls):
            run = _ThreadRun(self, calls, begin, results)
            if run.wait(self.timeout_s):
                break
            results[run.index] = RewardOutcome.timeout(self.timeout_s)
            begin = run.index + 1
        if in_main_thread and any(NEEDS_MAIN_THREAD in outcome.message for outcome in results):
            logger.info(
                "%r uses signals: it runs in the main thread, where reward.timeout_s does not reach", self.function
            )
            self._uses_signals = True
            return self.score_once(calls)
        return results

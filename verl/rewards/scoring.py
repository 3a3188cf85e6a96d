"""Run a reward function over samples, each within its time limit, and never lose a sample.

Three ways to run, the same outcomes:

* :class:`ThreadScorer` (``num_workers=0``): one sample after the other in a thread of this process. After a time-out
  the thread is told to stop and another one goes on; a call that blocks inside C code lingers as an idle thread.
* :class:`ProcessScorer` (``num_workers>0``): samples go to that many processes; after a time-out, or when one dies, it
  is killed and replaced. For functions that crash, hang in C code, use signals, or are slow.
* :class:`AsyncScorer`: ``async`` functions run concurrently in an event loop of their own.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.rewards.function import ScoreFunction
from verl.rewards.outcome import RewardOutcome, as_outcome

logger = logging.getLogger(__name__)

Call = Mapping[str, Any]
MAX_CONCURRENT_CALLS = 256
_BLOCKED_LOOP_GRACE_S = 1.0
_START_LIMIT_S = 300.0


class Scorer(ABC):
    """Scores samples with one function.

    Args:
        function: called with the keywords of each call.
        timeout_s: seconds that one sample may take; ``None`` for no limit.
    """

    def __init__(self, function: ScoreFunction, timeout_s: float | None) -> None:
        self.function = function
        self.timeout_s = timeout_s

    @abstractmethod
    def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        """One outcome per call, in order."""

    def close(self) -> None:
        """Give back processes; a scorer without any has nothing to do."""
        return


def make_scorer(function: ScoreFunction, *, timeout_s: float | None, num_workers: int) -> Scorer:
    """The scorer that fits the function and the number of worker processes.

    Raises:
        ConfigError: processes are asked for, but the function cannot be sent to one.
    """
    if function.is_async:
        return AsyncScorer(function, timeout_s)
    if num_workers > 0:
        return ProcessScorer(function, timeout_s, num_workers)
    return ThreadScorer(function, timeout_s)


def call_function(function: ScoreFunction, call: Call) -> RewardOutcome:
    """Call and read the result; whatever the function raises becomes an error outcome with its traceback."""
    try:
        return as_outcome(function(**call))
    except Exception as error:  # noqa: BLE001  the boundary to users' code
        return error_outcome(error)


def error_outcome(error: BaseException) -> RewardOutcome:
    """An exception as an outcome; configuration errors concern every sample and are fatal."""
    text = "".join(traceback.format_exception(error))
    if "signal only works in main thread" in str(error):
        text += "The function uses signals, which need a process of its own: set reward.num_workers to 1 or more.\n"
    return RewardOutcome.error(text, fatal=isinstance(error, ConfigError))


# --- in a thread ----------------------------------------------------------------------------------------------------


class _GiveUp(BaseException):
    """Raised inside a thread whose sample ran out of time."""


class _ThreadRun:
    """One thread's way through the calls; ``cancelled`` makes everything it still does void."""

    def __init__(self, function: ScoreFunction, calls: Sequence[Call], begin: int, results: list[Any]) -> None:
        self.function, self.calls, self.results = function, calls, results
        self.index = begin
        self.started = time.monotonic()
        self.cancelled = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="verl-reward", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self.index < len(self.calls) and not self.cancelled:
                outcome = call_function(self.function, self.calls[self.index])
                with self.changed:
                    if self.cancelled:
                        return
                    self.results[self.index] = outcome
                    self.index += 1
                    self.started = time.monotonic()
            with self.changed:
                self.changed.notify()
        except _GiveUp:
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
        # stops pure-Python code at its next bytecode; code blocked in C sees it when it returns
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(_GiveUp))
        return False


class ThreadScorer(Scorer):
    """One sample after the other in this process."""

    def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        if self.timeout_s is None:
            return [call_function(self.function, call) for call in calls]
        results: list[Any] = [None] * len(calls)
        begin = 0
        while begin < len(calls):
            run = _ThreadRun(self.function, calls, begin, results)
            if run.wait(self.timeout_s):
                break
            results[run.index] = RewardOutcome.timeout(self.timeout_s)
            begin = run.index + 1
        return results


# --- in processes ---------------------------------------------------------------------------------------------------


class _Process:
    """A worker process and the sample that it is busy with."""

    def __init__(self, payload: bytes) -> None:
        self.conn, theirs = connection.Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # a fresh interpreter, not a fork (the parent has threads) nor a spawn (which runs the user's script again)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verl.rewards.process_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.index: int | None = None
        self.deadline: float | None = time.monotonic() + _START_LIMIT_S
        self.ready = False
        self.conn.send((list(sys.path), payload))

    def give(self, index: int, call: Call, timeout_s: float | None) -> None:
        self.index = index
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.conn.send(dict(call))

    def kill(self) -> int:
        """End the process at once and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.conn.close()
        return code


class ProcessScorer(Scorer):
    """Samples are handed to worker processes that live as long as the scorer."""

    def __init__(self, function: ScoreFunction, timeout_s: float | None, num_workers: int) -> None:
        super().__init__(function, timeout_s)
        self.num_workers = num_workers
        try:
            if getattr(function.function, "__module__", None) == "__main__" and function.origin is None:
                raise pickle.PicklingError("it is defined in the script that was started")
            self._payload = pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"reward function {function!r} cannot be sent to a worker process ({error}); define it at the top "
                "level of a file given as custom_reward_function.path, or set reward.num_workers=0"
            ) from error
        self._workers: list[_Process] = []
        _SCORERS.add(self)

    def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        results: list[Any] = [None] * len(calls)
        waiting = list(range(len(calls) - 1, -1, -1))
        while len(self._workers) < min(self.num_workers, len(calls)):
            self._workers.append(_Process(self._payload))
        for worker in self._workers:
            if worker.ready and waiting:
                self._give(worker, waiting, calls, results)
        while waiting or any(w.index is not None for w in self._workers):
            for worker in self._next_events():
                self._advance(worker, waiting, calls, results)
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _next_events(self) -> list[_Process]:
        """Workers that said something, died or ran out of time; waits for the first."""
        active = [w for w in self._workers if w.index is not None or not w.ready]
        deadlines = [w.deadline for w in active if w.deadline is not None]
        limit = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        spoke = connection.wait([w.conn for w in active], limit)
        now = time.monotonic()
        return [w for w in active if w.conn in spoke or (w.deadline is not None and w.deadline <= now)]

    def _advance(self, worker: _Process, waiting: list[int], calls: Sequence[Call], results: list[Any]) -> None:
        try:
            message = worker.conn.recv() if worker.conn.poll() else None
            died = False
        except (EOFError, OSError):
            message, died = None, True
        except Exception as error:  # noqa: BLE001  unpickling runs the code of the values' classes
            message, died = error_outcome(error), False
        if not worker.ready:
            self._started(worker, message, died)
        elif worker.index is not None and isinstance(message, RewardOutcome):
            results[worker.index] = message
            worker.index = None
        elif worker.index is not None:
            index = worker.index
            worker = self._replace(worker, results, index, died)
        if worker.ready and worker.index is None and waiting:
            self._give(worker, waiting, calls, results)

    def _started(self, worker: _Process, message: Any, died: bool) -> None:
        if message == "ready":
            worker.ready, worker.deadline = True, None
            return
        reason = message if isinstance(message, str) else ("it died" if died else f"nothing in {_START_LIMIT_S:g} s")
        self.close()
        raise RewardError(f"a reward worker process could not load {self.function!r}: {reason}")

    def _replace(self, worker: _Process, results: list[Any], index: int, died: bool) -> _Process:
        code = worker.kill()
        if died:
            results[index] = RewardOutcome.error(
                f"the worker process died (exit code {code}) while it scored this sample"
            )
        else:
            results[index] = RewardOutcome.timeout(self.timeout_s or 0.0)
        fresh = _Process(self._payload)
        self._workers[self._workers.index(worker)] = fresh
        return fresh

    def _give(self, worker: _Process, waiting: list[int], calls: Sequence[Call], results: list[Any]) -> None:
        index = waiting.pop()
        try:
            worker.give(index, calls[index], self.timeout_s)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            worker.index = None
            results[index] = error_outcome(error)
        except OSError:
            pass  # it died meanwhile: its closed connection says so next, and that counts as this sample's error


_SCORERS: weakref.WeakSet[ProcessScorer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for scorer in list(_SCORERS):
        scorer.close()


# --- in an event loop -----------------------------------------------------------------------------------------------


class AsyncScorer(Scorer):
    """``async`` functions, many at a time."""

    def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        results: list[Any] = [None] * len(calls)
        progress = _Progress()
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._run, args=(loop, calls, results, progress), name="verl-reward-loop", daemon=True
        )
        thread.start()
        while not progress.wait(self._patience()):
            if self.timeout_s is not None and progress.stuck_for() > self._patience():
                detail = "; the function blocks its event loop, use asyncio.sleep and async I/O inside it"
                logger.warning("a reward function blocked its event loop; its unfinished samples time out")
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_GiveUp))
                return [r if r is not None else RewardOutcome.timeout(self.timeout_s, detail) for r in list(results)]
        return results

    def _patience(self) -> float:
        return (self.timeout_s or 60.0) + _BLOCKED_LOOP_GRACE_S

    def _run(self, loop: asyncio.AbstractEventLoop, calls: Sequence[Call], results: list[Any], progress: Any) -> None:
        try:
            loop.run_until_complete(self._score_all(calls, results, progress))
            loop.close()
        except _GiveUp:
            return
        finally:
            progress.finish()

    async def _score_all(self, calls: Sequence[Call], results: list[Any], progress: _Progress) -> None:
        gate = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def one(index: int) -> None:
            async with gate:
                progress.beat()
                results[index] = await self._score_one(calls[index])
                progress.beat()

        heart = asyncio.create_task(self._beat(progress))
        await asyncio.gather(*(one(index) for index in range(len(calls))))
        heart.cancel()

    async def _score_one(self, call: Call) -> RewardOutcome:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return as_outcome(await self.function(**call))
        except Exception as error:  # noqa: BLE001  the boundary to users' code
            if isinstance(error, TimeoutError) and limit.expired():
                return RewardOutcome.timeout(self.timeout_s or 0.0)
            return error_outcome(error)

    async def _beat(self, progress: _Progress) -> None:
        while True:
            progress.beat()
            await asyncio.sleep(0.2)


class _Progress:
    """Tells a waiting thread that an event loop is alive, or done."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._last = time.monotonic()

    def beat(self) -> None:
        self._last = time.monotonic()

    def finish(self) -> None:
        self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def stuck_for(self) -> float:
        return time.monotonic() - self._last

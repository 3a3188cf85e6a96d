"""Reward functions in worker processes: a crash or a hang costs one sample and one process."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.rewards.function import ScoreFunction
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import RewardOutcome
from verl.rewards.rate import RateLimiter
from verl.rewards.scoring import Call, Scorer, error_outcome

_START_LIMIT_S = 300.0


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

    def give(self, index: int, call: Call, delay: float, timeout_s: float | None) -> None:
        self.index = index
        self.deadline = None if timeout_s is None else time.monotonic() + delay + timeout_s
        self.conn.send((delay, dict(call)))

    def kill(self) -> int:
        """End the process at once and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.conn.close()
        return code


class ProcessScorer(Scorer):
    """Samples are handed to ``options.num_workers`` processes that live as long as the scorer.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(self, function: ScoreFunction, options: ScoringOptions, limiter: RateLimiter | None = None) -> None:
        super().__init__(function, options, limiter)
        self.num_workers = options.num_workers
        try:
            if getattr(function.function, "__module__", None) == "__main__" and function.origin is None:
                raise pickle.PicklingError("it is defined in the script that was started")
            self._payload = pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"reward function {function!r} cannot be sent to a worker process ({error}); define it at the top "
                "level of a file given as custom_reward_function.path, or set reward.num_workers=1"
            ) from error
        self._workers: list[_Process] = []
        self._turn = threading.Lock()
        _SCORERS.add(self)

    def score_once(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        with self._turn:
            return self._score(calls)

    def _score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
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
                f"the worker process died (exit code {code}) while {self.function!r} scored this sample"
            )
        else:
            results[index] = RewardOutcome.timeout(self.timeout_s or 0.0)
        fresh = _Process(self._payload)
        self._workers[self._workers.index(worker)] = fresh
        return fresh

    def _give(self, worker: _Process, waiting: list[int], calls: Sequence[Call], results: list[Any]) -> None:
        index = waiting.pop()
        try:
            worker.give(index, calls[index], self.limiter.reserve(), self.timeout_s)
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

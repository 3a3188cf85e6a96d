"""Score samples one by one, each as soon as it is there, without holding up whoever brings it."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from verl.errors import RewardError
from verl.rewards.async_scorer import AsyncScorer
from verl.rewards.function import ScoreFunction
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import RewardOutcome
from verl.rewards.process_scorer import ProcessScorer
from verl.rewards.rate import RateLimiter
from verl.rewards.scoring import Call, Scorer, ThreadScorer, error_outcome

_Job = tuple[Call, "Future[RewardOutcome]"]
DEFAULT_LANES = 8


class StreamScorer:
    """Takes calls at any time and from any thread, and runs several at once.

    An ``async`` function runs in one event loop. Otherwise there are lanes, each with one call at a time: as many as
    worker processes (``options.num_workers`` of 2 or more), or threads of this process (``options.max_concurrent``,
    8 unless given; more help functions that wait for something, none help Python code that computes).
    """

    def __init__(self, function: ScoreFunction, options: ScoringOptions) -> None:
        self.function = function
        self.options = options
        self._limiter = RateLimiter(options.max_rpm)
        self._async = AsyncScorer(function, options, self._limiter) if function.is_async else None
        self._in_processes = options.num_workers > 1
        self._lanes = options.num_workers if self._in_processes else (options.max_concurrent or DEFAULT_LANES)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._scorers: list[Scorer] = []
        self._open = 0
        self._closed = False
        self._lock = threading.Lock()
        if self._in_processes and self._async is None:
            self._lane_scorer()  # a function that cannot travel is refused here, not in a lane

    def submit(self, call: Call) -> Future[RewardOutcome]:
        """Start scoring; the future ends with an outcome, whatever the function does.

        Raises:
            RewardError: the scorer is closed.
        """
        if self._async is not None:
            return self._async.submit(call)
        future: Future[RewardOutcome] = Future()
        with self._lock:
            if self._closed:
                raise RewardError("the reward manager is closed; make a new one")
            self._open += 1
            if self._open > len(self._threads) and len(self._threads) < self._lanes:
                thread = threading.Thread(target=self._work, name=f"verl-reward-lane-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put((call, future))
        return future

    def close(self) -> None:
        """Take no more calls, end processes; calls that have not started are cancelled."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
            scorers, self._scorers = self._scorers, []
        if self._async is not None:
            self._async.close()
        for scorer in scorers:
            scorer.close()

    def _lane_scorer(self) -> Scorer:
        if not self._in_processes:
            scorer = ThreadScorer(self.function, self.options, self._limiter)
            scorer.streams = True
            return scorer
        one = ScoringOptions(**{**vars(self.options), "num_workers": 1})
        return ProcessScorer(self.function, one, self._limiter)

    def _work(self) -> None:
        scorer = self._lane_scorer()
        with self._lock:
            self._scorers.append(scorer)
        while (job := self._jobs.get()) is not None:
            call, future = job
            if not self._closed and future.set_running_or_notify_cancel():
                try:
                    outcome = scorer.score([call])[0]
                except Exception as error:  # noqa: BLE001  a worker that cannot start must not end the lane in silence
                    outcome = RewardOutcome.error(error_outcome(error).message, fatal=isinstance(error, RewardError))
                future.set_result(outcome)
            else:
                future.cancel()
            with self._lock:
                self._open -= 1

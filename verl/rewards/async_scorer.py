"""``async`` reward functions: many calls at a time in an event loop that lives as long as the scorer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from verl.rewards.function import ScoreFunction
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import RewardOutcome, as_outcome
from verl.rewards.rate import RateLimiter
from verl.rewards.scoring import Call, SampleTimeout, Scorer, error_outcome, interrupt, is_retryable
from verl.rewards.witness import witnessed

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENT = 256
_BLOCKED_LOOP_GRACE_S = 1.0
_BEAT_S = 0.2


class _Loop:
    """An event loop in a thread, which tells that it is alive."""

    def __init__(self, max_concurrent: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.gate = asyncio.Semaphore(max_concurrent)
        self.pending: set[Future[RewardOutcome]] = set()
        self.last_beat = time.monotonic()
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="verl-reward-loop", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._beat()
            self.loop.run_forever()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
        except SampleTimeout:
            return

    def _beat(self) -> None:
        self.last_beat = time.monotonic()
        self.loop.call_later(_BEAT_S, self._beat)

    def stop(self) -> None:
        self.closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)


class AsyncScorer(Scorer):
    """At most ``options.max_concurrent`` calls at the same time, 256 unless given."""

    def __init__(self, function: ScoreFunction, options: ScoringOptions, limiter: RateLimiter | None = None) -> None:
        super().__init__(function, options, limiter)
        self._lock = threading.Lock()
        self._current: _Loop | None = None

    def submit(self, call: Call) -> Future[RewardOutcome]:
        """Start a call, from any thread; the future always ends with an outcome, unless the scorer is closed."""
        future: Future[RewardOutcome] = Future()
        with self._lock:
            if self._current is None:
                self._current = _Loop(self.options.max_concurrent or DEFAULT_CONCURRENT)
                if self.timeout_s is not None:
                    threading.Thread(target=self._watch, args=(self._current,), daemon=True).start()
            home = self._current
            home.pending.add(future)
        future.add_done_callback(home.pending.discard)
        asyncio.run_coroutine_threadsafe(self._run(home, call, future), home.loop)
        return future

    def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        return self.score_once(calls)

    def score_once(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        futures = [self.submit(call) for call in calls]
        return [future.result() for future in futures]

    def close(self) -> None:
        with self._lock:
            home, self._current = self._current, None
        if home is not None:
            home.stop()
            for future in list(home.pending):
                future.cancel()

    async def _run(self, home: _Loop, call: Call, future: Future[RewardOutcome]) -> None:
        async with home.gate:
            outcome = await self._call(call)
            for attempt in range(self.options.max_retries):
                if not is_retryable(outcome):
                    break
                await asyncio.sleep(self.options.retry_wait_s * 2**attempt)
                outcome = await self._call(call)
        _settle(future, outcome)

    async def _call(self, call: Call) -> RewardOutcome:
        await asyncio.sleep(self.limiter.reserve())
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                with witnessed(self.function, call):
                    return as_outcome(await self.function(**call))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary to users' code
            if isinstance(error, TimeoutError) and limit.expired():
                return RewardOutcome.timeout(self.timeout_s or 0.0)
            return error_outcome(error)

    def _watch(self, home: _Loop) -> None:
        """Give up a loop that a call blocks: its samples time out, later ones get a new loop."""
        limit = (self.timeout_s or 0.0) + _BLOCKED_LOOP_GRACE_S
        while not home.closed:
            time.sleep(_BEAT_S)
            if time.monotonic() - home.last_beat <= limit:
                continue
            with self._lock:
                if self._current is home:
                    self._current = None
            home.closed = True
            logger.warning("a reward function blocked its event loop; its unfinished samples time out")
            interrupt(home.thread)
            detail = "; the function blocks its event loop, use asyncio.sleep and async I/O inside it"
            for future in list(home.pending):
                _settle(future, RewardOutcome.timeout(self.timeout_s or 0.0, detail))


def _settle(future: Future[RewardOutcome], outcome: RewardOutcome) -> None:
    with suppress(InvalidStateError):  # given up or cancelled meanwhile
        future.set_result(outcome)

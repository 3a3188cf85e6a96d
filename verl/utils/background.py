"""Work that goes on in a thread while the caller goes on too."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

R = TypeVar("R")


class BackgroundTask:
    """Runs a function in a thread of its own; exceptions are re-raised by the next `done()` or `wait()`.

    Args:
        action: what to do; None for a task that is over already.
        name: of the thread.
        niceness: minimum nice value of the thread (Linux), 0 to 19; Linux only.
    """

    def __init__(
        self, action: Callable[[], object] | None = None, *, name: str = "verl-background", niceness: int = 0
    ) -> None:
        self._niceness = niceness
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if action is not None:
            self._thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
            self._thread.start()

    def _run(self, action: Callable[[], object]) -> None:
        try:
            if self._niceness and sys.platform == "linux":  # where it counts for a thread, not for the process
                niceness = max(self._niceness, os.getpriority(os.PRIO_PROCESS, 0))
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            action()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks
            self._failure = error

    @property
    def running(self) -> bool:
        """Whether it is at work; says nothing of what went wrong."""
        return self._thread is not None and self._thread.is_alive()

    def done(self) -> bool:
        """Whether it is over; raises what went wrong."""
        if self.running:
            return False
        if self._failure is not None:
            failure, self._failure = self._failure, None  # told once
            raise failure
        return True

    def settle(self) -> None:
        """Return when it is over, however it ended. The action must have an end of its own."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Return when it is over; raises what went wrong. The action must have an end of its own."""
        self.settle()
        self.done()


class Courier:
    """Makes calls in one thread of its own, one after the other, and waits for each no longer than a limit.

    A call that hangs costs the caller the limit once: while it has not returned, others are refused at once.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()  # a call that hangs must not hold up the end

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            result, call = item
            try:
                result.set_result(call())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                result.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - a library's exit or interrupt is not the caller's
                failure = RuntimeError(f"raised {type(error).__name__}({error})")
                failure.__cause__ = error
                result.set_exception(failure)

    def end(self) -> None:
        """Let the thread go when it has done what it was given; nothing may be asked of it afterwards."""
        self._calls.put(None)

    def do(self, call: Callable[[], R], limit_s: float) -> R:
        """The result of a call, or what it raised; a ``RuntimeError`` where that was ``SystemExit`` or its like.

        Raises:
            TimeoutError: it has not returned within ``limit_s`` seconds, or an earlier one has not returned yet.
        """
        if self._last is not None and not self._last.done():
            raise TimeoutError("an earlier call has not returned yet")
        result: Future[Any] = Future()
        self._last = result
        self._calls.put((result, call))
        try:
            return result.result(limit_s)  # type: ignore[no-any-return]
        except FutureTimeout:
            if result.done():  # raised by the call itself
                raise
            raise TimeoutError(f"no answer within {limit_s:g} s") from None

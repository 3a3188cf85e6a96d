"""Blocking work beside an event loop, which may be given up."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from verl.errors import RolloutError

#: threads that were given up and still run; more than this mean that something hangs for good
MAX_ABANDONED = 256
_abandoned: set[threading.Thread] = set()
_lock = threading.Lock()


async def run_in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a blocking function in a thread of its own.

    A thread cannot be ended from outside. When the caller is cancelled, as a time limit does, the thread is left to
    itself; it does not keep the process from ending. The threads of an executor would: asyncio waits for them.

    Raises:
        RolloutError: too many threads that were given up are still running.
    """
    with _lock:
        _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
        if len(_abandoned) >= MAX_ABANDONED:
            raise RolloutError(
                f"{MAX_ABANDONED} calls that ran out of time are still running in this process; make the function "
                "end by itself, with time limits on what it waits for"
            )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as error:  # a future cannot carry it
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            failure = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(deliver, result, failure)
            except RuntimeError:
                return  # the loop was closed in between: nobody waits

    thread = threading.Thread(target=work, daemon=True, name=f"verl-tool-{getattr(function, '__name__', 'call')}")
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        with _lock:
            _abandoned.add(thread)
        raise

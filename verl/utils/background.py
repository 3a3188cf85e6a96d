"""Work that goes on in a thread while the caller goes on too."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """Runs a function in a thread of its own; what it raised is raised by the next question about it.

    Args:
        action: what to do; None for a task that is over already.
        name: of the thread.
    """

    def __init__(self, action: Callable[[], object] | None = None, *, name: str = "verl-background") -> None:
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if action is not None:
            self._thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
            self._thread.start()

    def _run(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks
            self._failure = error

    def done(self) -> bool:
        """Whether it is over; raises what went wrong."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._failure is not None:
            failure, self._failure = self._failure, None  # told once
            raise failure
        return True

    def wait(self) -> None:
        """Return when it is over; raises what went wrong. The action must have an end of its own."""
        if self._thread is not None:
            self._thread.join()
        self.done()

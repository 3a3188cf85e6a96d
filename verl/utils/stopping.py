"""Ending a run in time: on a signal of the system, or before a deadline that will kill it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from verl import envs
from verl.errors import TrainingError
from verl.utils.timing import format_duration

logger = logging.getLogger(__name__)

#: exit code of a run that saved and ended early; starting it again goes on (sysexits.h: EX_TEMPFAIL)
EXIT_UNFINISHED = 75
_DEADLINES = (
    "SLURM_JOB_END_TIME",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def require_saved(save_freq: int) -> None:
    """Refuse to call a run unfinished that saved nothing: started again and again, it would never end.

    Raises:
        TrainingError: there is no checkpoint to go on from.
    """
    if save_freq <= 0:
        raise TrainingError(
            f"the run ended before its last step and saved nothing (trainer.save_freq={save_freq}), so the next start "
            "begins anew; set trainer.save_freq to be able to go on"
        )


class StopWatch:
    """Says when a run should save and end. Used as a context it also listens for SIGTERM.

    The first signal asks the run to end after the step; the second one ends the process as it would without this.

    Args:
        time_limit_s: seconds from now; None for no limit of its own. The end of a batch job or a rented machine, where
            the environment tells it, counts too.
        spare_s: seconds to keep free before the deadline.
    """

    def __init__(self, time_limit_s: float | None = None, spare_s: float = 0.0) -> None:
        now = time.time()
        known = {name: float(end) for name in _DEADLINES if (end := envs.get(name)) is not None}
        if time_limit_s is not None:
            known["trainer.time_limit_s"] = now + time_limit_s
        self._deadline, self._source = min(((end, name) for name, end in known.items()), default=(float("inf"), ""))
        self._spare_s = spare_s
        self._longest = 0.0
        self._before: Any = None
        self.signalled = False

    def reason(self, step_s: float = 0.0, save_s: float = 0.0) -> str | None:
        """Why the run should save and end now; None to go on.

        Args:
            step_s: how long the last step took; the longest one is reckoned with.
            save_s: how long a save takes.
        """
        self._longest = max(self._longest, step_s)
        if self.signalled:
            return "SIGTERM"
        left = self._deadline - time.time()
        needed = self._longest + save_s + self._spare_s
        if left < needed:
            return (
                f"{format_duration(max(0.0, left))} are left until the deadline ({self._source}), and another step "
                f"with its save needs {format_duration(needed)}"
            )
        return None

    def __enter__(self) -> StopWatch:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.signalled = True
        logger.warning(
            "SIGTERM: the run ends after this step, and saves if trainer.save_freq is set; a second one ends it at once"
        )

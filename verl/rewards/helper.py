"""Calls of other packages on a policy's text, in a helper process with limits of time and memory.

Computer algebra and the scorers of task collections may compute for hours on a short text, hold the interpreter lock
meanwhile, or take all memory. Here such a call costs its time limit, and the process that made it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import RewardError
from verl.rewards.function import ScoreFunction
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import RewardOutcome
from verl.rewards.process_scorer import ProcessScorer

MEMORY_BYTES = 4 << 30


class Helper:
    """A function in a process of its own, which starts with the first call.

    Args:
        function: at the top level of a module; returns a number.
        limit_s: seconds that a call may take.
        warm_up: arguments of a first call without a time limit, which imports what the function needs; None for none.
    """

    def __init__(self, function: Callable[..., Any], limit_s: float, warm_up: Mapping[str, Any] | None = None) -> None:
        self.limit_s = limit_s
        self._function = function
        self._warm_up = warm_up
        self._lock = threading.Lock()
        self._scorer: ProcessScorer | None = None
        self._owner = 0

    def __call__(self, **arguments: Any) -> RewardOutcome:
        """The outcome of a call: a score, an error or a time-out.

        Raises:
            RewardError: the process cannot be started.
        """
        scorer = self._started()
        scorer.timeout_s = self.limit_s
        (outcome,) = scorer.score([arguments])
        if outcome.fatal:
            raise RewardError(outcome.message)
        return outcome

    def _started(self) -> ProcessScorer:
        with self._lock:
            if self._scorer is None or self._owner != os.getpid():  # a fork has no process of its own yet
                options = ScoringOptions(timeout_s=None, num_workers=1)
                scorer = ProcessScorer(ScoreFunction(self._function), options)
                if self._warm_up is not None:
                    scorer.score([self._warm_up])
                self._scorer, self._owner = scorer, os.getpid()
            return self._scorer


def limit_memory() -> None:
    """In the helper process: no more than 4 GiB, unless there is a limit already."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))

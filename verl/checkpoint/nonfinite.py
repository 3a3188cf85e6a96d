"""What an update with a NaN or infinite gradient means for the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from verl.checkpoint.manager import step_of
from verl.errors import TrainingError

logger = logging.getLogger(__name__)

#: going back to one checkpoint more often than this does not help
MAX_ROLLBACKS = 3


class NonfiniteUpdates:
    """Applies ``trainer.on_nonfinite`` after each step.

    The update itself has been left out by the engine: parameters and optimizer are as before.

    Args:
        policy: ``skip``, ``stop`` or ``rollback``.
        newest: the newest complete checkpoint of the run, or None.
        restore: puts models and optimizers back to a checkpoint.
    """

    def __init__(self, policy: str, newest: Callable[[], Path | None], restore: Callable[[Path], None]) -> None:
        self.policy = policy
        self.newest = newest
        self.restore = restore
        self._rollbacks: dict[Path, int] = {}

    def check(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Act on the ``*/skipped_steps`` of a step; returns numbers to log.

        Raises:
            TrainingError: an update was left out and the policy is ``stop``, or going back does not help.
        """
        skipped = [name for name, value in metrics.items() if name.endswith("/skipped_steps") and value > 0]
        roles = sorted(name.partition("/")[0] for name in skipped)
        if not roles or self.policy == "skip":
            return {}
        what = f"step {step}: the loss or gradient of {', '.join(roles)} is not finite"
        if self.policy == "stop":
            raise TrainingError(
                f"{what}, and trainer.on_nonfinite=stop. Nothing was updated with it: look at the step's rewards and "
                "log-probabilities, lower the learning rate, or train on with on_nonfinite=skip or rollback"
            )
        path = self.newest()
        if path is None:
            logger.warning("%s; there is no checkpoint to go back to, the update is left out", what)
            return {}
        self._rollbacks[path] = self._rollbacks.get(path, 0) + 1
        if self._rollbacks[path] > MAX_ROLLBACKS:
            raise TrainingError(
                f"{what}, as after {MAX_ROLLBACKS} returns to {path}: the run does not recover by itself. Lower the "
                "learning rate, or start from an earlier checkpoint with trainer.resume_mode=resume_path"
            )
        logger.warning("%s; models and optimizers go back to step %d, the data goes on", what, step_of(path))
        self.restore(path)
        return {"checkpoint/rollbacks": 1.0}

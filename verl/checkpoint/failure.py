"""What the trainers share about saves: the consequence of a failed one, and the score of a good one."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence

from verl.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


def report_failure(policy: str, step: int, reason: str, complete: Sequence[int], error: BaseException) -> None:
    """Raise or log that the checkpoint of ``step`` could not be written.

    Args:
        policy: ``trainer.on_save_error``.
        step: of the checkpoint.
        reason: what happened.
        complete: steps with a complete checkpoint, ascending.
        error: the cause.

    Raises:
        CheckpointError: with ``stop``.
    """
    kept = (
        f"the checkpoint of step {complete[-1]} is intact and the one to resume from"
        if complete
        else "there is no earlier checkpoint"
    )
    message = f"the checkpoint of step {step} was not written: {reason}; {kept}"
    if policy == "stop":
        raise CheckpointError(f"{message} (trainer.on_save_error=continue would train on)") from error
    logger.error("%s; training on, the next save tries again", message)


def score_of(name: str | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """The marker's ``score``: the metric that ranks checkpoints; empty without one, or in a step without validation.

    Raises:
        ConfigError: there is no such metric.
    """
    if name is None:
        return {}
    if name in metrics:
        return {"score": float(metrics[name])}
    if name.startswith("val") and not any(known.startswith("val") for known in metrics):
        return {}  # a save out of turn
    near = difflib.get_close_matches(name, metrics, 1)
    known = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(metrics))}"
    raise ConfigError(f"trainer.best_ckpt_metric={name!r}: the step has no such metric; {known}")

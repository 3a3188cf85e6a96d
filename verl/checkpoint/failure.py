"""What the trainers share about saves: the consequence of a failed one, and the score of a good one."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint.manager import step_of
from verl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from verl.config.trainer import RunConfig

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


def describe_state(step: int, newest: Path | None, config: RunConfig) -> str:
    """What a run that is interrupted has saved, and what the next start does, in one sentence.

    Args:
        step: that is under way, or was the last one.
        newest: the newest complete checkpoint of the run.
        config: the ``trainer`` section.
    """
    if newest is None:
        why = f" (trainer.save_freq={config.save_freq})" if config.save_freq < 1 or step else ""
        return f"step {step} was not finished and nothing is saved{why}; the same command begins anew"
    saved = step_of(newest)
    lost = step - 1 - saved
    text = f"the checkpoint of step {saved} is in {newest}"
    if lost > 0:
        text += f", {lost} later step{'s are' if lost > 1 else ' is'} lost"
    if config.resume_mode != "auto":
        return f"{text}; trainer.resume_mode=auto continues from there"
    return f"{text}; the same command continues from there"


def require_final(saved_step: int | None, step: int, config: RunConfig) -> None:
    """Raise :class:`CheckpointError` if a run that saves ends without a checkpoint of its last step.

    Args:
        saved_step: of the newest complete checkpoint.
        step: the last one.
        config: the ``trainer`` section.
    """
    if config.save_freq > 0 and step > 0 and (saved_step is None or saved_step < step):
        kept = "there is no checkpoint" if saved_step is None else f"the newest checkpoint is of step {saved_step}"
        raise CheckpointError(
            f"the run ended after step {step} and its final state was not saved: {kept}. The reasons are in the log "
            "(trainer.on_save_error=continue); make space and start the same command again"
        )


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

"""Errors of user code on their way to the controller."""

from __future__ import annotations

import logging
import traceback

from verl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RolloutError,
    SchemaError,
    TrainingError,
    WeightSyncError,
    WorkerError,
    WorkerInputError,
)

logger = logging.getLogger(__name__)


def worker_error(role: str, rank: int, method: str, error: Exception, caught_in: str) -> WorkerError:
    """Report an exception of a worker's method.

    The traceback travels as text, because exceptions of user code need not pickle. What the library itself says of
    the input, a checkpoint, weights synced or a number that is not finite is a message that needs none.

    Args:
        role: the worker's role.
        rank: its rank.
        method: the method that raised.
        error: the exception.
        caught_in: ``__file__`` of the module that caught it; its own frames are left out of the text.
    """
    logger.debug("%s rank %d: %s() raised", role, rank, method, exc_info=error)
    if isinstance(error, ConfigError | DataError) and not isinstance(error, SchemaError):
        return WorkerInputError(role, rank, method, str(error))
    said = isinstance(error, CheckpointError | TrainingError | WeightSyncError)
    if said or (isinstance(error, RolloutError) and error.__cause__ is None):  # what an engine raised is shown whole
        return WorkerError(role, rank, method, "".join(traceback.format_exception_only(error)))
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == caught_in:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return WorkerError(role, rank, method, text)

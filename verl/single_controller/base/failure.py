"""Errors of user code on their way to the controller."""

from __future__ import annotations

import traceback

from verl.errors import WorkerError


def worker_error(role: str, rank: int, method: str, error: Exception, caught_in: str) -> WorkerError:
    """Report an exception of a worker's method.

    The traceback travels as text, because exceptions of user code need not pickle.

    Args:
        role: the worker's role.
        rank: its rank.
        method: the method that raised.
        error: the exception.
        caught_in: ``__file__`` of the module that caught it; its own frames are left out of the text.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == caught_in:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return WorkerError(role, rank, method, text)

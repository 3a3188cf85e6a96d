"""What the programs of the command line share: how they end."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

from verl.errors import ConfigError, DataError, VerlError
from verl.utils.logging import setup_logging, without_secrets
from verl.utils.owned import sweep
from verl.utils.stopping import EXIT_UNFINISHED
from verl.utils.telling import describe
from verl.utils.watcher import new_program, program_ended

logger = logging.getLogger(__name__)

#: what shells report of a program that Ctrl-C ended
EXIT_INTERRUPTED = 130


def start_program() -> None:
    """What every program does first: standard streams that cannot fail it, and the log.

    A thread of a library that fails writes a line to the log, as its exception ends no more than the thread. A setting
    of the log that is wrong ends the process with code 2 and one message.
    """
    try:
        setup_logging()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    threading.excepthook = _report_thread


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    """Log what ended a thread; system calls that failed need no traceback."""
    error, name = failure.exc_value, failure.thread.name if failure.thread is not None else "of a library"
    if error is not None and not isinstance(error, SystemExit):
        logger.warning(
            "thread %s ended: %s", name, describe(error), exc_info=None if isinstance(error, OSError) else error
        )


def exit_code(work: Callable[[], bool]) -> int:
    """Do the work of a program and return the process's exit code.

    An error of the library becomes one message on standard error, without a traceback of this process.

    Args:
        work: returns False if it saved its state and ended early, to be started again.

    Returns:
        0: done; 1: failed; 2: the configuration or the input is wrong; 75: ended early; 130: interrupted (Ctrl-C).
    """
    new_program()
    try:
        return _code_of(work)
    finally:
        program_ended()
        sweep()  # what processes left that were killed in this run, or in an earlier one


def _code_of(work: Callable[[], bool]) -> int:
    try:
        finished = work()
    except VerlError as error:
        logger.debug("the program failed", exc_info=True)
        sys.stderr.write(without_secrets(f"{type(error).__name__}: {error}\n"))
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except KeyboardInterrupt:
        logger.debug("interrupted", exc_info=True)
        sys.stderr.write("interrupted; what was saved before is whole, and the same command goes on from there\n")
        return EXIT_INTERRUPTED
    return 0 if finished else EXIT_UNFINISHED

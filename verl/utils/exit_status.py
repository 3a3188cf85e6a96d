"""What the programs of the command line share: how they end."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from verl.errors import ConfigError, DataError, VerlError
from verl.utils.fs import write_error
from verl.utils.logging import setup_logging, without_secrets
from verl.utils.owned import sweep
from verl.utils.stopping import EXIT_UNFINISHED, StopRequested, state_of_work
from verl.utils.telling import describe
from verl.utils.watcher import new_program, program_ended

logger = logging.getLogger(__name__)

#: what the system says about files and disks, as opposed to mistakes of the program
_OF_FILES = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EIO}
)

#: what shells report of a program that Ctrl-C ended
EXIT_INTERRUPTED = 130
#: and of one that SIGTERM ended
EXIT_TERMINATED = 143


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
        0: done; 1: failed; 2: the configuration or the input is wrong; 75: saved and ended early; 130: interrupted
        (Ctrl-C); 143: ended by SIGTERM before there was anything to save.
    """
    new_program()
    listens = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if listens:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        return _code_of(work)
    finally:
        if listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        program_ended()
        sweep()  # what processes left that were killed in this run, or in an earlier one


def _code_of(work: Callable[[], bool]) -> int:
    try:
        finished = work()
    except VerlError as error:
        logger.debug("the program failed", exc_info=True)
        sys.stderr.write(without_secrets(f"{type(error).__name__}: {error}\n"))
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except (KeyboardInterrupt, SystemExit) as error:
        # Ray's own handler of SIGTERM leaves with the number of the signal
        terminated = isinstance(error, StopRequested) or getattr(error, "code", None) == signal.SIGTERM
        if isinstance(error, SystemExit) and not terminated:
            raise
        logger.debug("interrupted", exc_info=True)
        sys.stderr.write(f"{'ended by SIGTERM' if terminated else 'interrupted'}: {state_of_work()}\n")
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _OF_FILES or error.filename is None:
            raise
        logger.debug("the program failed", exc_info=True)
        sys.stderr.write(f"error: {write_error(error, error.filename, 'file')}\n")
        return 1
    return 0 if finished else EXIT_UNFINISHED


def _terminate(number: int, frame: FrameType | None) -> None:
    """What SIGTERM does where no trainer listens: an end in order, so that what was started ends too."""
    raise StopRequested("SIGTERM")

"""What the programs of the command line share: how they end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from verl.errors import ConfigError, DataError, VerlError
from verl.utils.logging import without_secrets
from verl.utils.owned import sweep
from verl.utils.stopping import EXIT_UNFINISHED
from verl.utils.watcher import new_program, program_ended

logger = logging.getLogger(__name__)

#: what shells report of a program that Ctrl-C ended
EXIT_INTERRUPTED = 130


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

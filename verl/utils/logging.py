"""Logging set-up: one format with the process's rank in every line, and no secrets in it."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from verl import envs
from verl.utils.output import fitting, guard_streams, printable
from verl.utils.telling import BOUNDARY

_SECRET_NAME = re.compile(
    r"(?:api_?key|access_?key|private_?key|token|secret|password|passwd|passphrase|credential|authorization)s?$",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@:]+:[^/\s@]+@", re.IGNORECASE)  # scheme://name:password@
#: stands for a secret
HIDDEN = "***"
_MIN_SECRET_LENGTH = 8  # shorter values would blank out ordinary words


class RankFormatter(logging.Formatter):
    """``12:30:05 INFO [actor_rollout_ref 1/4] verl.module: message``; no bracket without a role and other ranks."""

    def __init__(self, role: str = "") -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        place = " ".join(part for part in (self.role, f"{rank}/{world}" if world != "1" else "") if part)
        prefix = f"{self.formatTime(record, self.datefmt)} {record.levelname}{f' [{place}]' if place else ''}"
        text = f"{prefix} {record.name}: {_message(record)}"
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            text = f"{text}\n{record.exc_text}"
        return printable(without_secrets(text))


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes lines in the characters that the stream has; a line that cannot be written is counted, never raised."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's line."""
        try:
            if self.stream is None:
                raise OSError("standard error is closed")
            encoding = getattr(self.stream, "encoding", None)
            self.stream.write(fitting(self.format(record) + self.terminator, encoding))
            self.stream.flush()
        except Exception:  # noqa: BLE001 - a logging call must not raise, whatever the stream does
            BOUNDARY.lose("log", "a line of the log is lost", silent=True)


def _message(record: logging.LogRecord) -> str:
    """The message, also where its arguments do not fit or have no text."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - an argument's own methods may raise anything
        return f"{record.msg!s} (its arguments have no text: {type(error).__name__})"


def setup_logging(role: str = "", *, level: str | None = None, stream: TextIO | None = None) -> logging.Logger:
    """Give the ``verl`` logger one handler; calling again replaces it.

    Standard output and error become such that writing to them never raises, see :mod:`verl.utils.output`.

    Args:
        role: name of the process, for example ``"actor_rollout_ref"``; part of every line.
        level: a level's name; by default ``VERL_LOGGING_LEVEL``.
        stream: where lines go, by default standard error.

    Returns:
        The ``verl`` logger.
    """
    logger = logging.getLogger("verl")
    for handler in [h for h in logger.handlers if isinstance(h.formatter, RankFormatter)]:
        logger.removeHandler(handler)
    if stream is None:
        guard_streams()
    handler = LogHandler(stream or sys.stderr)
    handler.setFormatter(RankFormatter(role))
    logger.addHandler(handler)
    logger.setLevel(level.upper() if level is not None else envs.get("VERL_LOGGING_LEVEL"))
    logger.propagate = False
    return logger


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested mappings and sequences in which everything named like a secret is hidden.

    Meant for a configuration that is printed or sent to a tracker: ``{"api_key": "abc"}`` -> ``{"api_key": "***"}``.
    Passwords in URLs and the values of secret environment variables are hidden wherever they are.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(item, name) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, str) and value and _SECRET_NAME.search(name):
        return HIDDEN
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """Hide the values of environment variables whose name says that they are secrets, and passwords in URLs."""
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_LENGTH and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, HIDDEN)
    return _URL_USER.sub(rf"\1{HIDDEN}@", text)

"""Standard output and error that no reader, terminal or full disk can turn against the program.

A closed pipe (``| head -1``), a terminal that is gone, a full disk or characters that the terminal cannot show cost
what is printed and nothing else. This holds for everybody who prints in the process: trackers, libraries, reward
functions of users.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from typing import IO, TextIO, cast

from verl.errors import OutputError
from verl.utils.telling import BOUNDARY, describe

#: how long a stream that another program has made non-blocking may stay full
_WAIT_MS = 10_000
#: nothing can be written after these: the reader or the terminal is gone
_GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET})

_PLAIN_SIGNS = str.maketrans({"━": "=", "╌": "-", "│": "|", "…": "...", "–": "-", "—": "-", "×": "x", "→": "->"})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def guard_streams() -> None:
    """Make standard output and error of this process total: writing to them never raises.

    Streams that are no plain files, pipes or terminals, such as those of a test runner, are left as they are. Where a
    descriptor is closed, as after ``>&-``, the null device takes its place, so that no file of the run gets its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_descriptor(number)
        stream = getattr(sys, name)
        if stream is None:
            null = open(os.devnull, "w" if number else "r", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, null)
        elif number:
            setattr(sys, name, _guarded(stream, "console" if name == "stdout" else "log"))


def write_result(text: str) -> None:
    """Write to standard output what the program was asked for, such as a table or the configuration.

    A reader that leaves early has what it wanted.

    Raises:
        OutputError: a part was not written, for lack of space for example.
    """
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    tolerant = raw if isinstance(raw, _Tolerant) else None
    if tolerant is not None:
        sys.stdout.flush()
        tolerant.error, tolerant.silent = None, True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    finally:
        if tolerant is not None:
            tolerant.silent = False
    if tolerant is not None and tolerant.error is not None and tolerant.error.errno not in _GONE:
        raise OutputError(f"the result cannot be written to standard output: {describe(tolerant.error)}")


def fitting(text: str, encoding: str | None) -> str:
    """The text in characters that ``encoding`` has: signs that are drawn get a plain form, others ``\\uXXXX``."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
        return text
    except LookupError:
        return fitting(text, "ascii")
    except UnicodeEncodeError:
        return text.translate(_PLAIN_SIGNS).encode(encoding, "backslashreplace").decode(encoding)


def printable(text: str) -> str:
    """The text without control characters, line breaks and tabs excepted, which would steer the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)


class LenientText(io.TextIOBase):
    """Writes to a stream in the characters that it has; a stream that is gone raises :class:`StreamLostError`.

    Args:
        stream: to write to; None: standard output at the time of the call.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    @property
    def target(self) -> TextIO | None:
        """The stream, where there is one."""
        return self._stream if self._stream is not None else sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return getattr(self.target, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write the whole text."""
        if self.target is not None:
            try:
                self.target.write(fitting(text, self.encoding))
            except (OSError, ValueError) as error:
                raise StreamLostError(describe(error)) from error
        return len(text)

    def flush(self) -> None:
        """Hand on what the stream holds."""
        if self.target is not None:
            try:
                self.target.flush()
            except (OSError, ValueError) as error:
                raise StreamLostError(describe(error)) from error

    def writable(self) -> bool:
        """Always."""
        return True

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self.target is not None and self.target.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        if self.target is None:
            raise io.UnsupportedOperation("fileno")
        return self.target.fileno()


class StreamLostError(Exception):
    """A stream takes nothing more. No ``OSError``: Rich ends the process at a broken pipe."""


class _Tolerant(io.RawIOBase):
    """A file that drops what cannot be written and counts it.

    Args:
        raw: the file.
        destination: what losses are counted under.
    """

    def __init__(self, raw: io.FileIO, destination: str) -> None:
        self._raw = raw
        self._destination = destination
        self.error: OSError | None = None  # the first one
        self.silent = destination == "log"  # standard error is where the log goes, as a rule

    @property
    def name(self) -> object:
        """As the file has it."""
        return self._raw.name

    @property
    def mode(self) -> str:
        """As the file has it."""
        return self._raw.mode

    def write(self, data: object) -> int:  # type: ignore[override]
        """Write everything, in as many parts as it takes; what cannot be written is lost."""
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = rest.nbytes
        try:
            while rest.nbytes:
                written = self._raw.write(rest)
                if written is None and not self._ready():  # somebody has made the descriptor non-blocking
                    raise OSError(errno.EAGAIN, f"full for {_WAIT_MS // 1000} s")
                rest = rest[written or 0 :]
        except (OSError, ValueError) as error:
            self._lose(error if isinstance(error, OSError) else OSError(errno.EBADF, str(error)))
        return size

    def _ready(self) -> bool:
        poll = select.poll()
        poll.register(self._raw.fileno(), select.POLLOUT)
        return bool(poll.poll(_WAIT_MS))

    def _lose(self, error: OSError) -> None:
        self.error = self.error or error
        if error.errno in _GONE and not self._raw.closed:
            _open_null_at(self._raw.fileno())  # native code and child processes write there too
        where = "standard error" if self._destination == "log" else "standard output"
        BOUNDARY.lose(self._destination, f"{where} takes no more text ({error})", silent=self.silent)

    def fileno(self) -> int:
        """Of the file."""
        return self._raw.fileno()

    def isatty(self) -> bool:
        """Whether a person reads it."""
        try:
            return self._raw.isatty()
        except (OSError, ValueError):
            return False

    def writable(self) -> bool:
        """Always."""
        return True


def _guarded(stream: TextIO, destination: str) -> TextIO:
    if type(stream) is not io.TextIOWrapper:
        return stream
    unbuffered = isinstance(stream.buffer, io.FileIO)  # PYTHONUNBUFFERED
    raw = stream.buffer if unbuffered else getattr(stream.buffer, "raw", None)
    if not isinstance(raw, io.FileIO):
        return stream
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        BOUNDARY.lose(destination, f"a standard stream takes no more text ({describe(error)})", silent=True)
    tolerant = _Tolerant(raw, destination)
    guarded = io.TextIOWrapper(
        cast(IO[bytes], tolerant) if unbuffered else io.BufferedWriter(tolerant),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    _KEPT.append(stream)
    return guarded


#: streams that were replaced: collected as garbage they would close their descriptor
_KEPT: list[TextIO] = []


def _open_descriptor(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        _open_null_at(number)


def _open_null_at(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    else:
        os.set_inheritable(number, True)

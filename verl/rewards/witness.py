"""Names the sample that was scored when the process ended inside a reward function.

A reward function runs in the process of the trainer, unless ``reward.num_workers`` says otherwise. Nothing in that
process can report a call of ``os._exit``, a crash in C code, or an end for want of memory. A second, small process can:
it waits for the end of this one and then writes on standard error which calls had not returned.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from verl.rewards.function import ScoreFunction

logger = logging.getLogger(__name__)

_SLOTS, _SIZE = 64, 512
_LENGTH = struct.Struct("<H")
_SHOWN = 100
_REMEDY = (
    "A reward function must not end the process (os._exit, a crash in C code, too much memory). With "
    "reward.num_workers=2 or more it runs in processes of its own, and an end costs one sample."
)

# The watching process: it waits until this process has ended, then reads the slots. It imports nothing of verl.
_WATCH = f"""
import mmap, os, signal, struct, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
calls = mmap.mmap(int(sys.argv[1]), {_SLOTS * _SIZE})
while os.read(0, 1):
    pass
running = []
for slot in range({_SLOTS}):
    begin = slot * {_SIZE}
    (length,) = struct.unpack_from("<H", calls, begin)
    if length:
        running.append(calls[begin + 2 : begin + 2 + length].decode("utf-8", "replace"))
if running:
    more = f" and {{len(running) - 3}} more" if len(running) > 3 else ""
    words = "verl: error: the process ended while " + ", ".join(running[:3]) + more + ". " + sys.argv[2]
    os.write(2, words.encode("utf-8", "replace") + b"\\n")
"""


class _Watch:
    """The calls in progress of one process, in memory that another one can read."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._lock = threading.Lock()
        with tempfile.TemporaryFile() as file:
            file.truncate(_SLOTS * _SIZE)
            self._calls = mmap.mmap(file.fileno(), _SLOTS * _SIZE)
            # its end of the pipe is closed by the end of this process, whatever ended it
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCH, str(file.fileno()), _REMEDY],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[file.fileno()],
                start_new_session=True,
                cwd="/",
            )
        self._watcher.returncode = 0  # it outlives this process, and is not to be waited for
        atexit.register(self._dismiss)

    def _dismiss(self) -> None:
        """The interpreter ends in order, by a signal for example, so no call in progress is the cause."""
        if os.getpid() == self.owner:
            for slot in range(_SLOTS):
                _LENGTH.pack_into(self._calls, slot * _SIZE, 0)

    def forget(self) -> None:
        """In a fork: leave the pipe to the process that it belongs to."""
        if self._watcher.stdin is not None:
            with contextlib.suppress(OSError):
                self._watcher.stdin.close()

    def enter(self, text: str) -> int | None:
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
        content = text.encode("utf-8", "replace")[: _SIZE - _LENGTH.size]
        begin = slot * _SIZE
        self._calls[begin + _LENGTH.size : begin + _LENGTH.size + len(content)] = content
        _LENGTH.pack_into(self._calls, begin, len(content))
        return slot

    def leave(self, slot: int | None) -> None:
        if slot is not None:
            _LENGTH.pack_into(self._calls, slot * _SIZE, 0)
            with self._lock:
                self._free.append(slot)


_lock = threading.Lock()
_watch: _Watch | None = None
_failed = False


def _after_fork() -> None:
    global _watch, _lock
    _lock = threading.Lock()
    if _watch is not None:
        _watch.forget()
        _watch = None


os.register_at_fork(after_in_child=_after_fork)


def _watched() -> _Watch | None:
    global _watch, _failed
    with _lock:
        if _watch is None and not _failed:
            try:
                _watch = _Watch()
            except OSError as error:  # a run can do without
                logger.debug("no process watches reward functions: %s", error)
                _failed = True
        return _watch


def is_of_user(function: ScoreFunction) -> bool:
    """Whether a reward function is not one of this package."""
    plain: Any = function
    while hasattr(plain, "function"):
        plain = plain.function
    return not (getattr(plain, "__module__", None) or "").startswith("verl.")


@contextlib.contextmanager
def witnessed(function: ScoreFunction, call: Mapping[str, Any], index: int | None = None) -> Iterator[None]:
    """While inside, an end of the process is reported with the function and the sample.

    Args:
        function: of the user; those of this package are not watched.
        call: its arguments.
        index: place of the sample in its batch, where it is known.
    """
    watch = _watched() if is_of_user(function) else None
    if watch is None:
        yield
        return
    slot = watch.enter(f"the reward function {function!r} scored {_sample(call, index)}")
    try:
        yield
    finally:
        watch.leave(slot)


def _sample(call: Mapping[str, Any], index: int | None) -> str:
    if "solution_strs" in call:
        return f"a batch of {len(call['solution_strs'])} samples"
    extra = call.get("extra_info")
    row = extra.get("index") if isinstance(extra, Mapping) else None
    parts = [f"data_source={call.get('data_source')!r}"]
    parts += [f"index {row!r} of the data"] if row is not None else []
    parts.append(f"response {str(call.get('solution_str', ''))[:_SHOWN]!r}")
    return f"{'a sample' if index is None else f'sample {index}'} ({', '.join(parts)})"

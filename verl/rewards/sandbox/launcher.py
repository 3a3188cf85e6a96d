"""The process that keeps programs in their place. One per sandbox; standard library only.

Started with a JSON object on its first input line (``folder``, ``readable``, ``isolation``), it confines itself as far
as the kernel lets it and answers with one line. After that each input line asks for one run, each output line is the
answer; at the end of its input it ends, and with it everything that it started.

With namespaces the processes are::

    launcher ── keeper (own user namespace) ── supervisor (process 1 of its own process namespace) ── program

and without::

    launcher ── supervisor ── program

where the launcher waits for the supervisor's end and then kills what is left below it. The program itself has no
capabilities, no sockets and an empty environment, whatever the means.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from verl.rewards.sandbox.folders import hold, remove_tree
from verl.rewards.sandbox.spec import Isolation
from verl.rewards.sandbox.supervisor import DEVICES, LINUX, Supervisor, kill_descendants
from verl.rewards.sandbox.users import other_user


def _without_namespaces(isolation: Isolation, folder: str, readable: Sequence[str]) -> Supervisor | None:
    user, only_real = None, False
    if LINUX:
        if isolation is Isolation.LANDLOCK:
            _try_landlock(folder, readable)
        user, only_real = other_user([folder, *readable]) if os.geteuid() == 0 else (None, False)
        if not _fork_supervisor():
            return None
    return Supervisor(isolation, folder, readable, user, own_processes=False, only_real=only_real)


def _fork_supervisor() -> bool:
    """Go on in a child process, which gets ``True``; this one waits for its end, kills what it left, gets ``False``."""
    from verl.rewards.sandbox import kernel

    kernel.adopt_orphans()
    launcher = os.getpid()
    supervisor = os.fork()
    if supervisor:
        kernel.hide_memory()
        signal.signal(signal.SIGTERM, lambda *_: os.kill(supervisor, signal.SIGTERM))
        os.waitpid(supervisor, 0)
        kill_descendants()
        return False
    # the supervisor ends in order when the launcher is killed: it takes the program along
    signal.signal(signal.SIGTERM, _end)
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != launcher:
        os._exit(1)
    kernel.adopt_orphans()
    kernel.hide_memory()
    return True


def _end(*_: object) -> None:
    raise SystemExit(1)


def _try_landlock(folder: str, readable: Sequence[str]) -> None:
    """Find out, in a process that ends right away, whether the kernel allows what programs will be confined by."""
    from verl.rewards.sandbox import kernel

    read, write = os.pipe()
    probe = os.fork()
    if probe == 0:
        try:
            kernel.landlock(readable, [folder], DEVICES)
            kernel.filter_system_calls()
        except BaseException as error:  # noqa: BLE001  the launcher has to know, whatever it was
            os.write(write, str(error).encode() or b"?")
        os._exit(0)
    os.close(write)
    os.waitpid(probe, 0)
    message = os.read(read, 65536).decode()
    os.close(read)
    if message:
        raise OSError(message)


def _enter(isolation: Isolation, folder: str, readable: Sequence[str]) -> Supervisor | None:
    if isolation is Isolation.GUARD:
        return _without_namespaces(isolation, folder, readable)
    if not LINUX:
        raise OSError(f"{sys.platform} has no {isolation}")
    if isolation is Isolation.NAMESPACES:
        from verl.rewards.sandbox.namespaces import enter_namespaces

        return enter_namespaces(folder, readable)
    return _without_namespaces(isolation, folder, readable)


def main() -> None:
    """Read the set-up, confine, and serve."""
    launcher = os.getpid()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    for number in (0, 1):
        os.set_inheritable(number, False)
    setup = json.loads(source.readline())
    os.chmod(setup["folder"], 0o711)  # programs of another user pass through it to their own folder
    hold(setup["folder"])
    try:
        _serve(setup, source, sink)
    finally:
        if os.getpid() == launcher:  # the controller does it too, unless it was killed
            remove_tree(setup["folder"])


def _serve(setup: dict[str, Any], source: Any, sink: Any) -> None:
    reasons = {}
    for name in setup["isolation"]:
        try:
            supervisor = _enter(Isolation(name), setup["folder"], setup["readable"])
        except OSError as error:
            reasons[name] = str(error)
            continue
        if supervisor is None:
            return
        _answer(sink, {"isolation": name, "reasons": reasons})
        break
    else:
        _answer(sink, {"isolation": None, "reasons": reasons})
        return
    for line in source:
        try:
            reply: dict[str, Any] = {"result": vars(supervisor.run(json.loads(line)))}
        except Exception:  # noqa: BLE001  the other side has to know, whatever it was
            reply = {"failure": traceback.format_exc()}
        _answer(sink, reply)


def _answer(sink: Any, reply: dict[str, Any]) -> None:
    sink.write(json.dumps(reply).encode() + b"\n")

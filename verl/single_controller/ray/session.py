"""Starting Ray: a cluster of its own for the run, or one that is named.

What Ray would report late or in words of its own is checked before: paths, shared memory, and whether a named cluster
answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from verl.errors import ConfigError, WorkerError
from verl.utils.fs import format_bytes, free_bytes
from verl.utils.owned import Owner, processes_of
from verl.utils.owned_dirs import make_short_dir

logger = logging.getLogger(__name__)

#: how long a named cluster may take to answer
ANSWER_S = 5.0
_KEY = "ray_kwargs.ray_init"
#: longest path of a Unix socket, without its end mark
_SOCKET_LIMIT = 107
#: what Ray appends to its folder for its longest socket
_SOCKET = "/verl-ray-xxx/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_LEAST_STORE = 80 << 20
_ATTEMPTS = 3
#: when somebody who waits is told why
_TELL_AFTER_S = 15.0


@contextlib.contextmanager
def ray_cluster(settings: Mapping[str, Any]) -> Iterator[None]:
    """Ray within a block; a Ray that runs in this process already is used and left running.

    Without an address a cluster of its own starts on this machine and ends with the block, with its files. Another
    cluster is joined only where ``address`` or the variable ``RAY_ADDRESS`` names it; ``auto`` is the running one.

    Args:
        settings: keyword arguments of ``ray.init``.

    Raises:
        ConfigError: the named cluster does not answer, or Ray cannot start with this environment.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    folder = None
    try:
        folder = start_ray(**settings)
        yield
    finally:
        with _quiet():
            ray.shutdown()
        if folder is not None:
            _end_processes(folder)
            _remove(folder)


def start_ray(**settings: Any) -> Path | None:
    """``ray.init``; returns the folder of a cluster that it started, to be removed after ``ray.shutdown``.

    Args:
        settings: arguments of ``ray.init``.

    Raises:
        ConfigError: see :func:`ray_cluster`.
    """
    address, source = settings.get("address"), f"{_KEY}.address"
    if not address and os.environ.get("RAY_ADDRESS"):
        address, source = os.environ["RAY_ADDRESS"], "environment variable RAY_ADDRESS"
    if address and address != "local":
        _join(str(address), source, settings)
        return None
    return _start_own(settings)


def _join(address: str, source: str, settings: Mapping[str, Any]) -> None:
    """Connect to a running cluster."""
    where = f"{source}={address!r}"
    if address != "auto":
        _require_answer(address, where)
    logger.info("joining the Ray cluster of %s", where)
    try:
        ray.init(**{**settings, "address": address})
    except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as error:
        what = "no running Ray cluster was found" if address == "auto" else "cannot join the Ray cluster"
        raise ConfigError(
            f"{where}: {what}: {_first_line(error)}; start one with ray start --head, or leave the address out to "
            "start a local one"
        ) from error
    logger.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)


def _require_answer(address: str, where: str) -> None:
    """Raise unless something listens at ``host:port``; other forms are left to Ray."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not port.isdecimal():
        if "://" in address:
            return
        raise ConfigError(f"{where}: give HOST:PORT of the cluster, ray://HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{where}: no Ray cluster answers there ({_first_line(error)}); start it, correct the address, or leave "
            "it out to start a local one"
        ) from error


def _start_own(settings: Mapping[str, Any]) -> Path | None:
    """Start a cluster on this machine that belongs to this process."""
    given = settings.get("_temp_dir")
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), None)
    base = Path(str(given) if given else os.environ[variable] if variable else "/tmp")
    where = f"{_KEY}._temp_dir" if given else f"environment variable {variable}" if variable else "folder"
    folder = None
    if not given:
        _check_base(base, where)
        _tell_of_shared_memory(settings)
        folder = make_short_dir(base)
    arguments = {**settings, "address": "local", **({} if folder is None else {"_temp_dir": str(folder)})}
    started = time.monotonic()
    late = threading.Timer(_TELL_AFTER_S, _tell_of_late_start)
    late.daemon = True
    late.start()
    try:
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                ray.init(**arguments)
                break
            except Exception as error:  # Ray raises a plain Exception there
                if "timed out during startup" not in str(error) or not attempts_left:
                    raise
                # Ray waits half a minute for its processes, which is too short on a machine that is busy
                logger.warning("Ray did not come up in time; trying once more")
                ray.shutdown()
    except BaseException as error:
        with _quiet():
            ray.shutdown()
        if folder is not None:
            _remove(folder)
        if isinstance(error, OSError):
            name = f" {error.filename!r}" if error.filename else ""
            raise ConfigError(
                f"Ray cannot start: {_first_line(error)}{'' if name.strip() in str(error) else name} ({where} is "
                f"{str(base)!r}, HOME is {os.environ.get('HOME')!r}; Ray writes there and in /dev/shm)"
            ) from error
        if isinstance(error, ValueError | TypeError | RuntimeError | AssertionError):
            raise ConfigError(f"Ray cannot start with {_KEY}={dict(settings)!r}: {_first_line(error)}") from error
        if isinstance(error, Exception):
            raise WorkerError("ray", 0, "init", f"Ray did not start: {_first_line(error)}") from error
        raise
    finally:
        late.cancel()
    logger.info("started a local Ray cluster in %.1f s", time.monotonic() - started)
    return folder


def _tell_of_late_start() -> None:
    """Say what is waited for, and for how long at most."""
    load = f"{os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else "unknown"
    logger.warning(
        "Ray has not come up in %.0f s (load of the machine: %s, CPUs: %s); it is tried for at most %d s",
        _TELL_AFTER_S,
        load,
        os.cpu_count(),
        30 * _ATTEMPTS,
    )


def _check_base(base: Path, where: str) -> None:
    """Raise unless Ray can keep its sockets and files below ``base``."""
    length = len(str(base.absolute())) + len(_SOCKET)
    if length > _SOCKET_LIMIT:
        raise ConfigError(
            f"{where}={str(base)!r} is too long for Ray: the paths of its sockets would have {length} bytes, the "
            f"system allows {_SOCKET_LIMIT}; set RAY_TMPDIR to a directory of at most "
            f"{_SOCKET_LIMIT - len(_SOCKET)} characters, for example /tmp"
        )
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{where}={str(base)!r}: Ray cannot keep its files there, it is no directory that this user may write; "
            "set RAY_TMPDIR to one"
        )


def _tell_of_shared_memory(settings: Mapping[str, Any]) -> None:
    """Warn where Ray's object store does not fit, which Ray then keeps in files."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or settings.get("_plasma_directory"):
        return
    free, wanted = free_bytes(shared), settings.get("object_store_memory")
    needed = _LEAST_STORE if wanted is None else int(wanted)
    if free < needed:
        logger.warning(
            "/dev/shm has %s free and Ray's object store needs %s%s: it is kept in files, which is slow; make /dev/shm "
            "larger (in a container --shm-size=2g), free it, or set a smaller %s.object_store_memory",
            format_bytes(free),
            format_bytes(needed),
            "" if wanted is None else f" ({_KEY}.object_store_memory)",
            _KEY,
        )


def _end_processes(folder: Path) -> None:
    """End Ray's own processes that are still there: a raylet without its store waits for that for a minute."""
    for pid in processes_of(str(Owner.current())):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command.startswith(b"ray::") or f"{folder}/session".encode() in command:
                os.kill(pid, signal.SIGKILL)


def _remove(folder: Path) -> None:
    """Remove Ray's folder; its processes may write for a moment after their end was asked for."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Errors of a shutdown hide no other error."""
    with contextlib.suppress(Exception):
        yield


def _first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, or its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)

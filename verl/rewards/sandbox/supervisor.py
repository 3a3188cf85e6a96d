"""Runs one program after the other, watches its limits, and stops what it leaves behind. Standard library only."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from verl.rewards.sandbox.spec import Isolation, Limits, ProgramResult, Status
from verl.rewards.sandbox.users import become

LINUX = sys.platform == "linux"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_POLL_S = 0.02
_MIB = 1 << 20


class Supervisor:
    """Runs one program after the other in a fresh folder and stops whatever they leave behind.

    Args:
        isolation: the means.
        folder: the host's directory for the program's files; with namespaces a mount point for it.
        user: user id that programs run under; ``None`` = this process's.
        only_real: it is their real user id, by which the kernel counts processes; files they open as this process.
        own_processes: every process that this one can see belongs to the program.
    """

    def __init__(
        self,
        isolation: Isolation,
        folder: str,
        readable: Sequence[str],
        user: int | None,
        *,
        own_processes: bool,
        only_real: bool = False,
    ) -> None:
        self.isolation = isolation
        self.folder = folder
        self.readable = readable
        self.user = user
        self.own_processes = own_processes
        self.only_real = only_real

    def run(self, request: dict[str, Any]) -> ProgramResult:
        """Run ``argv`` once; files named in ``files`` are there, and ``stdin`` is its input."""
        limits = Limits(**request["limits"])
        if not request["keep"]:
            self._fresh_folder(limits)
        self._write(request["files"])
        with tempfile.TemporaryFile(dir=self.folder) as source:
            source.write(request["stdin"].encode())
            source.seek(0)
            return self._run(request["argv"], source.fileno(), limits)

    def _fresh_folder(self, limits: Limits) -> None:
        if self.isolation is Isolation.NAMESPACES:
            from verl.rewards.sandbox import kernel

            with suppress(OSError):
                kernel.umount(self.folder)
            options = f"size={limits.folder_mb}m,nr_inodes=4096,mode=0700"
            owner = "" if self.user is None else f",uid={self.user},gid={self.user}"
            flags = kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("files", self.folder, "tmpfs", flags, options + owner)
        else:
            for entry in os.scandir(self.folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)

    def _write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = Path(self.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if self.user is not None and not self.only_real:
                os.chown(path, self.user, self.user)

    def _run(self, argv: Sequence[str], source: int, limits: Limits) -> ProgramResult:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        budget = limits.processes + (0 if self.own_processes else _tasks_of_user(self.user))
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            self._become_program(argv, source, out_write, err_write, limits, budget)
        os.close(out_write)
        os.close(err_write)
        watch = _Watch(child, {out_read: bytearray(), err_read: bytearray()}, limits, started)
        try:
            stopped = watch.wait(self._resident)
        finally:
            self._kill_all(child)
        exit_code, used = watch.reap()
        wall = time.monotonic() - started
        stdout, stderr = (bytes(data).decode(errors="replace") for data in watch.drain(stopped is None))
        status = stopped or _status(exit_code, stderr, used, limits)
        gone = status in (Status.TIMEOUT, Status.OUTPUT) or (status is Status.MEMORY and stopped is not None)
        return ProgramResult(status, None if gone else exit_code, stdout, stderr, wall, used)

    def _become_program(
        self, argv: Sequence[str], source: int, out: int, err: int, limits: Limits, budget: int
    ) -> NoReturn:
        try:
            os.setsid()
            os.dup2(source, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.closerange(3, 4096)
            os.chdir(self.folder)
            os.umask(0o077)
            with suppress(OSError):
                os.nice(10)
            _limit(limits, budget)
            self._confine()
            home = self.folder
            environment = {
                "HOME": home,
                "TMPDIR": home,
                "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            }
            if self.isolation is Isolation.GUARD:
                guard = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")
                argv = [argv[0], "-I", guard, home, *argv[argv.index("-I") + 1 :]]
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs inherit that
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(argv[0], list(argv), environment)
        except BaseException:  # noqa: BLE001  this process must not go on as a second supervisor
            with suppress(OSError):
                os.write(2, traceback.format_exc().encode())
        os._exit(126)

    def _confine(self) -> None:
        if not LINUX:
            return
        from verl.rewards.sandbox import kernel

        if self.user is not None:
            become(self.user, only_real=self.only_real)
        if self.isolation is Isolation.NAMESPACES:
            kernel.drop_capabilities()
            kernel.forbid_new_privileges()
            with suppress(OSError):  # a second lock; the namespaces hold by themselves
                kernel.filter_system_calls()
        elif self.isolation is Isolation.LANDLOCK:
            kernel.drop_capabilities()
            kernel.landlock([*self.readable, "/proc/self"], [self.folder], DEVICES)
            alone = kernel.landlock_version() >= 6 or self.user is not None
            kernel.filter_system_calls(only_signal=None if alone else os.getpid())
        else:
            with suppress(OSError):
                kernel.drop_capabilities()
            with suppress(OSError):
                kernel.filter_system_calls(only_signal=os.getpid() if self.user is None else None)

    def _resident(self, child: int) -> int:
        """Bytes of memory that the program's processes occupy."""
        total = 0
        for pid in self._processes(child):
            with suppress(OSError, ValueError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return total * resource.getpagesize()

    def _processes(self, child: int) -> Iterator[int]:
        if not os.path.isdir("/proc/self"):
            return
        me = os.getpid()
        if self.own_processes:
            yield from (pid for pid in map(_number, os.listdir("/proc")) if pid and pid != me)
            return
        parents: dict[int, int] = {}
        for pid in map(_number, os.listdir("/proc")):
            with suppress(OSError, ValueError, IndexError):
                if pid:
                    parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ours = {me}
        while True:
            more = {pid for pid, parent in parents.items() if parent in ours and pid not in ours}
            if not more:
                break
            ours |= more
        yield from ours - {me}

    def _kill_all(self, child: int) -> None:
        """Kill every process of the program, those that left its group and session too."""
        if self.own_processes:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if self.user is not None:
            self._as_user(lambda: os.kill(-1, signal.SIGKILL))
        for _ in range(1000):  # what is born while the list is read is on the next list; their number is limited
            left = list(self._processes(child))
            living = [pid for pid in left if not _is_zombie(pid)]
            if not living:
                return
            for pid in living:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _as_user(self, action: Callable[[], None]) -> None:
        helper = os.fork()
        if helper == 0:
            with suppress(BaseException):
                assert self.user is not None
                become(self.user)
                action()
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(helper, 0)


class _Watch:
    """Follows one program until it ends or breaks a limit."""

    def __init__(self, child: int, streams: dict[int, bytearray], limits: Limits, started: float) -> None:
        self.child, self.streams, self.limits, self.started = child, streams, limits, started
        self.exit: tuple[int, float] | None = None
        for stream in streams:
            os.set_blocking(stream, False)

    def wait(self, resident: Callable[[int], int]) -> Status | None:
        """``None`` when the program ended by itself, else which limit it broke."""
        next_look = self.started + _POLL_S
        while not self._ended():
            self._read(_POLL_S / 4 if time.monotonic() - self.started < _POLL_S else _POLL_S)
            now = time.monotonic()
            if now - self.started > self.limits.wall_s:
                return Status.TIMEOUT
            if sum(map(len, self.streams.values())) > self.limits.output_kb * 1024:
                return Status.OUTPUT
            if now >= next_look:
                if resident(self.child) > self.limits.memory_mb * _MIB:
                    return Status.MEMORY
                next_look = time.monotonic() + _POLL_S
        return None

    def _ended(self) -> bool:
        if self.exit is None:
            pid, status, usage = os.wait4(self.child, os.WNOHANG)
            if pid:
                self.exit = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        return self.exit is not None

    def _read(self, seconds: float) -> None:
        if not self.streams:
            time.sleep(seconds)
            return
        open_streams = [stream for stream in self.streams if stream >= 0]
        ready, _, _ = select.select(open_streams, [], [], seconds)
        if len(ready) == len(open_streams) and all(self._take(stream) for stream in ready):
            time.sleep(seconds)  # both closed: nothing to wait on but the end
            return
        for stream in ready:
            self._take(stream)

    def _take(self, stream: int) -> bool:
        """Read what is there; whether the stream is at its end."""
        try:
            data = os.read(stream, 65536)
        except BlockingIOError:
            return False
        self.streams[stream] += data
        return not data

    def reap(self) -> tuple[int, float]:
        """Exit code and CPU seconds, after everything was killed; takes the other dead processes along."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                break
            if pid == self.child:
                self.exit = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        return self.exit or (-signal.SIGKILL, 0.0)

    def drain(self, complete: bool) -> list[bytearray]:
        """What the program wrote, cut at the limit."""
        cut = self.limits.output_kb * 1024
        for stream, data in self.streams.items():
            with suppress(BlockingIOError):
                while complete and len(data) <= cut and (more := os.read(stream, 65536)):
                    data += more
            os.close(stream)
        return [data[:cut] for data in self.streams.values()]


def _status(exit_code: int, stderr: str, cpu_s: float, limits: Limits) -> Status:
    if exit_code == 0:
        return Status.OK
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= limits.cpu_s):
        return Status.TIMEOUT
    tail = stderr[-2000:]
    if "MemoryError" in tail or "std::bad_alloc" in tail or "Cannot allocate memory" in tail:
        return Status.MEMORY
    return Status.ERROR


def _limit(limits: Limits, processes: int) -> None:
    seconds = max(1, round(limits.cpu_s + 0.499))
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, limits.file_mb * _MIB, limits.file_mb * _MIB),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_AS, limits.memory_mb * _MIB, limits.memory_mb * _MIB),
        (resource.RLIMIT_NPROC, processes, processes),
    ):
        with suppress(ValueError, OSError):  # a hard limit below ours stays; macOS has no limit of address space
            resource.setrlimit(kind, (soft, hard))


def _tasks_of_user(user: int | None) -> int:
    """Threads that a user has already: the kernel counts them all."""
    who = os.getuid() if user is None else user
    total = 0
    with suppress(OSError):
        for entry in os.scandir("/proc"):
            with suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == who:
                    total += len(os.listdir(f"/proc/{entry.name}/task"))
    return total


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True

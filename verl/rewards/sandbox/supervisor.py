"""Runs one program after the other, watches its limits, and stops what it leaves behind. Standard library only."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from verl.rewards.sandbox.folders import read_regular, remove_tree, usage
from verl.rewards.sandbox.spec import Isolation, Limits, ProgramResult, Status
from verl.rewards.sandbox.users import become

LINUX = sys.platform == "linux"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_POLL_S = 0.02
_START_LIMIT_S = 15.0
_MIB = 1 << 20
_ALL_SEALS = 0b1111  # no more seals, no shrinking, growing, writing
_NOT_EXECUTED = "not executed"
# the most that the kernel lets a program put into one of its sockets and pipes that nothing reads
_SOCKET_BYTES, _PIPE_BYTES = 425_984, 65_536


class SandboxFailure(Exception):
    """The sandbox, not the program, failed: nothing is known about the program."""


class Supervisor:
    """Runs one program after the other, each in a folder of its own, and stops whatever they leave behind.

    Args:
        isolation: the means.
        base: the directory in which programs' folders are made; with namespaces the mount point of each.
        readable: what programs may read besides.
        user: user id that programs run under; ``None`` = this process's.
        own_processes: every process that this one can see belongs to the program.
        only_real: it is their real user id, by which the kernel counts processes; files they open as this process.
    """

    def __init__(
        self,
        isolation: Isolation,
        base: str,
        readable: Sequence[str],
        user: int | None,
        *,
        own_processes: bool,
        only_real: bool = False,
    ) -> None:
        self.isolation = isolation
        self.base = base
        self.folder = base
        self.readable = readable
        self.user = user
        self.own_processes = own_processes
        self.only_real = only_real
        self._kept: dict[str, bytes] = {}
        self._runs = 0

    def run(self, request: dict[str, Any]) -> ProgramResult:
        """Run ``argv`` once in a new folder.

        ``files`` are there, and with ``use_kept`` those that the last run with ``keep`` left; ``stdin`` is its input.

        Raises:
            SandboxFailure: the program could not be started or stopped, for no reason of its own.
            OSError: likewise.
        """
        limits = Limits(**request["limits"])
        self._make_folder(limits)
        try:
            files = {name: text.encode(errors="surrogatepass") for name, text in request["files"].items()}
            self._write({**(self._kept if request["use_kept"] else {}), **files})
            with self._input(request["stdin"].encode(errors="surrogatepass")) as source:
                result = self._run(request["argv"], source.fileno(), limits)
            if request["keep"]:
                found = {name: read_regular(self.folder, name, limits.file_mb * _MIB) for name in request["keep"]}
                self._kept = {name: data for name, data in found.items() if data is not None}
            return result
        finally:
            self._remove_folder()

    def _make_folder(self, limits: Limits) -> None:
        if self.isolation is Isolation.NAMESPACES:
            from verl.rewards.sandbox import kernel

            options = f"size={limits.folder_mb}m,nr_inodes={limits.files},mode=0700"
            kernel.mount("files", self.base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
            return
        self._runs += 1
        self.folder = os.path.join(self.base, f"run-{self._runs}")
        os.mkdir(self.folder, 0o700)
        if self.user is not None and not self.only_real:
            os.chown(self.folder, self.user, self.user)

    def _remove_folder(self) -> None:
        if self.isolation is Isolation.NAMESPACES:
            from verl.rewards.sandbox import kernel

            kernel.umount(self.base)
        else:
            # the next program gets another one, so that a folder that resists spoils nothing; the launcher tries again
            remove_tree(self.folder)

    def _write(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            path = Path(self.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o700)
            if self.user is not None and not self.only_real:
                os.chown(path, self.user, self.user)

    def _input(self, data: bytes) -> IO[bytes]:
        """A file that no folder has, with the program's input; it cannot grow."""
        if not LINUX:
            source: IO[bytes] = tempfile.TemporaryFile(dir=self.base)  # noqa: SIM115  the caller closes it
            source.write(data)
            source.seek(0)
            return source
        handle = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        source = os.fdopen(handle, "r+b")
        source.write(data)
        source.seek(0)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _ALL_SEALS)
        return source

    def _run(self, argv: Sequence[str], source: int, limits: Limits) -> ProgramResult:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        told_read, told_write = os.pipe()
        budget = limits.processes + (0 if self.own_processes else _tasks_of_user(self.user))
        killed_before = _killed_for_memory()
        held = _Held(self, limits, os.fstat(source))
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            self._become_program(argv, source, (out_write, err_write, told_write), limits, budget)
        for end in (out_write, err_write, told_write):
            os.close(end)
        watch = _Watch(child, {out_read: bytearray(), err_read: bytearray()}, limits, started)
        stopped = None
        try:
            problem = _told(told_read)
            if not problem:
                stopped = watch.wait(held.broken)
        finally:
            os.close(told_read)
            self._kill_all(child)
        exit_code, used = watch.reap()
        wall = time.monotonic() - started
        stdout, stderr = (bytes(data).decode(errors="replace") for data in watch.drain(stopped is None))
        if problem:
            if argv[0].startswith("./") and problem.startswith(_NOT_EXECUTED):  # a file that a program made
                return ProgramResult(Status.ERROR, 126, "", problem, wall, used)
            raise SandboxFailure(f"the program could not be started: {problem}")
        if exit_code == -signal.SIGKILL and stopped is None and _killed_for_memory() != killed_before:
            raise SandboxFailure("the machine ran out of memory, and the kernel killed the program")
        status = stopped or held.broken_files() or _status(exit_code, stderr, used, limits)
        gone = status in (Status.TIMEOUT, Status.OUTPUT) or (status is Status.MEMORY and stopped is not None)
        return ProgramResult(status, None if gone else exit_code, stdout, stderr, wall, used)

    def _become_program(
        self, argv: Sequence[str], source: int, ends: tuple[int, int, int], limits: Limits, budget: int
    ) -> NoReturn:
        step = "set-up"
        told = ends[2]
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            copies = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (source, *ends)]
            for number, copy in enumerate(copies[:3]):
                os.dup2(copy, number)
            os.dup2(copies[3], 3, inheritable=False)
            told = 3
            os.closerange(4, max(4096, copies[3] + 1))
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
            step = _NOT_EXECUTED
            os.execvpe(argv[0], list(argv), environment)
        except BaseException as error:  # noqa: BLE001  this process must not go on as a second supervisor
            with suppress(OSError):
                os.write(told, f"{step}: {type(error).__name__}: {error}".encode(errors="replace")[:4096])
        os._exit(126)

    @property
    def shared(self) -> bool:
        """Whether programs have an owner in common with other files and processes of the machine."""
        return not self.own_processes and (self.user is None or self.only_real)

    def _confine(self) -> None:
        if not LINUX:
            return
        from verl.rewards.sandbox import kernel

        parent = os.getppid()
        if self.user is not None:
            become(self.user, only_real=self.only_real)
        kernel.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        if self.isolation is Isolation.NAMESPACES:
            kernel.drop_capabilities()
            kernel.forbid_new_privileges()
            with suppress(OSError):  # a second lock; the namespaces hold by themselves
                kernel.filter_system_calls()
        elif self.isolation is Isolation.LANDLOCK:
            kernel.drop_capabilities()
            kernel.landlock([*self.readable, "/proc/self"], [self.folder], DEVICES)
            alone = kernel.landlock_version() >= 6 or not self.shared
            kernel.filter_system_calls(only_signal=None if alone else os.getpid(), shared=self.shared)
        else:
            with suppress(OSError):
                kernel.drop_capabilities()
            with suppress(OSError):
                only_signal = os.getpid() if self.shared else None
                kernel.filter_system_calls(only_signal=only_signal, shared=self.shared, nodes=False)

    def processes(self) -> Iterator[int]:
        """Ids of the program's processes."""
        yield from self._processes()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """With the rights that show a program's open files: those of its user, where there is one."""
        if self.user is None or self.only_real or self.own_processes:
            yield
            return
        from verl.rewards.sandbox import kernel

        kernel.look_as(self.user)
        try:
            yield
        finally:
            kernel.look_as(0)

    def _processes(self) -> Iterator[int]:
        if not os.path.isdir("/proc/self"):
            return
        me = os.getpid()
        if self.own_processes:
            yield from (pid for pid in map(_number, os.listdir("/proc")) if pid and pid != me)
            return
        yield from descendants()

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
        if not kill_descendants(self._processes):
            raise SandboxFailure("processes of the program cannot be killed")

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


class _Held:
    """What a program holds of memory and disk beyond what the kernel's limits of a process count."""

    def __init__(self, supervisor: Supervisor, limits: Limits, source: os.stat_result) -> None:
        self.supervisor, self.limits = supervisor, limits
        self.source = (source.st_dev, source.st_ino)

    def broken(self) -> tuple[Status | None, float]:
        """Which limit the program broke, and in how many seconds to look again."""
        started = time.monotonic()
        status = None
        if os.path.isdir("/proc/self"):
            memory, unlinked = self._of_processes()
            status = self.broken_files(unlinked)
            if self.supervisor.isolation is Isolation.NAMESPACES:
                memory += _used(self.supervisor.folder)
            if memory > self.limits.memory_mb * _MIB:
                status = Status.MEMORY
        return status, max(_POLL_S, 4 * (time.monotonic() - started))

    def broken_files(self, unlinked: int = 0) -> Status | None:
        """Whether the program's files are too large or too many; the kernel sees to it with namespaces."""
        if self.supervisor.isolation is Isolation.NAMESPACES:
            return None
        size, count = usage(self.supervisor.folder, self.limits.files)
        return Status.OUTPUT if size + unlinked > self.limits.folder_mb * _MIB or count > self.limits.files else None

    def _of_processes(self) -> tuple[int, int]:
        """Bytes of memory, and of files that have no name any more."""
        memory = 0
        unlinked: dict[tuple[int, int], int] = {}
        queues: dict[tuple[int, int], int] = {}  # memory that several processes may hold together
        for pid in self.supervisor.processes():
            with suppress(OSError, ValueError, IndexError):
                memory += _memory_of(pid, shared=self.supervisor.isolation is Isolation.GUARD)
            with suppress(OSError), self.supervisor.looking():
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        info = os.stat(entry.path)
                        key = (info.st_dev, info.st_ino)
                        if stat.S_ISSOCK(info.st_mode):
                            queues[key] = _SOCKET_BYTES
                        elif stat.S_ISFIFO(info.st_mode):
                            queues[key] = _PIPE_BYTES
                        elif stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and key != self.source:
                            unlinked[key] = max(unlinked.get(key, 0), info.st_blocks * 512)
                for key, size, anonymous in _unlinked_maps(pid):
                    of = queues if anonymous else unlinked
                    of[key] = max(of.get(key, 0), size)
        return memory + sum(queues.values()), sum(unlinked.values())


class _Watch:
    """Follows one program until it ends or breaks a limit."""

    def __init__(self, child: int, streams: dict[int, bytearray], limits: Limits, started: float) -> None:
        self.child, self.streams, self.limits, self.started = child, streams, limits, started
        self.exit: tuple[int, float] | None = None
        for stream in streams:
            os.set_blocking(stream, False)

    def wait(self, broken: Callable[[], tuple[Status | None, float]]) -> Status | None:
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
                status, wait_s = broken()
                if status is not None:
                    return status
                next_look = time.monotonic() + wait_s
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


def _told(stream: int) -> str:
    """Why the program could not be started; empty once it has been."""
    data = b""
    deadline = time.monotonic() + _START_LIMIT_S
    while True:
        if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return f"nothing within {_START_LIMIT_S:g} s"
        piece = os.read(stream, 4096)
        if not piece:
            return data.decode(errors="replace")
        data += piece


def _killed_for_memory() -> int:
    """How many processes the kernel has killed on this machine because memory ran out."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _memory_of(pid: int, shared: bool) -> int:
    """Bytes of a process in memory and in swap, page tables included; shared memory if asked for."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith(("VmSwap:", "VmPTE:", "RssAnon:", "RssFile:")) or (shared and line.startswith("RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


def _unlinked_maps(pid: int) -> Iterator[tuple[tuple[int, int], int, bool]]:
    """Files without a name that a process has mapped, how much of them, and whether they are shared memory."""
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        if line.endswith("(deleted)"):
            addresses, _, _, device, inode, *_ = line.split(maxsplit=5)
            if int(inode):
                begin, end = (int(part, 16) for part in addresses.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                yield (os.makedev(major, minor), int(inode)), end - begin, line.endswith("/dev/zero (deleted)")


def _used(folder: str) -> int:
    """Bytes in use of the file system that is mounted at a folder."""
    with suppress(OSError):
        info = os.statvfs(folder)
        return (info.f_blocks - info.f_bfree) * info.f_frsize
    return 0


def descendants() -> Iterator[int]:
    """Ids of the processes below this one."""
    parents: dict[int, int] = {}
    for pid in map(_number, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError):
            if pid:
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    me = os.getpid()
    ours = {me}
    while True:
        more = {pid for pid, parent in parents.items() if parent in ours and pid not in ours}
        if not more:
            break
        ours |= more
    yield from ours - {me}


def kill_descendants(processes: Callable[[], Iterable[int]] = descendants) -> bool:
    """Kill processes until none is left; whether that succeeded."""
    for attempt in range(1000):  # what is born while the list is read is on the next list; their number is limited
        living = [pid for pid in processes() if not _is_zombie(pid)]
        if not living:
            return True
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if attempt > 100:
            time.sleep(0.005)
    return False


def _status(exit_code: int, stderr: str, cpu_s: float, limits: Limits) -> Status:
    if exit_code == 0:
        return Status.OK
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= limits.cpu_s):
        return Status.TIMEOUT
    tail = stderr[-2000:]
    if "MemoryError" in tail or "std::bad_alloc" in tail or "Cannot allocate memory" in tail:
        return Status.MEMORY
    return Status.ERROR


# message queues outlive processes, and queued signals hold memory of the kernel; Linux only
_QUEUES = [
    (getattr(resource, name), value)
    for name, value in (("RLIMIT_MSGQUEUE", 0), ("RLIMIT_SIGPENDING", 1024))
    if hasattr(resource, name)
]


def _limit(limits: Limits, processes: int) -> None:
    seconds = max(1, round(limits.cpu_s + 0.499))
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, limits.file_mb * _MIB, limits.file_mb * _MIB),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_AS, limits.memory_mb * _MIB, limits.memory_mb * _MIB),
        (resource.RLIMIT_NPROC, processes, processes),
        *((kind, value, value) for kind, value in _QUEUES),
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

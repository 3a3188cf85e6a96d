"""What a sandbox is asked and what it answers. Standard library only: the launcher process imports this too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WORK_DIR = "/sandbox"
"""The program's folder as it sees it, where namespaces hide the rest of the file system."""


class Status(StrEnum):
    """How a program ended.

    Attributes:
        OK: exit code 0.
        ERROR: another exit code, or a signal.
        TIMEOUT: stopped at its CPU or wall-clock limit.
        MEMORY: stopped at its memory limit, or it could not get memory and gave up.
        OUTPUT: stopped because it wrote too much to its standard streams or its folder.
    """

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"


class Isolation(StrEnum):
    """By what means a program is kept in its place, strongest first; ``docs/rewards.md`` says what each guarantees."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    GUARD = "guard"


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use.

    Attributes:
        cpu_s: CPU seconds of each of its processes.
        wall_s: seconds from start to end.
        memory_mb: address space of each process, and memory of all together, in MiB.
        file_mb: size of a file, in MiB.
        folder_mb: size of all its files, those without a name included, in MiB.
        files: number of files and folders in its folder.
        processes: processes and threads at the same time.
        output_kb: standard output and error together, in KiB.
        open_files: open files of a process.
    """

    cpu_s: float = 10.0
    wall_s: float = 20.0
    memory_mb: int = 1024
    file_mb: int = 16
    folder_mb: int = 64
    files: int = 4096
    processes: int = 32
    output_kb: int = 1024
    open_files: int = 128


@dataclass(frozen=True)
class ProgramResult:
    """The end of one run.

    Attributes:
        status: how it ended.
        exit_code: the exit code; minus the signal's number if one ended it; ``None`` if it was stopped.
        stdout: standard output, at most ``Limits.output_kb``.
        stderr: standard error, likewise.
        wall_s: seconds it took.
        cpu_s: CPU seconds it took.
    """

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.status is Status.OK

"""What the Linux kernel offers to confine a process, called through the C library. Standard library only.

Every function raises ``OSError`` where the kernel, or a policy around it, refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_MACHINE = platform.machine()

# namespaces, as in sched.h
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_ANY_NAMESPACE = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

# mounts, as in mount.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_FROM_EMPTY_PATH = 1, 4

# prctl
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _SECUREBITS, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 24, 28, 36, 38
_LAST_CAP = 63

# the numbers of system calls that came after 2019 are the same on all machines
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _MOUNT_SETATTR = 428, 429, 435, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_NEW_CALLS = {
    "io_uring_setup": 425, "fsopen": 430, "pidfd_send_signal": 424, "pidfd_getfd": 438, "memfd_secret": 447,
    "process_madvise": 440, "process_mrelease": 448, "openat2": 437, "fchmodat2": 452, "setxattrat": 463,
    "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip
_CALLS = {
    "x86_64": {
        "pivot_root": 155, "capset": 126, "socket": 41, "clone": 56, "kill": 62, "tkill": 200, "tgkill": 234,
        "ptrace": 101, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248,
        "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "process_vm_writev": 311,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "prlimit64": 302, "shmget": 29, "semget": 64, "msgget": 68,
        "setuid": 105, "setreuid": 113, "setresuid": 117, "setfsuid": 122, "memfd_create": 319, "vmsplice": 278,
        "splice": 275, "tee": 276, "sendmsg": 46, "sendmmsg": 307, "mq_open": 240, "fcntl": 72, "prctl": 157,
        "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
        "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279, "truncate": 76, "open": 2,
        "openat": 257, "mknod": 133, "mknodat": 259, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92,
        "fchown": 93, "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199,
    },
    "aarch64": {
        "pivot_root": 41, "capset": 91, "socket": 198, "clone": 220, "kill": 129, "tkill": 130, "tgkill": 131,
        "ptrace": 117, "mount": 40, "umount2": 39, "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217,
        "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "process_vm_writev": 271,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "prlimit64": 261, "shmget": 194, "semget": 190, "msgget": 186,
        "setuid": 146, "setreuid": 145, "setresuid": 147, "setfsuid": 151, "memfd_create": 279, "vmsplice": 75,
        "splice": 76, "tee": 77, "sendmsg": 211, "sendmmsg": 269, "mq_open": 180, "fcntl": 25, "prctl": 167,
        "setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
        "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239, "truncate": 45,
        "openat": 56, "mknodat": 33, "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88,
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
    },
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FORBIDDEN = (
    "ptrace", "mount", "umount2", "unshare", "setns", "keyctl", "add_key", "request_key", "bpf", "perf_event_open",
    "userfaultfd", "process_vm_writev", "pivot_root", "io_uring_setup", "fsopen", "pidfd_getfd", "socket",
    "shmget", "semget", "msgget", "setuid", "setreuid", "setresuid", "setfsuid", "mq_open",
    # memory that no limit of a process counts: pages that only a pipe holds, files that only a message holds
    "vmsplice", "splice", "tee", "sendmsg", "sendmmsg",
)  # fmt: skip
_ABSENT = ("memfd_create", "memfd_secret")  # likewise; a library that asks for them knows older kernels without
# changes to files by their owner, which Landlock does not restrict
_OWNERS = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes", "futimesat",
    "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr",
    "removexattrat", "file_setattr",
)  # fmt: skip
# what a process may do to others of its user; the position of the argument that names the process
_TO_OTHERS = {
    "prlimit64": 0, "sched_setparam": 0, "sched_setscheduler": 0, "sched_setaffinity": 0, "sched_setattr": 0,
    "migrate_pages": 0, "move_pages": 0, "setpriority": 1, "ioprio_set": 1,
}  # fmt: skip
_SET_PIPE_SIZE = 1031
_O_TRUNC, _O_ACCMODE = 0o1000, 0o3


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def _number(name: str) -> int:
    if name in _NEW_CALLS:
        return _NEW_CALLS[name]
    try:
        return _CALLS[_MACHINE][name]
    except KeyError:
        raise OSError(f"system call numbers of {_MACHINE} are not known here") from None


def _prctl(what: str, option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *padded), what)


def unshare(flags: int) -> None:
    """Give this process namespaces of its own."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """``mount(2)``."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    options = None if data is None else data.encode()
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options), f"mount {kind or ''} at {target}")


def umount(target: str) -> None:
    """Detach whatever is mounted at ``target``."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def clone_tree(path: str, attributes: int) -> int:
    """A descriptor of a copy of the mount tree at ``path``, with mount attributes set on all of it (Linux 5.12)."""
    tree = _syscall(
        f"open_tree {path}",
        _OPEN_TREE,
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(path),
        ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE),
    )
    _set_attributes(tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes)
    return tree


def attach_tree(tree: int, target: str) -> None:
    """Mount what :func:`clone_tree` returned."""
    _syscall(
        f"move_mount {target}",
        _MOVE_MOUNT,
        ctypes.c_int(tree),
        b"",
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_MOVE_FROM_EMPTY_PATH),
    )


def set_mount_attributes(target: str, attributes: int) -> None:
    """Set attributes of the one mount at ``target``."""
    _set_attributes(_AT_FDCWD, os.fsencode(target), 0, attributes)


def _set_attributes(directory: int, path: bytes, flags: int, attributes: int) -> None:
    settings = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _syscall(
        "mount_setattr",
        _MOUNT_SETATTR,
        ctypes.c_int(directory),
        path,
        ctypes.c_uint(flags),
        settings,
        ctypes.c_size_t(len(settings)),
    )


def pivot_root_here() -> None:
    """Make the current directory, a mount, the root of the file system and let go of the old one."""
    _syscall("pivot_root", _number("pivot_root"), b".", b".")
    umount(".")
    os.chdir("/")


def die_with_parent(signal: int = 9) -> None:
    """Get ``signal`` when the parent process ends."""
    _prctl("PR_SET_PDEATHSIG", _PDEATHSIG, signal)


def look_as(user: int) -> None:
    """Take a user's rights to files, and to what ``/proc`` shows of processes, without becoming open to its signals."""
    _libc.setfsgid(ctypes.c_uint(user))
    _libc.setfsuid(ctypes.c_uint(user))


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _prctl("PR_SET_CHILD_SUBREAPER", _SUBREAPER, 1)


def hide_memory() -> None:
    """Let no process without further rights read or trace this one."""
    _prctl("PR_SET_DUMPABLE", _DUMPABLE, 0)


def forbid_new_privileges() -> None:
    """No program started from here gains rights."""
    _prctl("PR_SET_NO_NEW_PRIVS", _NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability for good, also those that user id 0 would get back when it starts a program."""
    try:
        _prctl("PR_SET_SECUREBITS", _SECUREBITS, 0b101111)  # no root, no fix-up, both locked, keep-caps locked off
        for capability in range(_LAST_CAP + 1):
            try:
                _prctl("PR_CAPBSET_DROP", _CAPBSET_DROP, capability)
            except OSError:
                break  # beyond the last one that this kernel has
    except PermissionError:
        pass  # a process without capabilities has none to lose
    header = struct.pack("=Ii", 0x20080522, 0)
    _syscall("capset", _number("capset"), header, struct.pack("=6I", *[0] * 6))


# --- system call filter -----------------------------------------------------------------------------------------------

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 1, 38


def _errno(number: int) -> int:
    return 0x00050000 | number


def filter_system_calls(*, only_signal: int | None = None, shared: bool = False, nodes: bool = True) -> None:
    """Refuse what a program under test has no need for: sockets, tracing, mounts, memory that no limit counts.

    Args:
        only_signal: the one process that may still be sent signals, and its group; ``None`` = no rule about signals.
        shared: the program's files have an owner in common with others of the machine. Changes of modes, owners,
            times and attributes then have no effect.
        nodes: whether named pipes may be made.

    Raises:
        OSError: the kernel has no filters, or the machine is neither x86-64 nor 64-bit ARM.
    """
    if _MACHINE not in _CALLS:
        raise OSError(f"no system call filter for {_MACHINE}")
    code: list[tuple[int, int, int, int]] = []

    def answer(name: str, value: int = _errno(_EPERM)) -> None:
        if name in _NEW_CALLS or name in _CALLS[_MACHINE]:  # 64-bit ARM never had the oldest ones
            code.extend([(_JEQ, 0, 1, _number(name)), (_RET, 0, 0, value)])

    def deny_where(name: str, position: int, value: int) -> None:
        code.extend([(_JEQ, 0, 4, _number(name)), (_LD, 0, 0, 16 + 8 * position), (_JEQ, 0, 1, value)])
        code.extend([(_RET, 0, 0, _errno(_EPERM)), (_RET, 0, 0, _ALLOW)])

    def deny_unless(name: str, position: int, *values: int) -> None:
        code.extend([(_JEQ, 0, 3 + len(values), _number(name)), (_LD, 0, 0, 16 + 8 * position)])
        code.extend((_JEQ, len(values) - index, 0, value) for index, value in enumerate(values))
        code.extend([(_RET, 0, 0, _errno(_EPERM)), (_RET, 0, 0, _ALLOW)])

    code += [(_LD, 0, 0, 4), (_JEQ, 1, 0, _AUDIT_ARCH[_MACHINE]), (_RET, 0, 0, _KILL), (_LD, 0, 0, 0)]
    if _MACHINE == "x86_64":
        code += [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _errno(_ENOSYS))]  # the x32 numbers are a way around
    for name in _FORBIDDEN:
        answer(name)
    for name in _ABSENT:
        answer(name, _errno(_ENOSYS))
    # its flags lie in memory, where a filter cannot look; the C library then uses clone
    code += [(_JEQ, 0, 1, _CLONE3), (_RET, 0, 0, _errno(_ENOSYS))]
    deny_where("fcntl", 1, _SET_PIPE_SIZE)
    deny_where("prctl", 0, _DUMPABLE)  # the supervisor has to see what a program holds
    for name, position in _TO_OTHERS.items():
        deny_unless(name, position, 0)
    if not nodes:
        answer("mknod")
        answer("mknodat")
    if shared:
        for name in _OWNERS:
            answer(name, _errno(0))
        for name in (
            "process_madvise",
            "process_mrelease",
            "pidfd_send_signal",
            "rt_sigqueueinfo",
            "rt_tgsigqueueinfo",
        ):
            answer(name)
        answer("openat2", _errno(_ENOSYS))
        if landlock_version() < 3:  # truncation is no writing to it yet
            answer("truncate")
        for name, position in (("open", 1), ("openat", 2)):
            if name in _CALLS[_MACHINE]:
                code += [(_JEQ, 0, 5, _number(name)), (_LD, 0, 0, 16 + 8 * position), (_JSET, 0, 2, _O_TRUNC)]
                code += [(_JSET, 1, 0, _O_ACCMODE), (_RET, 0, 0, _errno(_EPERM)), (_RET, 0, 0, _ALLOW)]
    if only_signal is not None:
        for name in ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"):
            answer(name)
        for name in ("kill", "tgkill"):
            deny_unless(name, 0, only_signal, 0)
    code += [(_JEQ, 0, 3, _number("clone")), (_LD, 0, 0, 16), (_JSET, 0, 1, _ANY_NAMESPACE)]
    code += [(_RET, 0, 0, _errno(_EPERM)), (_RET, 0, 0, _ALLOW)]
    program = b"".join(struct.pack("=HBBI", *step) for step in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxP", len(code), ctypes.addressof(buffer))
    forbid_new_privileges()
    pointer = ctypes.create_string_buffer(header, len(header))
    _prctl("PR_SET_SECCOMP", _SECCOMP, 2, ctypes.addressof(pointer))


# --- Landlock ---------------------------------------------------------------------------------------------------------

_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGES = sum(1 << bit for bit in range(4, 13))  # remove and make files, directories, links, devices


def landlock_version() -> int:
    """The kernel's Landlock version; 0 without it."""
    return max(0, _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def landlock(readable: Iterable[str], writable: Sequence[str], devices: Iterable[str]) -> None:
    """Restrict this process and its descendants, for good.

    Args:
        readable: files and directories whose contents may be read and executed.
        writable: directories in which everything is allowed.
        devices: files that may be read and written.
    """
    version = landlock_version()
    if version < 1:
        raise OSError("the kernel has no Landlock")
    everything = _EXECUTE | _WRITE | _READ | _READ_DIR | _CHANGES
    everything |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    # then: TCP bind and connect, from version 4; abstract sockets and signals beyond its own processes, from version 6
    attributes = struct.pack("=QQQ", everything, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _syscall("landlock", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, rights in (
            (readable, _EXECUTE | _READ | _READ_DIR),
            (writable, everything),
            (devices, _WRITE | _READ | (everything & 1 << 14)),
        ):
            for path in paths:
                _allow_beneath(rules, path, rights)
        forbid_new_privileges()
        _syscall("landlock", _LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow_beneath(rules: int, path: str, rights: int) -> None:
    try:
        anchor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= ~(_READ_DIR | _CHANGES)
        rule = struct.pack("=Qi", rights, anchor)
        _syscall("landlock", _LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0))
    finally:
        os.close(anchor)

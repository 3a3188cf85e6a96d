"""A file system, a network and a process table of their own for programs under test. Standard library only."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl.rewards.sandbox import kernel
from verl.rewards.sandbox.spec import WORK_DIR, Isolation
from verl.rewards.sandbox.supervisor import DEVICES, Supervisor
from verl.rewards.sandbox.users import outside_user

_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")


def enter_namespaces(folder: str, readable: Sequence[str]) -> Supervisor | None:
    """Return the supervisor in its new process 1; ``None`` in the processes around it once that one has ended.

    Raises:
        OSError: the kernel refuses.
    """
    outside = outside_user() if os.geteuid() == 0 else os.geteuid()
    inside_ready, map_ready = os.pipe(), os.pipe()
    verdict_read, verdict_write = os.pipe()
    keeper = os.fork()
    if keeper:
        os.close(verdict_write)
        os.close(inside_ready[1])
        failed = _write_maps(keeper, outside, inside_ready[0], map_ready[1])
        message = failed or os.read(verdict_read, 65536).decode()
        if message != "ok":
            with suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
            raise OSError(message or "the process in the namespace died")
        os.waitpid(keeper, 0)
        return None
    try:
        kernel.die_with_parent()
        kernel.unshare(kernel.NEWUSER)
        os.write(inside_ready[1], b"x")
        os.close(map_ready[1])
        if os.read(map_ready[0], 1) != b"x":
            os._exit(1)
        kernel.unshare(kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS)
        supervisor = os.fork()
    except BaseException as error:  # noqa: BLE001  the launcher has to know, whatever it was
        os.write(verdict_write, str(error).encode() or b"?")
        os._exit(1)
    if supervisor:
        os.close(verdict_write)
        os.close(0)
        os.close(1)
        os.waitpid(supervisor, 0)
        os._exit(0)
    try:
        kernel.die_with_parent()
        _build_root(folder, readable)
        kernel.hide_memory()
        kernel.die_with_parent()  # once more: a change of user id forgets it
    except BaseException as error:  # noqa: BLE001  the launcher has to know, whatever it was
        os.write(verdict_write, str(error).encode() or b"?")
        os._exit(1)
    os.write(verdict_write, b"ok")
    for end in (*inside_ready, *map_ready, verdict_read, verdict_write):
        with suppress(OSError):
            os.close(end)
    return Supervisor(Isolation.NAMESPACES, WORK_DIR, readable, None, own_processes=True)


def _write_maps(keeper: int, outside: int, inside_ready: int, map_ready: int) -> str:
    """Map user 0 inside to an unprivileged one outside; the reason if that fails."""
    if os.read(inside_ready, 1) != b"x":
        return ""
    try:
        if os.geteuid() != 0:
            Path(f"/proc/{keeper}/setgroups").write_text("deny")
        group = outside if os.geteuid() == 0 else os.getegid()
        Path(f"/proc/{keeper}/gid_map").write_text(f"0 {group} 1")
        Path(f"/proc/{keeper}/uid_map").write_text(f"0 {outside} 1")
    except OSError as error:
        return f"user map: {error}"
    os.write(map_ready, b"x")
    return ""


def _build_root(folder: str, readable: Sequence[str]) -> None:
    """A file system of its own: what programs need, read-only, and nothing else."""
    plain = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # with the launcher's user id, which may read paths that the sandbox's cannot
    trees = [(path, kernel.clone_tree(path, plain | kernel.ATTR_NODEV)) for path in readable if os.path.isdir(path)]
    links = [(name, os.readlink(f"/{name}")) for name in _ROOT_LINKS if os.path.islink(f"/{name}")]
    etc = [(name, kernel.clone_tree(f"/etc/{name}", plain)) for name in _ETC if os.path.exists(f"/etc/{name}")]
    etc_is_dir = {name: os.path.isdir(f"/etc/{name}") for name, _ in etc}
    devices = [(path, kernel.clone_tree(path, kernel.ATTR_NOSUID)) for path in DEVICES if os.path.exists(path)]
    kernel.mount("root", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755,uid=0,gid=0")
    os.chdir(folder)
    with suppress(PermissionError):
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    for path, tree in trees:
        _attach(tree, path.lstrip("/"), directory=True)
    for name, target in links:
        os.symlink(target, name)
    for name, tree in etc:
        _attach(tree, f"etc/{name}", directory=etc_is_dir[name])
    for path, tree in devices:
        _attach(tree, path.lstrip("/"), directory=False)
    os.makedirs("etc", exist_ok=True)
    Path("etc/passwd").write_text(f"user:x:0:0::{WORK_DIR}:/bin/sh\n")
    if not os.path.lexists("tmp"):  # a folder where something readable lies in it: TMPDIR leads programs past it
        os.symlink(WORK_DIR, "tmp")
    for name in ("proc", WORK_DIR.lstrip("/")):
        os.makedirs(name, exist_ok=True)
    with suppress(OSError):  # a container may forbid it; the limit of memory then holds per process only
        kernel.mount("proc", "proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.pivot_root_here()
    kernel.set_mount_attributes("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _attach(tree: int, target: str, *, directory: bool) -> None:
    os.makedirs(target if directory else os.path.dirname(target), exist_ok=True)
    if not directory:
        Path(target).touch()
    kernel.attach_tree(tree, target)
    os.close(tree)

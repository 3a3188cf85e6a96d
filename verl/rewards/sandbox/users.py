"""User ids for programs under test. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def outside_user() -> int:
    """A user id that nothing else runs under, among those that this process may hand out."""
    wanted = (2_000_000_000 + os.getpid() % 1_000_000, 60_000 + os.getpid() % 5_000, 65_534)
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for user in wanted:
        if any(first <= user < first + count for first, _, count in ranges):
            return user
    return 65_534


def become(user: int, *, only_real: bool = False) -> None:
    if not only_real:
        os.setgroups([])
        os.setresgid(user, user, user)
    kept = -1 if only_real else user
    os.setresuid(user, kept, kept)


def other_user(needed: Sequence[str]) -> tuple[int | None, bool]:
    """A user id for programs that root tests, and whether it can be their real one only.

    Root's processes are not counted by the kernel, so it has to be another; which may not be able to read an
    interpreter that is installed below root's home.
    """
    user = outside_user()
    probe = os.fork()
    if probe == 0:
        answer = 2
        with suppress(BaseException):
            become(user)
            answer = 0 if all(os.access(path, os.X_OK) for path in needed[1:]) else 1
        os._exit(answer)
    answer = os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1])
    return (None if answer == 2 else user), answer == 1

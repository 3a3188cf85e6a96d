"""After each hostile program a good one gets its full score, and nothing of the hostile one is left."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rewards import hostile
from verl.errors import ConfigError
from verl.rewards import code
from verl.rewards.sandbox.local import LocalSandbox
from verl.rewards.sandbox.pool import SandboxPool
from verl.rewards.sandbox.spec import Isolation

GOOD = "```python\nopen('a', 'w').write(input())\nprint(int(open('a').read()) ** 2)\n```"
SQUARE = {"inputs": ["2\n"], "outputs": ["4"]}
PLACES = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/dev/mqueue"), Path.home(), Path.cwd()]


@dataclass
class Lane:
    """A pool of one sandbox, so that a good program follows a hostile one at the same place."""

    isolation: Isolation
    pool: SandboxPool
    box: LocalSandbox
    outside: Path
    port: int

    def score(self, text: str, truth: object, timeout_s: float) -> dict[str, object]:
        options = {"timeout_s": timeout_s, "memory_limit_mb": 256, "max_concurrent": 1}
        return code.compute_score(text, truth, isolation=str(self.isolation), **options)


@pytest.fixture(scope="module", params=list(Isolation), ids=str)
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    outside = Path(tempfile.mkdtemp(prefix="outside-"))
    outside.chmod(0o777)
    pool = code.shared_pool(str(request.param), 1)
    try:
        with pool.lend() as box, socket.create_server(("127.0.0.1", 0)) as server:
            pass
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Lane(request.param, pool, box, outside, server.getsockname()[1])
    except ConfigError as error:
        pytest.skip(f"this kernel: {error}")
    finally:
        pool.close()
        shutil.rmtree(outside)


def below(root: int) -> list[int]:
    """Ids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        more = parents.get(waiting.pop(), [])
        found += more
        waiting += more
    return found


def resident_mb(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096 / 2**20


def own_state() -> object:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)
    limits = [resource.getrlimit(kind) for kind in kinds]
    return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0)


def marks() -> set[Path]:
    return {path for place in PLACES if place.is_dir() for path in place.glob("verl-hostile*")}


CASES = [
    pytest.param(name, marks=[] if name in hostile.REPRESENTATIVE else [pytest.mark.slow]) for name in hostile.PROGRAMS
]


def test_there_are_enough() -> None:
    assert len(hostile.PROGRAMS) >= 60
    assert set(hostile.REPRESENTATIVE) <= set(hostile.PROGRAMS)


@pytest.mark.parametrize("name", CASES)
def test_the_next_program_gets_its_score(lane: Lane, name: str) -> None:
    victim = lane.outside / "victim"
    victim.write_text("untouched")
    victim.chmod(0o644)
    before, state = victim.stat(), own_state()
    launcher = lane.box._process.pid
    home = len(below(launcher))
    truth = {"inputs": [f"{os.getpid()} {lane.outside} {lane.port}\n"], "outputs": ["4"]}

    bad = lane.score(f"```python\n{hostile.PROGRAMS[name]}\n```", truth, timeout_s=0.75)
    assert bad["score"] == 0.0, bad
    assert "passed" not in str(bad["code_status"])

    assert lane.pool._idle, "the hostile program ended its launcher"
    # the same launcher is at work: the hostile program broke nothing that had to be replaced
    assert lane.pool._idle == [lane.box]
    started = time.monotonic()
    assert lane.score(GOOD, SQUARE, timeout_s=10.0) == {"score": 1.0, "acc": True, "code_status": "passed"}
    assert time.monotonic() - started < 10

    after = victim.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime, after.st_nlink) == (
        before.st_mode, before.st_uid, before.st_mtime, before.st_nlink,
    )  # fmt: skip
    assert victim.read_text() == "untouched"
    assert sorted(path.name for path in lane.outside.iterdir()) == ["victim"]
    assert own_state() == state
    left = below(launcher)
    assert len(left) == home
    assert resident_mb([launcher, *left]) < 150
    assert marks() == set()
    if lane.isolation is not Isolation.NAMESPACES:  # there it is a mount point inside
        assert os.listdir(lane.box._folder) == []

"""Every misuse of the tables, and the base commands that they change."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.misuse.case import BASE, Case, Outcome, Place
from tests.e2e.misuse.running import Zygote, environment, run_fresh
from verl.trainer.run_record import RECORDS

pytestmark = pytest.mark.e2e

#: a line of a program that says that it failed; log lines of that level count too
ERROR_LINE = re.compile(
    r"^(?:error: |\w+(?:Error|Exception): |verl(?: \w+)?: |\d\d:\d\d:\d\d (?:ERROR|CRITICAL) |usage: )", re.MULTILINE
)
#: of an interpreter, or of a native library
TRACES = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error", "core dumped")


def _tables() -> list[Case]:
    files = sorted(Path(__file__).parent.glob("cases_*.py"))
    tables = [importlib.import_module(f"tests.e2e.misuse.{file.stem}").CASES for file in files]
    return [case for table in tables for case in table]


CASES = _tables()


def run(case: Case, zygote: Zygote, place: Place) -> Outcome:
    """Prepare the place and run the command."""
    place.changes += case.changes
    place.env |= case.environment
    if case.prepare is not None:
        case.prepare(place)
    argv = [case.program, *case.command(place)]
    env = environment({k: None if v is None else place.fill(v) for k, v in place.env.items()})
    return run_fresh(argv, env, place, case) if case.fresh else zygote.run(argv, env, place, case)


@pytest.fixture
def place(tmp_path: Path, misuse_task: Path, tiny_model_dir: str) -> Iterator[Place]:
    yield Place(tmp=tmp_path, task=misuse_task, model=Path(tiny_model_dir))
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text("utf-8").split("\n") if line]
    for folder in mounted:  # small file systems of a case, however it ended
        if Path(folder).is_relative_to(tmp_path):
            subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.program}: {case.name}")
def test_misuse(case: Case, zygote: Zygote, place: Place, record_property: pytest.FixtureRequest) -> None:
    if case.skip is not None and (reason := case.skip()):
        pytest.skip(reason)
    done = run(case, zygote, place)
    shown = f"exit code {done.code} after {done.seconds:.1f} s ({done.wall:.1f} s)\n{done.stderr}\n---\n{done.stdout}"
    record_property("misuse_seconds", round(done.seconds, 2))  # type: ignore[operator]
    assert not done.timed_out, shown
    assert done.code in (case.code if isinstance(case.code, tuple) else (case.code,)), shown
    for word in case.words:
        assert place.fill(word) in done.stderr, f"{word!r} is not in the message\n{shown}"
    own = done.stderr.partition(TRACES[0])[0] if case.quotes_traceback else done.stderr
    for word in (*case.absent, *TRACES):
        assert place.fill(word) not in own + done.stdout, f"{word!r} is in the output\n{shown}"
    assert len(ERROR_LINE.findall(own)) == case.messages, f"not {case.messages} message(s)\n{shown}"
    assert done.seconds <= case.limit_s, shown
    if place.out.is_dir():
        # the record of a run that began is whole, and says what failed
        allowed = {path for pattern in (*case.leaves, *RECORDS) for path in place.out.glob(pattern)}
        left = sorted(str(path) for path in place.out.rglob("*") if not path.is_dir() and path not in allowed)
        assert not left, f"half-written: {left}\n{shown}"
    if case.check is not None:
        case.check(place, done)


@pytest.mark.parametrize("program", [name for name, words in BASE.items() if words])
def test_the_base_command_works(program: str, zygote: Zygote, place: Place) -> None:
    """Otherwise a misuse could fail for another reason than its own."""
    done = run(Case("base", program), zygote, place)
    assert done.code == 0, done.stderr + done.stdout


def test_names_are_unique() -> None:
    names = [(case.program, case.name) for case in CASES]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})

"""Standard output and error that are closed, full, of another encoding or absent cost their text and nothing else."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.output import LenientText, StreamLostError, fitting, guard_streams, printable

PRINTS = """
import os, sys
from verl.utils.output import guard_streams
from verl.utils.telling import BOUNDARY
guard_streams()
for number in range(3):
    print("line", number, "π ━ \\ud83d", flush=True)
    sys.stderr.write("error π\\n")
open(sys.argv[1], "w").write(repr(dict(BOUNDARY.counts)))
sys.exit(7)
"""


def run(tmp_path: Path, tail: str, **env: str) -> tuple[int, str, str, str]:
    """Exit code, standard output, standard error and the counts of a program whose command line ends with ``tail``."""
    (tmp_path / "program.py").write_text(PRINTS)
    counts = tmp_path / "counts"
    command = f"{sys.executable} {tmp_path / 'program.py'} {counts} {tail}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        timeout=60,
        env={**os.environ, **env},
        check=False,
    )
    text = counts.read_text() if counts.exists() else ""
    return done.returncode, done.stdout.decode(), done.stderr.decode(), text


def test_a_reader_that_leaves_costs_the_text_alone(tmp_path: Path) -> None:
    code, _, errors, counts = run(tmp_path, "| true")
    assert code == 7
    assert "BrokenPipe" not in errors
    assert "Traceback" not in errors
    assert counts in ("{'console': 1}", "{}")  # {}: all was written before the reader left


def test_a_pipe_without_a_reader(tmp_path: Path) -> None:
    code, _, errors, counts = run(tmp_path, "> >(exec 0<&-; sleep 0.1)")
    assert code == 7
    assert "Traceback" not in errors
    assert "console" in counts or counts == "{}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_both_streams(tmp_path: Path) -> None:
    code, _, errors, counts = run(tmp_path, "> /dev/full")
    assert code == 7
    assert errors.count("standard output takes no more text") == 1
    assert re.fullmatch(r"\{'console': \d+\}", counts)
    code, _, _, counts = run(tmp_path, "> /dev/full 2> /dev/full")
    assert code == 7
    assert re.fullmatch(r"\{'console': \d+, 'log': \d+\}", counts)  # the warning is lost too


@pytest.mark.parametrize("tail", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_start(tmp_path: Path, tail: str) -> None:
    code, _, errors, counts = run(tmp_path, tail)
    assert code == 7
    assert "Traceback" not in errors
    assert counts == "{}"


def test_a_closed_descriptor_is_not_given_to_a_file(tmp_path: Path) -> None:
    program = tmp_path / "p.py"
    program.write_text(
        "import os, sys\nfrom verl.utils.output import guard_streams\nguard_streams()\n"
        f"f = open({str(tmp_path / 'data')!r}, 'w')\nos.system('echo native')\nf.write('mine')\n"
    )
    subprocess.run(["bash", "-c", f"{sys.executable} {program} <&- >&- 2>&-"], timeout=60, check=True)
    assert (tmp_path / "data").read_text() == "mine"


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_characters_that_the_terminal_lacks_are_replaced(tmp_path: Path, env: dict[str, str]) -> None:
    code, out, errors, counts = run(tmp_path, "", PYTHONCOERCECLOCALE="0", **env)
    assert code == 7
    assert out.startswith("line 0 \\u03c0 \\u2501 \\ud83d\nline 1")
    assert errors.count("error \\u03c0") == 3
    assert counts == "{}"


def test_without_a_guard_the_same_program_fails(tmp_path: Path) -> None:
    """What the guard is for: the plain streams raise here."""
    program = tmp_path / "p.py"
    program.write_text("print('\\u2501')")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.run([sys.executable, program], env=env, capture_output=True, timeout=60).returncode == 1


def test_streams_of_a_test_runner_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    guard_streams()
    assert sys.stdout is own


def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    code = (
        "from verl.utils.output import guard_streams as g; import sys; g(); a = sys.stdout; g(); assert a is sys.stdout"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_texts_fit_their_encoding() -> None:
    assert fitting("step ━━╌ │ π", "ascii") == "step ==- | \\u03c0"
    assert fitting("é", "latin-1") == "é"
    assert fitting("\ud83d", "utf-8") == "\\ud83d"
    assert fitting("━", None) == "━"
    assert fitting("━", "no such encoding") == "="


def test_a_samples_text_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9b1m\tc\nd") == "a\\x1b[2Jb\\x0d\\x07\\x9b1m\tc\nd"


def test_lenient_text_says_when_its_stream_is_gone() -> None:
    stream = io.StringIO()
    LenientText(stream).write("a")
    stream.close()
    with pytest.raises(StreamLostError):
        LenientText(stream).write("a")

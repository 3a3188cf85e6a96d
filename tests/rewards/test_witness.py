"""A reward function that ends the process is named on the last line, with its sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from verl.rewards import ScoringOptions
from verl.rewards.function import ScoreFunction
from verl.rewards.make_scorer import make_scorer
from verl.rewards.streaming import StreamScorer

how, name, limit = sys.argv[1:4]
function = ScoreFunction.from_file("reward.py", name)
options = ScoringOptions(timeout_s=float(limit) or None)
calls = [
    dict(data_source="mine", solution_str=text, ground_truth="1", extra_info={"index": 40 + place})
    for place, text in enumerate(["fine", "good", how, "late"])
]
if name == "stream":
    function = ScoreFunction.from_file("reward.py", "compute_score")
    futures = [StreamScorer(function, options).submit(call) for call in calls]
    print([future.result().score for future in futures])
else:
    print([outcome.score for outcome in make_scorer(function, options).score(calls)])
"""
REWARD = """
import ctypes, os, signal

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "crash":
        ctypes.string_at(0)
    return 1.0

async def patient(**given):
    return compute_score(**given)

def stream():
    pass
"""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-c", PROGRAM, *words]
    # standard error ends when the watching process has ended too
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("how", "name", "limit", "code"),
    [
        ("exit", "compute_score", "0", 3),
        ("exit", "compute_score", "30", 3),
        ("exit", "patient", "0", 3),
        ("exit", "stream", "0", 3),
        ("kill", "compute_score", "0", -9),
        ("crash", "compute_score", "0", -11),
    ],
)
def test_the_last_line_names_function_and_sample(tmp_path: Path, how: str, name: str, limit: str, code: int) -> None:
    done = _run(tmp_path, how, name, limit)
    assert done.returncode == code, done.stderr
    last = done.stderr.rstrip("\n").split("\n")[-1]
    assert "the process ended while the reward function" in last
    assert f"{'compute_score' if name == 'stream' else name} from reward.py" in last
    assert f"data_source='mine', index 42 of the data, response {how!r}" in last
    assert ("scored sample 2 (" in last) is (name == "compute_score")
    assert "reward.num_workers=2" in last


def test_nothing_is_said_of_a_run_that_ends_well(tmp_path: Path) -> None:
    done = _run(tmp_path, "fine", "compute_score", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0, 1.0, 1.0]"
    assert "ended while" not in done.stderr

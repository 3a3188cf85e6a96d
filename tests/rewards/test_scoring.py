"""Typed outcomes, time limits, crashes: no sample is lost and nothing hangs."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.errors import ConfigError, RewardError
from verl.rewards.async_scorer import AsyncScorer
from verl.rewards.function import ScoreFunction
from verl.rewards.make_scorer import make_scorer
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import OutcomeKind, RewardOutcome, as_outcome
from verl.rewards.process_scorer import ProcessScorer
from verl.rewards.scoring import ThreadScorer

CODE = """
import os, time, signal
def score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "exit":
        raise SystemExit(3)
    if solution_str == "pid":
        return {"score": 1.0, "pid": os.getpid()}
    if solution_str == "signal":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 5.0
    if solution_str == "unpicklable":
        return {"score": 1.0, "function": lambda: 1}
    return float(solution_str) + bonus
"""


def call(text: str) -> dict[str, Any]:
    return {"data_source": "d", "solution_str": text, "ground_truth": "g", "extra_info": {}}


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "reward.py"
    path.write_text(CODE)
    return str(path)


def kinds(outcomes: list[RewardOutcome]) -> list[str]:
    return [str(outcome.kind) for outcome in outcomes]


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.array(2.0), 2.0),
        (torch.tensor([3.0]), 3.0),
        ({"score": 0.5, "acc": True}, 0.5),
        ({"score": np.int64(2)}, 2.0),
    ],
)
def test_values_that_are_scores(value: Any, score: float) -> None:
    outcome = as_outcome(value)
    assert (outcome.kind, outcome.score) == (OutcomeKind.SCORE, score)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "None"),
        ("1.0", "'1.0' (str)"),
        (math.nan, "not a finite number"),
        (float("inf"), "not a finite number"),
        ({"acc": 1.0}, "without 'score'; its keys are ['acc']"),
        ({"score": None}, "None"),
        ({"score": math.nan}, "not a finite number"),
        ([1.0], "[1.0] (list)"),
        (torch.tensor([1.0, 2.0]), "tensor"),
        (1 + 2j, "(complex)"),
    ],
)
def test_values_that_are_errors_and_never_zero(value: Any, message: str) -> None:
    outcome = as_outcome(value)
    assert (outcome.kind, outcome.score) == (OutcomeKind.ERROR, None)
    assert message in outcome.message


def test_extra_values_and_abstention() -> None:
    assert as_outcome({"score": 1.0, "acc": 0.5, "pred": "x"}).extra == {"acc": 0.5, "pred": "x"}
    assert as_outcome(RewardOutcome.abstain("no opinion")).kind is OutcomeKind.ABSTAIN


def test_thread_scorer_keeps_order_and_turns_exceptions_into_errors(code: str) -> None:
    scorer = ThreadScorer(ScoreFunction.from_file(code, "score", {"bonus": 0.5}), ScoringOptions(timeout_s=20))
    outcomes = scorer.score([call(t) for t in ("1", "raise", "2", "three", "exit", "3")])
    assert kinds(outcomes) == ["score", "error", "score", "error", "error", "score"]
    assert [o.score for o in outcomes] == [1.5, None, 2.5, None, None, 3.5]
    assert "KeyError: 'no such thing'" in outcomes[1].message
    assert "reward.py" in outcomes[1].message  # a traceback into the user's file
    assert scorer.score([]) == []


def test_thread_scorer_stops_a_busy_loop_and_goes_on(code: str) -> None:
    scorer = ThreadScorer(ScoreFunction.from_file(code, "score"), ScoringOptions(timeout_s=0.5))
    started = time.monotonic()
    outcomes = scorer.score([call(t) for t in ("1", "hang", "2", "sleep", "3")])
    assert kinds(outcomes) == ["score", "timeout", "score", "timeout", "score"]
    assert "no score within 0.5 s" in outcomes[1].message
    assert time.monotonic() - started < 20
    deadline = time.monotonic() + 20
    # the looping thread is gone; the one that sleeps in C stays until its call returns
    while sum(t.name == "verl-reward" for t in threading.enumerate()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(t.name == "verl-reward" for t in threading.enumerate()) <= 1


def test_without_time_limit_the_function_runs_in_the_calling_thread(code: str) -> None:
    scorer = ThreadScorer(ScoreFunction.from_file(code, "score"), ScoringOptions(timeout_s=None))
    assert scorer.score([call("signal")])[0].score == 5.0  # signals need the main thread


def test_a_function_that_uses_signals_runs_in_the_main_thread_and_limits_its_own_time(code: str) -> None:
    limited = ThreadScorer(ScoreFunction.from_file(code, "score"), ScoringOptions(timeout_s=5))
    for _ in range(2):
        assert [outcome.score for outcome in limited.score([call("1"), call("signal")])] == [1.0, 5.0]
    found: list[RewardOutcome] = []
    elsewhere = ThreadScorer(ScoreFunction.from_file(code, "score"), ScoringOptions(timeout_s=5))
    thread = threading.Thread(target=lambda: found.extend(elsewhere.score([call("signal")])))
    thread.start()
    thread.join(timeout=60)
    assert found[0].kind is OutcomeKind.ERROR
    assert "reward.num_workers" in found[0].message


def test_process_scorer(code: str) -> None:
    scorer = ProcessScorer(
        ScoreFunction.from_file(code, "score", {"bonus": 1.0}), ScoringOptions(timeout_s=3.0, num_workers=2)
    )
    try:
        outcomes = scorer.score([call(t) for t in ("1", "die", "sleep", "raise", "signal", "2", "unpicklable", "pid")])
        assert kinds(outcomes) == ["score", "error", "timeout", "error", "score", "score", "error", "score"]
        assert [o.score for o in outcomes] == [2.0, None, None, None, 5.0, 3.0, None, 1.0]
        assert "exit code 7" in outcomes[1].message
        assert "KeyError" in outcomes[3].message
        assert outcomes[7].extra["pid"] != os.getpid()
        # the processes live on
        pids = {o.extra["pid"] for o in scorer.score([call("pid")] * 8)}
        assert 1 <= len(pids) <= 2
        assert pids == {w.process.pid for w in scorer._workers if w.process.pid in pids}
    finally:
        processes = [w.process for w in scorer._workers]
        scorer.close()
    assert all(p.poll() is not None for p in processes)


def test_process_scorer_that_cannot_start(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def score(**k): return 1.0\n")
    scorer = ProcessScorer(ScoreFunction.from_file(str(path), "score"), ScoringOptions(timeout_s=None, num_workers=1))
    path.unlink()
    with pytest.raises(RewardError, match=r"could not load score from [\s\S]*does not exist"):
        scorer.score([call("1")])


def test_closures_need_the_own_process() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process .* reward\.num_workers"):
        make_scorer(ScoreFunction(lambda **k: 1.0), ScoringOptions(timeout_s=None, num_workers=2))


async def _async_score(solution_str: str, **_: Any) -> float:
    if solution_str == "block":
        time.sleep(8)  # the mistake under test
    await asyncio.sleep(60 if solution_str == "slow" else 0.05)
    if solution_str == "raise":
        raise ValueError("bad")
    if solution_str == "exit":
        raise SystemExit(3)
    if solution_str == "own":
        raise TimeoutError("of the function's own")
    return float(solution_str)


def test_async_functions_run_together_within_their_limits() -> None:
    scorer = make_scorer(ScoreFunction(_async_score), ScoringOptions(timeout_s=1.0, num_workers=1))
    assert isinstance(scorer, AsyncScorer)
    started = time.monotonic()
    outcomes = scorer.score([call(t) for t in ["slow", "raise", "own", "exit", *map(str, range(100))]])
    assert time.monotonic() - started < 4.0  # one after the other would take over 5
    assert kinds(outcomes[:4]) == ["timeout", "error", "error", "error"]
    assert "ValueError: bad" in outcomes[1].message
    assert [o.score for o in outcomes[4:]] == [float(i) for i in range(100)]


def test_async_function_that_blocks_its_loop_does_not_hang_the_run() -> None:
    scorer = AsyncScorer(ScoreFunction(_async_score), ScoringOptions(timeout_s=0.5))
    started = time.monotonic()
    outcomes = scorer.score([call("block"), call("1")])
    assert time.monotonic() - started < 7
    assert kinds(outcomes)[0] == "timeout"
    assert "blocks its event loop" in outcomes[0].message


def test_signature_is_checked_at_start() -> None:
    def wrong(solution: str) -> float:
        return 0.0

    with pytest.raises(
        ConfigError, match=r"reward function wrong has the signature \(solution: .*missing a required argument"
    ):
        ScoreFunction(wrong).check_signature()
    ScoreFunction(lambda data_source, solution_str, ground_truth, extra_info=None: 1.0).check_signature()
    with pytest.raises(ConfigError, match="bonus"):
        ScoreFunction(lambda data_source, solution_str, ground_truth, extra_info: 1, {"bonus": 1}).check_signature()

"""Consequences of missing scores, retries, rates."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from tests.rewards.batches import TOKENIZER, batch
from verl.errors import ConfigError, RewardError
from verl.rewards import RewardOutcome, ScoringOptions
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.rate import RateLimiter


def score(solution_str: str, **_: Any) -> Any:
    if solution_str == "e":
        raise ValueError("broken")
    if solution_str == "n":
        return RewardOutcome.abstain("no opinion")
    return float(len(solution_str))


def judged(responses: list[str], uids: list[str] | None = None, **options: Any) -> dict[str, Any]:
    more = {} if uids is None else {"uid": np.array(uids, dtype=object)}
    return NaiveRewardManager(TOKENIZER, 0, score, scoring=ScoringOptions(**options))(
        batch(responses, **more), return_dict=True
    )


def test_drop_sample_leaves_the_rest_of_the_group() -> None:
    result = judged(["ab", "e", "abc", "a"], ["p", "p", "q", "q"], on_error="drop_sample")
    assert result["sample_mask"].tolist() == [True, False, True, True]
    assert result["reward_tensor"].sum(1).tolist() == [2.0, 0.0, 3.0, 1.0]


def test_drop_group_takes_every_sample_of_the_prompt() -> None:
    result = judged(["ab", "e", "abc", "a"], ["p", "p", "q", "q"], on_error="drop_group")
    assert result["sample_mask"].tolist() == [False, False, True, True]
    assert result["reward_tensor"].sum(1).tolist() == [0.0, 0.0, 3.0, 1.0]
    assert [math.isnan(s) for s in result["reward_extra_info"]["score"]] == [True, True, False, False]
    assert result["reward_metrics"]["reward/errors"] == 1.0
    assert result["reward_metrics"]["reward/abstained"] == 2.0


def test_drop_group_without_groups_drops_the_sample() -> None:
    assert judged(["ab", "e", "abc"], on_error="drop_group")["sample_mask"].tolist() == [True, False, True]


def test_penalise() -> None:
    result = judged(["ab", "e", "n"], on_error="penalise", on_abstain="penalise", error_score=-0.5)
    assert result["reward_tensor"].sum(1).tolist() == [2.0, -0.5, -0.5]
    assert result["sample_mask"].tolist() == [True, True, True]


def test_stop_on_abstention() -> None:
    with pytest.raises(RewardError, match=r"abstained on 1 of 2 samples[\s\S]*no opinion[\s\S]*reward\.on_abstain="):
        judged(["ab", "n"], on_abstain="stop")


@pytest.mark.parametrize(
    ("word", "meaning"),
    [("fail", "stop"), ("score", "penalise"), ("penalize", "penalise"), ("abstain", "drop_sample")],
)
def test_other_words(word: str, meaning: str) -> None:
    assert ScoringOptions(on_error=word).on_error == meaning


def test_unknown_consequence() -> None:
    with pytest.raises(ConfigError, match=r"reward\.on_timeout='ignore': choose one of stop, penalise, drop_sample"):
        ScoringOptions(on_timeout="ignore")


class Flaky:
    """Fails on each sample's first calls."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: dict[str, int] = {}

    def __call__(self, solution_str: str, **_: Any) -> float:
        self.calls[solution_str] = self.calls.get(solution_str, 0) + 1
        if solution_str != "a" and self.calls[solution_str] <= self.failures:
            raise ConnectionError("try again")
        return 1.0


class AsyncFlaky(Flaky):
    async def __call__(self, solution_str: str, **_: Any) -> float:  # type: ignore[override]
        return super().__call__(solution_str)


@pytest.mark.parametrize("kind", [Flaky, AsyncFlaky])
def test_retries_come_before_the_consequence(kind: type[Flaky]) -> None:
    function = kind(failures=2)
    options = ScoringOptions(max_retries=2, retry_wait_s=0.01)
    rewards = NaiveRewardManager(TOKENIZER, 0, function, scoring=options)(batch(["a", "b", "c"]))
    assert rewards.sum(1).tolist() == [1.0, 1.0, 1.0]
    assert function.calls == {"a": 1, "b": 3, "c": 3}
    with pytest.raises(RewardError, match="try again"):
        options = ScoringOptions(max_retries=1, retry_wait_s=0.01)
        NaiveRewardManager(TOKENIZER, 0, kind(failures=2), scoring=options)(batch(["a", "b", "c"]))


def test_rate_limit_spaces_the_starts() -> None:
    limiter = RateLimiter(per_minute=600)
    waits = [limiter.reserve() for _ in range(4)]
    assert waits[0] == 0.0
    assert waits[1:] == pytest.approx([0.1, 0.2, 0.3], abs=0.05)
    assert [RateLimiter(None).reserve() for _ in range(3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_rate_limit_of_a_reward_function(timeout_s: float | None) -> None:
    starts: list[float] = []

    def timed(solution_str: str, **_: Any) -> float:
        starts.append(time.monotonic())
        return 1.0

    async def timed_async(solution_str: str, **_: Any) -> float:
        return timed(solution_str)

    for function in (timed, timed_async):
        starts.clear()
        scoring = ScoringOptions(max_rpm=1200, timeout_s=timeout_s)  # one every 0.05 s
        NaiveRewardManager(TOKENIZER, 0, function, scoring=scoring)(batch(["a", "b", "c", "d"]))
        gaps = np.diff(sorted(starts))
        assert len(starts) == 4
        assert gaps.min() > 0.03
        assert starts[-1] - starts[0] < 2.0

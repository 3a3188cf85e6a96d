"""How many sequences are expected to fit into the cache."""

from __future__ import annotations

import numpy as np
import pytest

from verl.workers.rollout.hf.kv_budget import CacheBudget, Progress


def room(budget: CacheBudget, entering: Progress, running: list[Progress] | None = None, wanted: int = 1000) -> int:
    running = running or []
    return budget.forecast(running, entering.remaining).room(entering, wanted)


def test_survival_is_the_product_of_what_passes_each_part() -> None:
    """Three ends, and the first guess of 8 that are spread evenly: 1/4 in each of 32 parts."""
    budget = CacheBudget()
    for sampled in (10, 10, 320):
        budget.ended(sampled, 320)  # parts of 10 tokens
    survival = budget.survival([])
    assert survival[0] == 1
    assert survival[1] == pytest.approx(1 - 2.25 / 11)
    assert survival[2] == pytest.approx(survival[1] * (1 - 0.25 / 8.75))
    assert survival[31] == pytest.approx(1.25 / 11)
    assert survival[32] == 0


def test_what_still_runs_has_not_ended() -> None:
    """Ten that are in the second part have passed the first, and say nothing of the parts behind."""
    budget = CacheBudget()
    budget.ended(10, 320)
    survival = budget.survival([Progress(100, 15, 320)] * 10)
    assert survival[1] == pytest.approx(1 - 1.25 / 19)
    assert survival[2] / survival[1] == pytest.approx(1 - 0.25 / 7.75)


def test_older_ends_count_for_less() -> None:
    budget = CacheBudget()
    for _ in range(5000):
        budget.ended(320, 320)
    for _ in range(5000):
        budget.ended(1, 320)
    assert budget.survival([])[1] < 0.2


def test_answers_that_all_reach_their_limit_are_given_room_for_it() -> None:
    budget = CacheBudget(1000)
    for _ in range(2000):
        budget.ended(90, 90)
    assert room(budget, Progress(10, 0, 90)) == 10
    assert room(budget, Progress(10, 0, 90), [Progress(50, 40, 90)] * 4) == 6
    assert room(budget, Progress(10, 0, 90), [Progress(90, 80, 90)] * 10) == 0


def test_short_answers_need_little_room() -> None:
    """All end after 30 of 320 tokens, which is known as 21 to 30: 10 + 20 to 10 + 30 columns."""
    budget = CacheBudget(4000)
    for _ in range(2000):
        budget.ended(30, 320)
    assert 4000 // 40 <= room(budget, Progress(10, 0, 320)) <= 4000 // 30
    # one that is at 300 is beyond what was seen before: the others keep out of its columns
    assert room(budget, Progress(10, 0, 320), [Progress(310, 300, 320)]) <= 4000 // 310 - 1


def test_a_constant_chance_to_end_lets_in_more_than_the_worst_case() -> None:
    """Mean of 96 tokens, prompts of 60: rows leave nearly as fast as the others grow."""
    budget, draw = CacheBudget(16_000), np.random.default_rng(0)
    for length in draw.geometric(1 / 96, 2000):
        budget.ended(min(int(length), 256), 256)
    most = room(budget, Progress(60, 0, 256))
    assert 16_000 // 316 * 3 < most < 16_000 / 60
    moments = np.arange(257)
    expected = most * 0.5 ** (moments / (96 * np.log(2))) * (60 + moments)
    assert expected.max() < 16_000 * 1.03


def test_what_was_let_in_is_counted() -> None:
    budget = CacheBudget(1000)
    for _ in range(2000):
        budget.ended(90, 90)
    forecast = budget.forecast([], 90)
    entering = Progress(10, 0, 90)
    assert forecast.room(entering, 4) == 4
    forecast.add(entering, 4)
    assert forecast.room(entering, 100) == 6
    forecast.add(entering, 6)
    assert forecast.room(entering, 100) == 0
    assert CacheBudget(None).forecast([], 90).room(entering, 7) == 7

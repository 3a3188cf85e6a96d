from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithms.batches import normal, poison
from verl.algorithms.gigpo import compute_gigpo_outcome_advantage
from verl.algorithms.turns import Turns
from verl.errors import ConfigError, DataError

# Three episodes of one task; tokens of tools in between. Steps: row 0 two, row 1 two, row 2 one.
MASK = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]])
REWARDS = poison(
    torch.tensor([[0.0, 1.0, 9.0, 4.0, 9.0, 9.0], [0.0, 9.0, 9.0, 1.0, 1.0, 9.0], [9.0, 0.0, 3.0, 9.0, 9.0, 9.0]]), MASK
)
STATES = [["hall", "door"], ["hall", "cellar"], ["door"]]


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(gigpo=SimpleNamespace(**{"mode": "mean_norm", "step_advantage_w": 1.0, **changes}))


def test_literal_numbers() -> None:
    advantages, returns = compute_gigpo_outcome_advantage(
        REWARDS, MASK, list("aaa"), STATES, gamma=0.5, config=config(step_advantage_w=2.0)
    )
    # rewards of steps: (1, 4), (0, 2), (3); discounted: (1 + 2, 4), (0 + 1, 2), (3)
    assert returns.tolist() == [[3, 3, 0, 4, 0, 0], [1, 0, 0, 2, 2, 0], [0, 3, 3, 0, 0, 0]]
    # episodes 5, 2, 3 with mean 10/3; hall: 3 and 1 (mean 2); door: 4 and 3 (mean 3.5); cellar alone
    first, second, third = 5 - 10 / 3, 2 - 10 / 3, 3 - 10 / 3
    expected = [
        [first + 2, first + 2, 0, first + 1, 0, 0],
        [second - 2, 0, 0, second, second, 0],
        [0, third - 1, third - 1, 0, 0, 0],
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_division_by_the_standard_deviation() -> None:
    advantages, _ = compute_gigpo_outcome_advantage(
        REWARDS, MASK, list("aaa"), STATES, gamma=0.5, config=config(mode="mean_std_norm")
    )
    std = np.std([5, 2, 3], ddof=1)
    hall, door = np.std([3, 1], ddof=1), np.std([4, 3], ddof=1)
    assert advantages[0, 0].item() == pytest.approx((5 - 10 / 3) / std + 1 / hall, rel=1e-5)
    assert advantages[0, 3].item() == pytest.approx((5 - 10 / 3) / std + 0.5 / door, rel=1e-5)
    assert advantages[1, 3].item() == pytest.approx((2 - 10 / 3) / std, rel=1e-5)


def test_equal_states_of_different_tasks_are_not_compared() -> None:
    together, _ = compute_gigpo_outcome_advantage(REWARDS, MASK, list("aab"), STATES, config=config())
    # row 2 is alone: its score; "door" of row 0 has no companion any more
    assert together[2, 1].item() == 3.0
    assert together[0, 3].item() == pytest.approx(5 - 3.5)


def test_a_state_may_be_visited_twice_in_one_episode() -> None:
    mask = torch.tensor([[1, 0, 1]])
    rewards = torch.tensor([[1.0, 0.0, 1.0]])
    advantages, _ = compute_gigpo_outcome_advantage(rewards, mask, ["a"], [["s", "s"]], config=config())
    # alone as an episode: its score 2; as steps: returns 2 and 1 around 1.5
    assert advantages.tolist() == [[2.5, 0.0, 1.5]]


def test_states_as_a_tensor_are_read_at_the_first_token() -> None:
    tensor = torch.tensor([[7, 99, 99, 8, 99, 99], [7, 99, 99, 5, 98, 99], [99, 8, 97, 99, 99, 99]])
    expected, _ = compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), STATES, gamma=0.5)
    found, _ = compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), tensor, gamma=0.5)
    assert torch.equal(found, expected)


def test_order_and_equality_are_all_that_matters() -> None:
    expected, _ = compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), STATES)
    order = [2, 0, 1]
    found, _ = compute_gigpo_outcome_advantage(REWARDS[order], MASK[order], list("xxx"), [STATES[i] for i in order])
    torch.testing.assert_close(found, expected[order])
    numbers = [[("x", 1), 2], [("x", 1), 3], [2]]
    assert torch.equal(compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), numbers)[0], expected)


def test_against_a_loop() -> None:
    rng = np.random.default_rng(3)
    mask = torch.from_numpy((rng.random((10, 9)) < 0.6).astype(np.int64))
    rewards, index = normal(10, 9, seed=1), rng.integers(0, 3, 10)
    steps: list[tuple[int, list[int]]] = []
    for i in range(10):
        for t in range(9):
            if mask[i, t] and (t == 0 or not mask[i, t - 1]):
                steps.append((i, []))
            if mask[i, t]:
                steps[-1][1].append(t)
    states: list[list[int]] = [[] for _ in range(10)]
    for i, _ in steps:
        states[i].append(int(rng.integers(0, 3)))
    flat = [state for row in states for state in row]
    own = [rewards[i, at].sum().item() for i, at in steps]
    returns = [
        sum(0.9 ** (k - n) * own[k] for k in range(n, len(steps)) if steps[k][0] == steps[n][0])
        for n in range(len(steps))
    ]
    scores = (rewards * mask).sum(-1).numpy()
    expected = torch.zeros(10, 9, dtype=torch.float64)
    for n, (i, at) in enumerate(steps):
        episode = [scores[j] for j in range(10) if index[j] == index[i]]
        visit = [
            returns[k] for k in range(len(steps)) if flat[k] == flat[n] and index[steps[k][0]] == index[steps[n][0]]
        ]
        expected[i, at] = scores[i] - np.mean(episode) + 0.7 * (returns[n] - np.mean(visit))
    found, _ = compute_gigpo_outcome_advantage(
        poison(rewards, mask), mask, index, states, gamma=0.9, config=config(step_advantage_w=0.7)
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(DataError, match="row 1 has 1 states for 2 steps"):
        compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), [["s", "s"], ["s"], ["s"]])
    with pytest.raises(DataError, match="2 rows for 3 samples"):
        compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), STATES[:2])
    with pytest.raises(DataError, match=r"shape \(3, 2\)"):
        compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), torch.zeros(3, 2))
    with pytest.raises(ConfigError, match="mode='std'"):
        compute_gigpo_outcome_advantage(REWARDS, MASK, list("aaa"), STATES, config=config(mode="std"))


def test_turns_of_a_mask() -> None:
    turns = Turns.from_mask(torch.cat([MASK, torch.zeros(1, 6, dtype=MASK.dtype)]))
    assert turns.row.tolist() == [0, 0, 1, 1, 2]
    assert turns.number.tolist() == [0, 1, 0, 1, 0]
    assert turns.first.tolist() == [0, 3, 0, 3, 1]
    assert turns.sum(torch.cat([REWARDS, REWARDS[:1]])).tolist() == [1, 4, 0, 2, 3]
    spread = turns.spread(torch.arange(5) + 1)
    assert spread.tolist()[:2] == [[1, 1, 0, 2, 0, 0], [3, 0, 0, 4, 4, 0]]
    assert not spread[3].any()
    assert len(Turns.from_mask(torch.zeros(2, 3))) == 0

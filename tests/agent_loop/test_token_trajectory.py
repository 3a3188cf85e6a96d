"""The account of a trajectory's tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agent_loop.token_trajectory import TokenTrajectory
from verl.errors import DataError
from verl.workers.rollout.types import Completion


def sampled(*ids: int, version: int = 0, last: int | None = None) -> Completion:
    return Completion(list(ids), [-float(i) for i in ids], "stop", version, last)


def test_turns_roles_and_versions_token_by_token() -> None:
    token_trajectory = TokenTrajectory([1, 2])
    token_trajectory.append_sampled(sampled(3, 4, version=5))
    token_trajectory.append_given([6], "tool")
    token_trajectory.append_given([7], "tool")
    token_trajectory.append_sampled(sampled(8, 9, version=6, last=7))
    assert token_trajectory.context == [1, 2, 3, 4, 6, 7, 8, 9]
    assert token_trajectory.mask == [1, 1, 0, 0, 1, 1]
    assert token_trajectory.log_probs == [-3.0, -4.0, 0.0, 0.0, -8.0, -9.0]
    assert token_trajectory.turns == [0, 0, 1, 1, 2, 2]
    assert token_trajectory.roles == ["assistant"] * 2 + ["tool"] * 2 + ["assistant"] * 2
    assert token_trajectory.versions == [5, 5, -1, -1, 6, 7]
    assert token_trajectory.version_range() == (5, 7)
    assert token_trajectory.num_turns == 3


def test_states_are_named_by_what_was_answered() -> None:
    one, other = TokenTrajectory([1]), TokenTrajectory([1])
    for token_trajectory, words in ((one, 10), (other, 11)):
        token_trajectory.append_sampled(sampled(words))
        token_trajectory.append_given([20, 21], "tool")
        token_trajectory.append_sampled(sampled(3))
        token_trajectory.append_given([words], "tool")
        token_trajectory.append_sampled(sampled(4))
    first, second = one.state_hashes(), other.state_hashes()
    assert len(first) == len(second) == 3
    assert first[:2] == second[:2]  # the same prompt, then the same answer, whatever the model had said
    assert first[2] != second[2]


def test_what_cannot_be_trained_on_is_refused() -> None:
    token_trajectory = TokenTrajectory([1])
    with pytest.raises(DataError, match="2 sampled tokens came with 1 log-prob"):
        token_trajectory.append_sampled(Completion([1, 2], [0.0], "stop"))
    with pytest.raises(DataError, match="sampled; add it with append_sampled"):
        token_trajectory.append_given([1], "assistant")
    assert len(token_trajectory) == 0
    assert token_trajectory.version_range() == (-1, -1)
    assert token_trajectory.state_hashes() == []


turns = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=4)), max_size=12)


@given(turns)
def test_the_lists_stay_equally_long_and_sampled_ids_are_kept(parts: list[tuple[bool, list[int]]]) -> None:
    token_trajectory = TokenTrajectory([0])
    expected: list[tuple[int, int]] = []
    for model, ids in parts:
        if model:
            token_trajectory.append_sampled(sampled(*ids))
        else:
            token_trajectory.append_given(ids, "tool")
        expected += [(token, int(model)) for token in ids]
        token_trajectory.check()
    assert list(zip(token_trajectory.ids, token_trajectory.mask, strict=True)) == expected
    changes = sum(a != b for (_, a), (_, b) in pairwise(expected))
    assert token_trajectory.num_turns == (changes + 1 if expected else 0)
    assert len(token_trajectory.state_hashes()) == len(
        [1 for turn in set(token_trajectory.turns) if token_trajectory.mask[token_trajectory.turns.index(turn)]]
    )

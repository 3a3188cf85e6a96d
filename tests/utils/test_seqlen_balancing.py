"""Balanced partitions: exact on small cases, bounded and complete on all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.seqlen_balancing import (
    arrange_mini_batches,
    get_seqlen_balanced_partitions,
    plan_micro_batches,
    seqlen_balance_metrics,
)


def totals(seqlens: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(seqlens[i] for i in part) for part in parts]


def test_known_partitions() -> None:
    # The textbook example of the differencing method: it reaches a difference of 2 where 0 is possible.
    assert totals([8, 7, 6, 5, 4], get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2)) == [14, 16]
    assert totals([10, 1, 1, 10], get_seqlen_balanced_partitions([10, 1, 1, 10], 2)) == [11, 11]
    assert totals([4] * 6, get_seqlen_balanced_partitions([4] * 6, 3)) == [8, 8, 8]
    assert get_seqlen_balanced_partitions([9, 3, 3, 3], 2) == [[0], [1, 2, 3]]
    assert totals([9, 3, 3, 3], get_seqlen_balanced_partitions([9, 3, 3, 3], 2, equal_size=True)) == [12, 6]
    assert get_seqlen_balanced_partitions([3, 1, 2], 1) == [[0, 1, 2]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 12))
def test_every_partition_is_complete_nonempty_and_within_the_bound(seqlens: list[int], k: int) -> None:
    if k > len(seqlens):
        return
    parts = get_seqlen_balanced_partitions(seqlens, k)
    assert sorted(itertools.chain(*parts)) == list(range(len(seqlens)))
    assert len(parts) == k
    assert all(parts)
    sums = totals(seqlens, parts)
    assert max(sums) - min(sums) <= max(seqlens)
    assert parts == get_seqlen_balanced_partitions(seqlens, k)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=10), st.integers(1, 6), st.data())
def test_equal_sizes_are_equal_and_within_the_bound(column: list[int], k: int, data: st.DataObject) -> None:
    seqlens = [data.draw(st.integers(0, 5000)) for _ in range(len(column) * k)]
    parts = get_seqlen_balanced_partitions(seqlens, k, equal_size=True)
    assert {len(part) for part in parts} == {len(column)}
    assert sorted(itertools.chain(*parts)) == list(range(len(seqlens)))
    sums = totals(seqlens, parts)
    assert max(sums) - min(sums) <= max(seqlens) - min(seqlens)


@pytest.mark.parametrize(
    ("seqlens", "k", "equal", "message"),
    [
        ([1, 2], 3, False, "2 sequences cannot fill 3 partitions"),
        ([1, 2, 3], 2, True, "3 sequences do not divide into 2"),
        ([1, -2], 1, False, "negative length -2"),
        ([1], 0, False, "k_partitions=0"),
    ],
)
def test_impossible_partitions_are_refused(seqlens: list[int], k: int, equal: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_seqlen_balanced_partitions(seqlens, k, equal)


def test_micro_batches_respect_the_token_limit_and_are_few() -> None:
    parts = plan_micro_batches([60, 50, 40, 30, 20], 100)
    assert totals([60, 50, 40, 30, 20], parts) == [100, 100]
    # 3 x 60 = 180 tokens would fit two batches of 100 by their total, but not by their pieces.
    assert plan_micro_batches([60, 60, 60], 100) == [[0], [1], [2]]
    assert len(plan_micro_batches([10] * 8, 1000, min_count=3)) == 3
    assert len(plan_micro_batches([10] * 8, 1000, min_count=3, multiple_of=4)) == 4
    assert plan_micro_batches([], 100) == []
    with pytest.raises(ValueError, match="a sample has 101 tokens and max_tokens is 100"):
        plan_micro_batches([101], 100)
    with pytest.raises(ValueError, match="multiple of 4"):
        plan_micro_batches([10, 10, 10], 100, multiple_of=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(100, 400))
def test_micro_batches_hold_every_sample_once(seqlens: list[int], limit: int) -> None:
    parts = plan_micro_batches(seqlens, limit)
    assert sorted(itertools.chain(*parts)) == list(range(len(seqlens)))
    assert max(totals(seqlens, parts)) <= limit


def mini_batches(order: list[int], mini_batch_size: int, dp_size: int) -> list[set[int]]:
    """What the ranks do: cut the batch into chunks, each chunk into mini-batches; then join over ranks."""
    chunk = len(order) // dp_size
    share = mini_batch_size // dp_size
    ranks = [order[r * chunk : (r + 1) * chunk] for r in range(dp_size)]
    return [{index for rank in ranks for index in rank[start : start + share]} for start in range(0, chunk, share or 1)]


def test_arranged_mini_batches_by_hand() -> None:
    lengths = [5, 1, 1, 5, 2, 2, 9, 1]
    assert arrange_mini_batches(lengths, 4, 2, balance=False) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert arrange_mini_batches(lengths, 4, 1) == [0, 1, 2, 3, 4, 5, 6, 7]
    # First mini-batch 6 + 6. In the second the pieces are {9, 1} and {2, 2}.
    assert arrange_mini_batches(lengths, 4, 2) == [0, 2, 6, 7, 1, 3, 4, 5]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.booleans(), st.data())
def test_global_mini_batches_do_not_depend_on_the_number_of_ranks(
    dp_size: int, share: int, full: int, tail: int, balance: bool, data: st.DataObject
) -> None:
    size = dp_size * share
    count = full * size + dp_size * min(tail, share)
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=count, max_size=count))
    order = arrange_mini_batches(lengths, size, dp_size, balance)
    expected = [set(range(start, min(start + size, count))) for start in range(0, count, size)]
    assert mini_batches(order, size, dp_size) == expected


def test_balance_levels_the_ranks_within_each_mini_batch_and_over_the_batch() -> None:
    lengths = [100, 10, 10, 10] * 4  # each mini-batch of four has one long sample
    order = arrange_mini_batches(lengths, 4, 2)
    ranks = [[lengths[i] for i in order[:8]], [lengths[i] for i in order[8:]]]
    assert [sum(rank) for rank in ranks] == [260, 260]  # the long samples alternate between the ranks


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="mini-batch of 3 samples does not divide over 2"):
        arrange_mini_batches([1] * 6, 3, 2)
    with pytest.raises(ValueError, match="batch of 5 samples does not divide over 2"):
        arrange_mini_batches([1] * 5, 2, 2)
    with pytest.raises(ValueError, match="must be positive"):
        arrange_mini_batches([1], 0, 1)


def test_balance_metrics_compare_the_plain_cut_with_the_arrangement() -> None:
    assert seqlen_balance_metrics([4, 4, 1, 1], [[0, 2], [1, 3]]) == {
        "global_seqlen/min": 2,
        "global_seqlen/max": 8,
        "global_seqlen/minmax_diff": 6,
        "global_seqlen/balanced_min": 5,
        "global_seqlen/balanced_max": 5,
        "global_seqlen/mean": 5.0,
    }

"""Which requests run next, and how prompts are grouped into forwards."""

from __future__ import annotations

from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.hf.scheduler import PromptGroup, Scheduler, Sequence, split_for_prefill


def sequence(prompt: list[int], max_tokens: int = 10, name: str = "r") -> Sequence:
    return Sequence(GenerationRequest(prompt, SamplingParams(max_tokens), name), lambda completion: None)


def lengths(groups: list[PromptGroup]) -> list[tuple[int, int]]:
    return [(len(group.context_ids), len(group.members)) for group in groups]


def test_equal_prompts_enter_together_longest_first() -> None:
    scheduler = Scheduler(max_rows=8)
    scheduler.add([sequence([1, 2]), sequence([1, 2, 3]), sequence([1, 2]), sequence([9])])
    assert lengths(scheduler.admit(running=0, columns=0)) == [(3, 1), (2, 2), (1, 1)]
    assert scheduler.waiting == 0
    assert scheduler.admit(running=4, columns=13) == []


def test_a_group_waits_until_it_fits_as_a_whole() -> None:
    scheduler = Scheduler(max_rows=4)
    scheduler.add([sequence([1, 2])] + [sequence([5])] * 4)
    assert lengths(scheduler.admit(running=0, columns=0)) == [(2, 1)]
    assert scheduler.admit(running=1, columns=12) == []
    assert lengths(scheduler.admit(running=0, columns=0)) == [(1, 4)]


def test_a_group_larger_than_the_batch_enters_in_parts() -> None:
    scheduler = Scheduler(max_rows=3)
    scheduler.add([sequence([5]) for _ in range(7)])
    assert [lengths(scheduler.admit(0, 0)) for _ in range(4)] == [[(1, 3)], [(1, 3)], [(1, 1)], []]


def test_earlier_calls_go_first() -> None:
    scheduler = Scheduler(max_rows=2)
    scheduler.add([sequence([1]), sequence([2, 2])])
    scheduler.add([sequence([3, 3, 3])])
    assert lengths(scheduler.admit(0, 0)) == [(2, 1), (1, 1)]
    assert lengths(scheduler.admit(0, 0)) == [(3, 1)]


def test_the_cache_limit_counts_the_widest_row_for_all() -> None:
    scheduler = Scheduler(max_rows=100, max_cached_tokens=60)
    scheduler.add([sequence([row] * 10) for row in range(8)])  # 20 columns each
    assert lengths(scheduler.admit(0, 0)) == [(10, 1)] * 3
    assert scheduler.admit(running=3, columns=20) == []
    scheduler = Scheduler(max_rows=100, max_cached_tokens=5)  # too small for anything: still one at a time
    scheduler.add([sequence([1] * 10), sequence([2] * 10)])
    assert lengths(scheduler.admit(0, 0)) == [(10, 1)]


def test_few_free_rows_are_not_worth_a_prefill() -> None:
    scheduler = Scheduler(max_rows=16)
    scheduler.add([sequence([row]) for row in range(20)])
    assert len(scheduler.admit(0, 0)) == 16
    assert scheduler.admit(running=13, columns=11) == []
    assert len(scheduler.admit(running=12, columns=11)) == 4
    scheduler.add([sequence([50])])
    assert len(scheduler.admit(running=15, columns=11)) == 1  # nobody else waits


def test_remove_takes_out_what_is_unwanted() -> None:
    scheduler = Scheduler(max_rows=4)
    scheduler.add([sequence([1], name="a"), sequence([1], name="b"), sequence([2], name="c")])
    removed = scheduler.remove(lambda item: item.request.request_id != "b")
    assert [item.request.request_id for item in removed] == ["a", "c"]
    assert [item.request.request_id for item in scheduler] == ["b"]
    assert lengths(scheduler.admit(0, 0)) == [(1, 1)]


def test_prefill_is_split_where_padding_would_cost_more_than_a_forward() -> None:
    groups = [PromptGroup([0] * length, 1) for length in (50, 49, 48, 20, 20, 19)]

    def pieces(max_tokens: int, forward_cost: float) -> list[list[int]]:
        return [[len(g.context_ids) for g in piece] for piece in split_for_prefill(groups, max_tokens, forward_cost)]

    assert pieces(10_000, 10) == [[50, 49, 48], [20, 20, 19]]
    assert pieces(10_000, 0) == [[50], [49], [48], [20, 20], [19]]
    assert pieces(10_000, 1000) == [[50, 49, 48, 20, 20, 19]]
    assert pieces(100, 1000) == [[50, 49], [48, 20], [20, 19]]
    assert pieces(1, 1000) == [[50], [49], [48], [20], [20], [19]]

"""Which requests run next."""

from __future__ import annotations

from verl.workers.rollout.hf.kv_budget import CacheBudget, Progress
from verl.workers.rollout.hf.scheduler import PromptGroup, Scheduler, Sequence
from verl.workers.rollout.types import GenerationRequest, SamplingParams


def sequence(prompt: list[int], max_tokens: int = 10, name: str = "r") -> Sequence:
    return Sequence(GenerationRequest(prompt, SamplingParams(max_tokens), name), lambda completion: None)


def lengths(groups: list[PromptGroup]) -> list[tuple[int, int]]:
    return [(len(group.prompt_ids), len(group.members)) for group in groups]


def running(count: int) -> list[Progress]:
    return [Progress(1, 0, 10)] * count


def test_equal_prompts_enter_together_longest_first() -> None:
    scheduler = Scheduler(max_rows=8)
    scheduler.add([sequence([1, 2]), sequence([1, 2, 3]), sequence([1, 2]), sequence([9])])
    assert lengths(scheduler.admit([])) == [(3, 1), (2, 2), (1, 1)]
    assert scheduler.waiting == 0
    assert scheduler.admit(running(4)) == []


def test_a_group_enters_in_parts_where_it_does_not_fit() -> None:
    scheduler = Scheduler(max_rows=4)
    scheduler.add([sequence([1, 2])] + [sequence([5]) for _ in range(4)])
    assert lengths(scheduler.admit([])) == [(2, 1), (1, 3)]
    assert lengths(scheduler.admit(running(1))) == [(1, 1)]
    scheduler = Scheduler(max_rows=3)
    scheduler.add([sequence([5]) for _ in range(7)])
    assert [lengths(scheduler.admit([])) for _ in range(4)] == [[(1, 3)], [(1, 3)], [(1, 1)], []]


def test_earlier_calls_go_first() -> None:
    scheduler = Scheduler(max_rows=2)
    scheduler.add([sequence([1]), sequence([2, 2])])
    scheduler.add([sequence([3, 3, 3])])
    assert lengths(scheduler.admit([])) == [(2, 1), (1, 1)]
    assert lengths(scheduler.admit([])) == [(3, 1)]


def test_the_cache_limit_counts_the_widest_row_for_all() -> None:
    scheduler = Scheduler(8, CacheBudget(60))
    scheduler.add([sequence([row] * 10, 2) for row in range(8)])  # 12 columns each
    assert lengths(scheduler.admit([])) == [(10, 1)] * 5
    assert scheduler.admit([Progress(20, 10, 10)] * 3) == []
    scheduler = Scheduler(100, CacheBudget(5))  # nothing fits: one at a time, the engine has checked that it does
    scheduler.add([sequence([1] * 10), sequence([2] * 10)])
    assert lengths(scheduler.admit([])) == [(10, 1)]


def test_preempted_sequences_come_back_first_in_their_old_order() -> None:
    scheduler = Scheduler(max_rows=4)
    scheduler.add([sequence([row], name=str(row)) for row in range(5)] + [sequence([9, 9, 9], name="long")])
    first = [member for group in scheduler.admit([]) for member in group.members]
    assert [member.request.request_id for member in first] == ["long", "0", "1", "2"]
    for member in first[2:]:
        member.put_back([7, 8], [-1.0, -2.0])
    scheduler.put_back([first[3], first[2]])
    assert scheduler.waiting == 4
    scheduler.max_rows = 3
    again = [member for group in scheduler.admit([]) for member in group.members]
    assert [member.request.request_id for member in again] == ["1", "2", "3"]
    assert [member.context_ids for member in again] == [[1, 7, 8], [2, 7, 8], [3]]
    assert [(member.budget, member.sampled, member.total_length) for member in again[:2]] == [(8, 2, 11)] * 2
    assert again[0].completion([6], [-3.0], "stop").token_ids == [7, 8, 6]
    assert again[0].completion([6], [-3.0], "stop").log_probs == [-1.0, -2.0, -3.0]


def test_few_free_rows_are_not_worth_a_prefill() -> None:
    scheduler = Scheduler(max_rows=16)
    scheduler.add([sequence([row]) for row in range(20)])
    assert len(scheduler.admit([])) == 16
    assert scheduler.admit(running(13)) == []
    assert len(scheduler.admit(running(12))) == 4
    scheduler.add([sequence([50])])
    assert len(scheduler.admit(running(15))) == 1  # nobody else waits


def test_remove_takes_out_what_is_unwanted() -> None:
    scheduler = Scheduler(max_rows=4)
    scheduler.add([sequence([1], name="a"), sequence([1], name="b"), sequence([2], name="c")])
    removed = scheduler.remove(lambda item: item.request.request_id != "b")
    assert [item.request.request_id for item in removed] == ["a", "c"]
    assert [item.request.request_id for item in scheduler] == ["b"]
    assert lengths(scheduler.admit([])) == [(1, 1)]

"""What is computed when sequences enter, and what is shared."""

from __future__ import annotations

from typing import Any

import torch

from verl.workers.rollout.hf.kv_cache import Write
from verl.workers.rollout.hf.prefill import (
    Beginning,
    PrefillPlan,
    extension_writes,
    plan_prefill,
    prefill_writes,
    split_for_prefill,
)
from verl.workers.rollout.hf.scheduler import PromptGroup, Sequence
from verl.workers.rollout.types import GenerationRequest, SamplingParams


def sequence(prompt: list[int], sampled: int = 0) -> Sequence:
    made = Sequence(GenerationRequest(prompt, SamplingParams(50), "r"), lambda completion: None)
    if sampled:
        made.put_back([9] * sampled, [-1.0] * sampled)
    return made


def group(prompt: int, sampled: tuple[int, ...]) -> PromptGroup:
    members = [sequence([prompt] * prompt, count) for count in sampled]
    return PromptGroup(members[0].request.prompt_ids, 1, members)


def shape(plan: PrefillPlan) -> dict[str, Any]:
    return {
        "beginnings": [(len(b.ids), len(b.members), len(b.continued)) for b in plan.beginnings],
        "copies": [row for row, _ in plan.copies],
        "continued": [count for _, count in plan.continued],
        "recomputed": plan.recomputed,
    }


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    plan = plan_prefill([group(20, (0, 0)), group(30, (0, 5, 7))], {}, forward_cost=10)
    assert shape(plan) == {
        "beginnings": [(20, 2, 0), (30, 1, 2)],
        "copies": [],
        "continued": [7, 5],
        "recomputed": 12,
    }


def test_a_row_of_the_batch_gives_its_prompt() -> None:
    mine = group(20, (0, 0, 4))
    plan = plan_prefill([mine, group(30, (6,))], {mine.members[0].key: 3}, forward_cost=10)
    # nobody else has the prompt of 30 tokens: its only sample is computed in one piece
    assert shape(plan) == {
        "beginnings": [(36, 1, 0)],
        "copies": [3, 3, 3],
        "continued": [4, 1, 1],
        "recomputed": 40,
    }


def test_nothing_is_shared_where_another_forward_costs_more() -> None:
    plan = plan_prefill([group(20, (3, 5))], {}, forward_cost=20)
    assert shape(plan)["beginnings"] == [(23, 1, 0), (25, 1, 0)]
    assert shape(plan)["recomputed"] == 48
    assert shape(plan_prefill([group(20, (3, 5))], {}, forward_cost=19))["beginnings"] == [(20, 0, 2)]


def test_a_prompt_of_one_token_is_computed_for_what_follows_it() -> None:
    mine = group(1, (0, 0))
    plan = plan_prefill([mine], {mine.members[0].key: 0}, forward_cost=-1.0)
    assert shape(plan)["beginnings"] == [(1, 2, 0)]


def test_forwards_are_split_where_padding_would_cost_more_than_another() -> None:
    def pieces(max_tokens: int, forward_cost: float) -> list[list[int]]:
        return split_for_prefill((20, 50, 48, 19, 49, 20), lambda length: length, max_tokens, forward_cost)

    assert pieces(10_000, 10) == [[50, 49, 48], [20, 20, 19]]
    assert pieces(10_000, 0) == [[50], [49], [48], [20, 20], [19]]
    assert pieces(10_000, 1000) == [[50, 49, 48, 20, 20, 19]]
    assert pieces(100, 1000) == [[50, 49], [48, 20], [20, 19]]
    assert pieces(1, 1000) == [[50], [49], [48], [20], [20], [19]]


def test_writes_cover_every_row_once() -> None:
    """Prompts of 7, 7 and 4 tokens for 1, 2 and 3 rows; one sample of the first goes on with 2 tokens."""
    going = sequence([1] * 7, 2)
    beginnings = [
        Beginning([1] * 7, None, [sequence([1] * 7)], [going]),
        Beginning([2] * 7, None, [sequence([2] * 7) for _ in range(2)]),
        Beginning([3] * 4, None, [sequence([3] * 4) for _ in range(3)]),
    ]
    members = [member for item in beginnings for member in item.members] + [going]
    place = {id(member): row for row, member in enumerate(members, start=10)}
    first, equal, last = prefill_writes(beginnings, place, torch.tensor([0, 1, 1, 2, 2, 2]), 20)
    assert first == Write(slice(16, 17), 18, 7, slice(0, 1))
    assert (equal.rows, equal.end, equal.length) == (slice(10, 13), 20, 7)
    assert equal.source.tolist() == [0, 1, 1]
    assert last == Write(slice(13, 16), 20, 4, slice(2, 3))
    assert extension_writes([5, 5, 2], 7, 20) == [
        Write(slice(7, 9), 20, 5, slice(0, 2)),
        Write(slice(9, 10), 20, 2, slice(2, 3)),
    ]

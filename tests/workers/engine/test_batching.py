"""Cutting and joining batches."""

from __future__ import annotations

import pytest
import torch

from tests.models.families import make_batch
from verl.errors import ConfigError, DataError, SchemaError
from verl.utils.metrics import MetricSet, mmax, mmean, msum
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.batching import as_tensordict, join_rows, plan_batch, reduce_metrics, take_rows


def test_fixed_size_cuts_in_order_and_counts_the_batch() -> None:
    batch = make_batch([3] * 5, [2, 1, 3, 1, 1])
    batch["response_mask"][4] = 0
    plan = plan_batch(as_tensordict(batch), MicroBatching(size=2))
    assert plan.parts == [[0, 1], [2, 3], [4]]
    assert (plan.info.dp_size, plan.info.batch_num_tokens, plan.info.global_batch_size) == (1, 7, 4)


def test_without_a_rule_the_batch_is_one_part() -> None:
    assert plan_batch(as_tensordict(make_batch([3] * 3, [2] * 3)), MicroBatching()).parts == [[0, 1, 2]]


def test_token_budget_is_kept_and_balanced() -> None:
    batch = make_batch([10, 2, 2, 9, 1, 8], [2, 2, 2, 2, 2, 2])  # 12, 4, 4, 11, 3, 10 tokens
    plan = plan_batch(as_tensordict(batch), MicroBatching(max_tokens=16))
    sizes = [sum([12, 4, 4, 11, 3, 10][i] for i in part) for part in plan.parts]
    assert sorted(i for part in plan.parts for i in part) == [0, 1, 2, 3, 4, 5]
    assert sorted(sizes) == [14, 15, 15]


def test_rows_of_a_unit_stay_together() -> None:
    batch = make_batch([2, 2, 9, 2, 2, 2], [2, 2, 2, 2, 2, 2])  # units of 8, 15 and 8 tokens
    plan = plan_batch(as_tensordict(batch), MicroBatching(max_tokens=16, unit=2))
    assert sorted(plan.parts) == [[0, 1, 4, 5], [2, 3]]
    assert plan_batch(as_tensordict(batch), MicroBatching(size=4, unit=2)).parts == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="size=3 must be a multiple of the 2 rows"):
        MicroBatching(size=3, unit=2)
    with pytest.raises(SchemaError, match="5 rows are no whole number of units of 2"):
        plan_batch(as_tensordict({name: value[:5] for name, value in batch.items()}), MicroBatching(unit=2))


def test_rows_of_one_prompt_stay_together_and_count_it_once() -> None:
    batch = make_batch([20] * 4 + [20] * 4, [3] * 8, equal_prompts_of=4)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # shuffled
    batch = {name: value[order] for name, value in batch.items()}
    plan = plan_batch(as_tensordict(batch), MicroBatching(max_tokens=32), share_prompts=True)
    assert sorted(plan.parts) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # a budget that cannot hold the group splits it
    plan = plan_batch(as_tensordict(batch), MicroBatching(max_tokens=26), share_prompts=True)
    assert sorted(len(part) for part in plan.parts) == [2, 2, 2, 2]


def test_budget_holds_where_sharing_does_not_pay() -> None:
    """Prompts of 4 tokens are a tenth of nothing here: such rows run whole, so the budget must count them whole."""
    batch = make_batch([4] * 8, [45] * 8, equal_prompts_of=2)  # a pair: 94 tokens shared, 98 whole
    plan = plan_batch(as_tensordict(batch), MicroBatching(max_tokens=95), share_prompts=True)
    assert all(49 * len(part) <= 95 for part in plan.parts)


def test_a_row_longer_than_the_budget_is_an_error() -> None:
    with pytest.raises(DataError, match="12 tokens"):
        plan_batch(as_tensordict(make_batch([10], [2])), MicroBatching(max_tokens=11))


def test_micro_batching_takes_one_rule() -> None:
    with pytest.raises(ConfigError, match="not both"):
        MicroBatching(size=1, max_tokens=5)
    with pytest.raises(ConfigError, match="at least 1"):
        MicroBatching(size=0)


def test_missing_fields_are_named() -> None:
    batch = make_batch([1], [1])
    del batch["position_ids"]
    with pytest.raises(SchemaError, match="position_ids"):
        as_tensordict(batch)


def test_results_come_back_in_the_order_of_the_rows() -> None:
    batch = as_tensordict({**make_batch([2] * 5, [1] * 5), "tag": torch.arange(5.0)})
    parts = [[3, 0], [1], [4, 2]]
    pieces = [{"out": take_rows(batch, part, 5)["tag"] * 10} for part in parts]
    assert join_rows(pieces, parts, 5)["out"].tolist() == [0, 10, 20, 30, 40]


def test_consecutive_rows_are_views() -> None:
    batch = as_tensordict(make_batch([2] * 5, [1] * 5))
    part = take_rows(batch, [1, 2], 5)
    assert part["input_ids"].data_ptr() == batch["input_ids"][1].data_ptr()
    assert take_rows(batch, [0, 1, 2, 3, 4], 5) is batch


def test_metrics_of_micro_batches_combine_by_their_rule() -> None:
    pieces = [
        MetricSet({"loss": msum(1.0), "acc": mmean(3.0, 4.0), "top": mmax(1.0)}),
        MetricSet({"loss": msum(2.0), "acc": mmean(1.0, 1.0), "top": mmax(5.0)}),
    ]
    assert reduce_metrics(pieces).values_by_name() == {"loss": 3.0, "acc": 0.8, "top": 5.0}

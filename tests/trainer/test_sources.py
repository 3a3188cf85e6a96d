"""Sources: what is drawn, generated and scored for a step, and what waits for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.checkpoint.state import load_state, save_state
from verl.data.collate import object_array
from verl.errors import CheckpointError, DataError, RewardError
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import Scorer, outcomes
from verl.trainer.ppo.sources.base import SyncSource, steps_in_run
from verl.trainer.ppo.sources.group_filter import GroupFilter
from verl.trainer.ppo.sources.kept_batches import from_plain, to_plain
from verl.utils.metrics import MetricSet, msum
from verl.utils.timing import StepTimer

WIDTH = 3


class Prompts:
    """Batches of ``size`` numbered prompts, ``per_epoch`` batches an epoch."""

    def __init__(self, size: int, per_epoch: int = 100) -> None:
        self.size, self.per_epoch, self.drawn = size, per_epoch, 0

    @property
    def epoch(self) -> int:
        return self.drawn // self.per_epoch

    def __iter__(self) -> Any:
        while True:
            first = self.drawn * self.size
            self.drawn += 1
            yield {
                "input_ids": torch.arange(first, first + self.size)[:, None],
                "attention_mask": torch.ones(self.size, 1, dtype=torch.int64),
                "position_ids": torch.zeros(self.size, 1, dtype=torch.int64),
                "data_source": np.array(["numbers"] * self.size, dtype=object),
            }
            if self.drawn % self.per_epoch == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Rollout:
    """Answers with ``[sample_index, prompt, greedy]`` and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[DataProto] = []
        self.counts = MetricSet()

    def generate_sequences(self, request: DataProto) -> DataProto:
        self.requests.append(request)
        tensors = request.batch
        rows = len(request)
        greedy = tensors["greedy"].long() if "greedy" in tensors else torch.zeros(rows, dtype=torch.int64)
        responses = torch.stack([tensors["sample_index"], tensors["input_ids"][:, 0], greedy], dim=1)
        return DataProto.from_dict(
            {
                "prompts": tensors["input_ids"],
                "responses": responses,
                "response_mask": torch.ones(rows, WIDTH, dtype=torch.int64),
            },
            meta_info={"metrics": self.counts} if self.counts else {},
        )


def reward(score: Callable[[Sequence[int]], float | None]) -> Callable[..., Any]:
    """A reward function from ``[sample_index, prompt, greedy]`` to a score; None abstains."""

    def reward_fn(batch: DataProto, return_dict: bool = True) -> dict[str, Any]:
        values = [score(row) for row in batch.batch["responses"].tolist()]
        tensor = torch.zeros(len(batch), WIDTH)
        tensor[:, -1] = torch.tensor([0.0 if value is None else value for value in values])
        return {
            "reward_tensor": tensor,
            "sample_mask": torch.tensor([value is not None for value in values]),
            "reward_extra_info": {"parts": [[1, 2]] * len(values)},
            "reward_metrics": {"reward/abstained": float(sum(value is None for value in values))},
        }

    return reward_fn


def sync_source(score: Callable[[Sequence[int]], float | None], size: int = 2, n: int = 2, **kw: Any) -> SyncSource:
    return SyncSource(Prompts(size), Rollout(), n, Scorer(reward(score)), **kw)


def test_a_batch_is_generated_scored_and_timed() -> None:
    timer = StepTimer()
    source = sync_source(lambda row: float(row[0]))
    batch, metrics = source.next_batch(7, timer)
    assert batch.batch["responses"][:, 0].tolist() == [0, 1, 2, 3]
    assert batch.non_tensor_batch["uid"].tolist() == ["7-0", "7-0", "7-1", "7-1"]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [0, 1, 2, 3]
    assert batch.non_tensor_batch["reward_parts"][0] == [1, 2]
    assert metrics == {"reward/abstained": 0.0}
    assert set(timer.seconds) == {"gen", "reward"}
    assert "greedy" not in source.rollout.requests[0].batch


def test_what_the_rollout_counts_is_a_metric_of_the_step() -> None:
    source = sync_source(lambda row: float(row[0]))
    source.rollout.counts = MetricSet({"rollout/preemptions": msum(3)})
    batch, metrics = source.next_batch(1, StepTimer())
    assert metrics["rollout/preemptions"] == 3
    assert "metrics" not in batch.meta_info


def test_further_batches_of_a_step_have_other_prompts_seeds_and_uids() -> None:
    source = sync_source(lambda row: 0.0)
    first, _ = source.next_batch(1, StepTimer())
    second, _ = source.next_batch(1, StepTimer())
    later, _ = source.next_batch(2, StepTimer())
    assert second.batch["prompts"].flatten().tolist() == [2, 2, 3, 3]
    assert second.batch["sample_index"].tolist() == [4, 5, 6, 7]
    assert not set(first.non_tensor_batch["uid"]) & set(second.non_tensor_batch["uid"])
    assert later.batch["sample_index"].tolist() == [0, 1, 2, 3]


def test_greedy_baselines_come_from_the_same_generation_call() -> None:
    def score(row: Sequence[int]) -> float:
        return 100.0 + row[1] if row[2] else float(row[0])

    source = sync_source(score, greedy_baselines=True)
    batch, _ = source.next_batch(1, StepTimer())
    (request,) = source.rollout.requests
    assert request.batch["greedy"].tolist() == [False] * 4 + [True] * 2
    assert source.fields == {"reward_baselines"}
    assert len(batch) == 4
    assert batch.batch["reward_baselines"].tolist() == [100, 100, 101, 101]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [0, 1, 2, 3]


def test_samples_without_a_baseline_are_left_out() -> None:
    source = sync_source(lambda row: None if row[2] and row[1] == 0 else 1.0, greedy_baselines=True)
    batch, _ = source.next_batch(1, StepTimer())
    assert batch.batch["has_score"].tolist() == [False, False, True, True]
    assert batch.batch["response_mask"].sum(-1).tolist() == [0, 0, 3, 3]


def test_steps_in_run() -> None:
    assert steps_in_run(5, 3, None) == 15
    assert steps_in_run(5, 3, 4) == 4


# ---- outcomes ----------------------------------------------------------------------------------------------------


def scored(scores: list[float], has_score: list[bool] | None = None, **extra: list[Any]) -> DataProto:
    return DataProto.from_dict(
        {
            "token_level_scores": torch.tensor(scores)[:, None],
            "has_score": torch.tensor(has_score or [True] * len(scores)),
        },
        {f"reward_{name}": object_array(values) for name, values in extra.items()},
    )


def test_outcomes_are_unshaped() -> None:
    assert outcomes(scored([0.5, 1.0])).tolist() == [0.5, 1.0]
    assert outcomes(scored([0.2, 1.0], acc=[1, True])).tolist() == [1.0, 1.0]
    assert outcomes(scored([0.2, 1.0], acc=[1, 1]), "seq_reward").tolist() == pytest.approx([0.2, 1.0])
    assert outcomes(scored([0.0, 1.0], [False, True]))[0].isnan()
    with pytest.raises(RewardError, match=r"does not report 'f1'; it reports acc"):
        outcomes(scored([0.0], acc=[1]), "f1")
    with pytest.raises(RewardError, match="reports 'pred' as 'x'"):
        outcomes(scored([0.0], pred=["x"]), "pred")


# ---- group filter ------------------------------------------------------------------------------------------------


def differs_for_odd_prompts(row: Sequence[int]) -> float:
    """The samples of prompts 1, 3, 5, ... differ; those of 0, 2, 4, ... are equal."""
    return float(row[1] % 2 == 1 and row[0] % 2)


def filtered(groups: int, score: Any = differs_for_odd_prompts, size: int = 4, **kw: Any) -> GroupFilter:
    return GroupFilter(sync_source(score, size=size), groups=groups, n=2, **kw)


def prompts_of(batch: DataProto) -> list[int]:
    return batch.batch["prompts"].flatten().tolist()


def test_exactly_the_wanted_groups_and_the_surplus_kept_in_order() -> None:
    source = filtered(3)
    batch, metrics = source.next_batch(1, StepTimer())
    # two batches of four prompts have the informative prompts 1, 3, 5, 7; one is left for the next step
    assert prompts_of(batch) == [1, 1, 3, 3, 5, 5]
    assert batch.batch["sample_index"].tolist() == list(range(6))
    assert metrics == {
        "reward/abstained": 0.0,
        "filter_groups/num_gen_batches": 2,
        "filter_groups/informative_fraction": 0.5,
        "filter_groups/surplus": 1,
        "filter_groups/filled": 0,
    }
    batch, metrics = source.next_batch(2, StepTimer())
    assert prompts_of(batch) == [7, 7, 9, 9, 11, 11]
    assert metrics["filter_groups/num_gen_batches"] == 1
    assert metrics["filter_groups/surplus"] == 0


def test_enough_groups_left_need_no_generation() -> None:
    source = filtered(2, size=10)
    source.next_batch(1, StepTimer())
    batch, metrics = source.next_batch(2, StepTimer())
    assert prompts_of(batch) == [5, 5, 7, 7]
    assert metrics["filter_groups/num_gen_batches"] == 0
    assert "filter_groups/informative_fraction" not in metrics
    assert len(source.source.rollout.requests) == 1


def test_running_out_of_batches_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        DataError, match=r"step 1: 2 batches with 8 groups gave 4 .* fewer than the 5 .*on_exhausted=fill"
    ):
        filtered(5, max_batches=2).next_batch(1, StepTimer())


def test_filling_up_keeps_the_size() -> None:
    batch, metrics = filtered(5, max_batches=2, fill=True).next_batch(1, StepTimer())
    assert prompts_of(batch) == [1, 1, 3, 3, 5, 5, 7, 7, 6, 6]
    assert metrics["filter_groups/filled"] == 1
    assert metrics["filter_groups/surplus"] == 0


def test_samples_without_a_score_do_not_make_a_group_informative() -> None:
    def score(row: Sequence[int]) -> float | None:
        return None if row[0] % 2 else 1.0

    with pytest.raises(DataError, match="gave 0 in which"):
        filtered(1, score, max_batches=1).next_batch(1, StepTimer())


def test_resume_is_exact(tmp_path: Path) -> None:
    whole, saved = filtered(3), filtered(3)
    whole.next_batch(1, StepTimer())
    saved.next_batch(1, StepTimer())
    save_state(tmp_path / "data.pt", saved.state_dict())
    resumed = filtered(3)
    resumed.load_state_dict(load_state(tmp_path / "data.pt"))
    for step in (2, 3, 4):
        (expected, a), (actual, b) = (source.next_batch(step, StepTimer()) for source in (whole, resumed))
        assert a == b
        assert set(expected.batch.keys()) == set(actual.batch.keys())
        for name, value in expected.batch.items():
            assert torch.equal(value, actual.batch[name]), name
            assert value.dtype == actual.batch[name].dtype
        assert expected.non_tensor_batch.keys() == actual.non_tensor_batch.keys()
        for name, values in expected.non_tensor_batch.items():
            assert values.tolist() == actual.non_tensor_batch[name].tolist(), name


def test_state_of_a_source_without_a_filter_is_taken_over() -> None:
    plain = sync_source(differs_for_odd_prompts, size=4)
    plain.next_batch(1, StepTimer())
    source = filtered(2)
    source.load_state_dict(plain.state_dict())
    assert prompts_of(source.next_batch(2, StepTimer())[0]) == [5, 5, 7, 7]


def test_groups_that_wait_cannot_be_lost_by_leaving_the_filter_out() -> None:
    source = filtered(3)
    source.next_batch(1, StepTimer())
    plain = sync_source(differs_for_odd_prompts, size=4)
    with pytest.raises(CheckpointError, match=r"keeps 2 samples .*algorithm\.filter_groups\.enable=True, as it was"):
        plain.load_state_dict(source.state_dict())
    source.next_batch(2, StepTimer())  # uses them up
    plain.load_state_dict(source.state_dict())
    assert prompts_of(plain.next_batch(3, StepTimer())[0])[0] == 12


def test_another_group_size_is_refused_on_resume() -> None:
    source = filtered(3)
    source.next_batch(1, StepTimer())
    other = GroupFilter(sync_source(differs_for_odd_prompts, n=4), groups=3, n=4)
    with pytest.raises(CheckpointError, match="no whole groups of 4"):
        other.load_state_dict(source.state_dict())


def test_batches_as_plain_values() -> None:
    columns = {
        "lists": object_array([[1, 2], [3, 4]]),
        "dicts": object_array([{"a": np.float64(0.5), "b": np.array([1, 2])}, {"a": None}]),
    }
    batch = DataProto.from_dict({"x": torch.arange(4).reshape(2, 2)}, columns)
    back = from_plain(to_plain(batch, what="groups", instead="drop them"))
    assert torch.equal(back.batch["x"], batch.batch["x"])
    assert back.non_tensor_batch["lists"].tolist() == [[1, 2], [3, 4]]
    assert back.non_tensor_batch["dicts"].tolist() == [{"a": 0.5, "b": [1, 2]}, {"a": None}]
    odd = DataProto.from_dict({"x": torch.zeros(1)}, {"odd": object_array([object()])})
    with pytest.raises(CheckpointError, match="object in column 'odd'"):
        to_plain(odd, what="groups", instead="drop them")

"""Batches to requests and completions to batches."""

from __future__ import annotations

import pytest
import torch

from verl.config import RolloutConfig
from verl.errors import DataError, SchemaError
from verl.protocol import DataProto
from verl.utils.seeding import derive_seed
from verl.workers.rollout.batch import EventCounts, batch_from_completions, pop_metrics, requests_from_batch
from verl.workers.rollout.types import Completion


def prompts(**fields: torch.Tensor) -> DataProto:
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 7], [0, 0, 0, 4]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
            **fields,
        }
    )


def test_requests_have_the_prompt_without_padding_and_their_own_seed() -> None:
    config = RolloutConfig(response_length=6, temperature=0.9, top_p=0.8, top_k=5)
    requests = requests_from_batch(
        prompts(sample_index=torch.tensor([10, 4, 7])), config, seed=3, step=12, validate=False
    )
    assert [request.prompt_ids for request in requests] == [[5, 6], [7, 8, 9, 7], [4]]
    assert [request.sampling.seed for request in requests] == [derive_seed(3, "rollout", 12, i) for i in (10, 4, 7)]
    sampling = requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (6, 0.9, 0.8, 5)
    assert len({request.request_id for request in requests}) == 3


def test_a_shard_gets_the_seeds_that_the_whole_batch_gives_its_rows() -> None:
    config = RolloutConfig(response_length=6)
    whole = prompts(sample_index=torch.arange(3))
    together = requests_from_batch(whole, config, seed=3, step=1, validate=False)
    shard = requests_from_batch(whole[1:], config, seed=3, step=1, validate=False)
    assert [r.sampling for r in shard] == [r.sampling for r in together[1:]]
    by_row = requests_from_batch(prompts(), config, seed=3, step=1, validate=False)
    assert [r.sampling for r in by_row] == [r.sampling for r in together]


def test_validation_samples_as_val_kwargs_say() -> None:
    config = RolloutConfig(response_length=6, temperature=0.9, top_p=0.5)
    requests = requests_from_batch(prompts(), config, seed=3, step=1, validate=True)
    assert all(request.sampling.greedy for request in requests)
    assert requests[0].sampling.top_p == 1.0
    assert requests[0].sampling.seed == derive_seed(3, "validation", 1, 0)
    config.val_kwargs.do_sample, config.val_kwargs.temperature = True, 0.6
    assert requests_from_batch(prompts(), config, seed=3, step=1, validate=True)[0].sampling.temperature == 0.6


def test_prompts_must_be_left_padded_and_complete() -> None:
    config = RolloutConfig(response_length=6)
    bad = prompts()
    bad.batch["attention_mask"] = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
    with pytest.raises(SchemaError, match="left-padded"):
        requests_from_batch(bad, config, seed=0, step=0, validate=False)
    with pytest.raises(SchemaError, match="attention_mask"):
        requests_from_batch(
            DataProto.from_dict({"input_ids": torch.zeros(2, 3, dtype=torch.long)}),
            config,
            seed=0,
            step=0,
            validate=False,
        )


def test_batch_from_completions_on_literal_numbers() -> None:
    out = batch_from_completions(
        prompts(),
        [
            Completion([11, 12, 0], [-0.5, -1.0, -2.0], "stop", 4),  # 0 is also the padding token: lengths decide
            Completion([13], [-0.25], "stop", 4, 5),
            Completion([], [], "abort", 4),
        ],
        response_length=4,
        pad_token_id=0,
    ).batch
    assert out["prompts"].tolist() == [[0, 0, 5, 6], [7, 8, 9, 7], [0, 0, 0, 4]]
    assert out["responses"].tolist() == [[11, 12, 0, 0], [13, 0, 0, 0], [0, 0, 0, 0]]
    assert out["input_ids"].tolist() == [
        [0, 0, 5, 6, 11, 12, 0, 0],
        [7, 8, 9, 7, 13, 0, 0, 0],
        [0, 0, 0, 4, 0, 0, 0, 0],
    ]
    assert out["response_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert out["attention_mask"].tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
    ]
    assert out["position_ids"].tolist() == [
        [0, 0, 0, 1, 2, 3, 4, 4],
        [0, 1, 2, 3, 4, 4, 4, 4],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert out["rollout_log_probs"].tolist() == [[-0.5, -1.0, -2.0, 0.0], [-0.25, 0.0, 0.0, 0.0], [0.0] * 4]
    assert out["rollout_log_probs"].dtype == torch.float32
    assert out["policy_version"].tolist() == [[4, 4], [4, 5], [4, 4]]
    assert out["policy_version"].dtype == torch.int32


def test_completions_must_fit() -> None:
    with pytest.raises(DataError, match="2 completions for 3 prompts"):
        batch_from_completions(prompts(), [Completion([1], [0.0], "stop")] * 2, 4, 0)
    with pytest.raises(DataError, match="completion 1 has 5 tokens"):
        batch_from_completions(
            prompts(),
            [Completion([1], [0.0], "stop"), Completion([1] * 5, [0.0] * 5, "length"), Completion([1], [0.0], "stop")],
            4,
            0,
        )


def test_a_batch_has_what_counters_gained_since_the_one_before() -> None:
    counts = EventCounts()

    def gained(**engines: dict[str, int]) -> dict[str, float]:
        return pop_metrics(counts.add_to(prompts(), engines))

    assert gained(a={"preemptions": 3}, b={"preemptions": 1}) == {"rollout/preemptions": 4.0}
    assert gained(a={"preemptions": 5}, b={"preemptions": 1}) == {"rollout/preemptions": 2.0}
    assert gained(a={"preemptions": 5}, b={"preemptions": 0}) == {"rollout/preemptions": 0.0}, "b was restarted"
    assert gained(a={}) == {}
    assert "metrics" not in prompts().meta_info

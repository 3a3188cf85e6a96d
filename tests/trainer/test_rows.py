"""Trajectories of several rows in a batch: layout, mini-batches, advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.gae import compute_gae_advantage_return
from verl.data.collate import object_array
from verl.protocol import DataProto
from verl.schema import check_batch
from verl.trainer.ppo.advantage import compute_advantage
from verl.trainer.ppo.metrics import compute_data_metrics
from verl.trainer.ppo.rows import PADDING, arrange_rows, compute_row_advantages, lay_out_rows, without_padding
from verl.trajectories.batch import EARLIER_ROWS
from verl.workers.engine.batching import MINI_BATCH_ROWS

P, R = 3, 8


def line(mask: list[int], first: int) -> dict[str, torch.Tensor]:
    """A row with the prompt (1, 2), a response as long as the mask, and token ids that count from ``first``."""
    count = len(mask)
    attention = torch.tensor([0] * (P - 2) + [1, 1] + [1] * count + [0] * (R - count))
    ids = torch.tensor([0] * (P - 2) + [1, 2] + list(range(first, first + count)) + [0] * (R - count))
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(0) - 1).clamp(min=0),
        "prompts": ids[:P],
        "responses": ids[P:],
        "response_mask": torch.tensor(mask + [0] * (R - count)),
    }


def trajectories(rows: list[list[list[int]]], scores: list[float], n: int = 2) -> DataProto:
    """A scored batch; each trajectory is the masks of its rows. Its log-probs are -1, -2, ... by token id."""
    lines = [line(own[-1], 100 * (number + 1) + 10 * (len(own) - 1)) for number, own in enumerate(rows)]
    tensors = {name: torch.stack([one[name] for one in lines]) for name in lines[0]}
    tensors["rollout_log_probs"] = -tensors["responses"].float() * tensors["response_mask"]
    tensors["token_level_scores"] = torch.zeros(len(rows), R)
    for number, own in enumerate(rows):
        ends = [column for column, sampled in enumerate(own[-1]) if sampled]
        if ends:
            tensors["token_level_scores"][number, ends[-1]] = scores[number]
    tensors["sample_index"] = torch.arange(len(rows))
    tensors["has_score"] = torch.ones(len(rows), dtype=torch.bool)
    earlier: list[Any] = []
    for number, own in enumerate(rows):
        more = []
        for place, mask in enumerate(own[:-1]):
            first = 100 * (number + 1) + 10 * place
            ids = list(range(first, first + len(mask)))
            more.append(
                {
                    "prompt_ids": [1, 2],
                    "response_ids": ids,
                    "response_mask": mask,
                    "response_logprobs": [-float(token) * sampled for token, sampled in zip(ids, mask, strict=True)],
                    "token_versions": None,
                    "turn_scores": None,
                }
            )
        earlier.append(more or None)
    columns = {
        "uid": object_array([f"u{number // n}" for number in range(len(rows))]),
        "__num_turns__": object_array([2 * len(own) for own in rows]),
        EARLIER_ROWS: object_array(earlier),
    }
    return DataProto.from_dict(tensors, columns)


FORKED = [[[1, 1], [0, 0, 1, 1, 1]], [[1]], [[1, 0, 1], [0, 1], [0, 0, 0, 1]], [[1, 1, 1]]]


def test_every_row_gets_a_line_with_its_own_tokens() -> None:
    batch = lay_out_rows(trajectories(FORKED, [1.0, 0.0, 2.0, 4.0]))
    assert batch.batch["trajectory"].tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert batch.batch["last_row"].tolist() == [False, True, True, False, False, True, True]
    assert batch.batch["sample_index"].tolist() == list(range(7))
    assert batch.batch["responses"][0].tolist() == [100, 101, 0, 0, 0, 0, 0, 0]
    assert batch.batch["responses"][1, :5].tolist() == [110, 111, 112, 113, 114]
    assert batch.batch["input_ids"][3].tolist() == [0, 1, 2, 300, 301, 302, 0, 0, 0, 0, 0]
    assert batch.batch["position_ids"][3].tolist() == [0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert batch.batch["response_mask"][3].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert batch.batch["rollout_log_probs"][3].tolist() == [-300.0, 0.0, -302.0, 0, 0, 0, 0, 0]
    assert batch.batch["token_level_scores"].sum(1).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 4.0]
    assert batch.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u0", "u1", "u1", "u1", "u1"]
    check_batch(batch, "rollout")
    plain = trajectories([[[1]], [[1]]], [0.0, 1.0])
    plain.non_tensor_batch.pop(EARLIER_ROWS)
    assert lay_out_rows(plain) is plain


def test_scores_of_turns_stay_with_their_turns() -> None:
    batch = trajectories([[[1, 0, 1], [0, 1, 0, 1]]], [0.0], n=1)
    batch.non_tensor_batch[EARLIER_ROWS][0][0]["turn_scores"] = [0.25, 0.5]
    held = torch.tensor([[0.0, 0.75 + 2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]])
    batch.batch["turn_scores"] = held.clone()
    batch.batch["token_level_scores"] = held + torch.tensor([[0.0, 0, 0, 1.0, 0, 0, 0, 0]])
    rows = lay_out_rows(batch)
    assert rows.batch["token_level_scores"].tolist() == [[0.25, 0, 0.5, 0, 0, 0, 0, 0], [0, 2.0, 0, 5.0, 0, 0, 0, 0]]
    assert rows.batch["turn_scores"].tolist() == [[0.25, 0, 0.5, 0, 0, 0, 0, 0], [0, 2.0, 0, 4.0, 0, 0, 0, 0]]


def test_a_trajectory_without_a_score_has_no_earlier_rows() -> None:
    batch = trajectories(FORKED, [1.0, 0.0, 2.0, 4.0])
    batch.batch["response_mask"][2] = 0
    assert lay_out_rows(batch).batch["trajectory"].tolist() == [0, 0, 1, 2, 3]


# ---- mini-batches ------------------------------------------------------------------------------------------------

forks = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(forks, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
def test_mini_batches_have_whole_trajectories_whatever_the_ranks(
    counts: list[int], per_batch: int, ranks: int, balance: bool, shuffle: bool
) -> None:
    counts = counts * per_batch
    masks = [[[1] * (1 + (number + place) % 5) for place in range(count)] for number, count in enumerate(counts)]
    rows = lay_out_rows(trajectories(masks, [1.0] * len(counts), n=1))
    generator = torch.Generator().manual_seed(3) if shuffle else None
    batch = arrange_rows(rows, per_batch, ranks, balance=balance, generator=generator)
    size = batch.meta_info[MINI_BATCH_ROWS]
    assert size % ranks == 0
    assert len(batch) == size * (len(counts) // per_batch)
    chunks = batch.chunk(ranks)
    members = []
    for begin in range(0, size // ranks * (len(counts) // per_batch), size // ranks):
        owners = torch.cat([chunk.batch["trajectory"][begin : begin + size // ranks] for chunk in chunks]).tolist()
        own = [owner for owner in owners if owner != PADDING]
        assert len(set(own)) == per_batch
        assert sorted(own) == sorted(o for o in set(own) for _ in range(counts[o]))
        members += sorted(set(own))
    assert sorted(members) == list(range(len(counts)))
    if not shuffle:
        assert members == sorted(members)
    padding = batch.batch["trajectory"] == PADDING
    assert not batch.batch["response_mask"][padding].any()
    assert len(set(batch.batch["sample_index"].tolist())) == len(batch)
    real = without_padding(batch)
    assert sorted(real.batch["responses"].flatten().tolist()) == sorted(rows.batch["responses"].flatten().tolist())
    again = arrange_rows(batch, per_batch, ranks, balance=balance)
    assert len(without_padding(again)) == len(rows)


# ---- advantages --------------------------------------------------------------------------------------------------


def advantages(batch: DataProto, estimator: str, **config: Any) -> torch.Tensor:
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    done = compute_row_advantages(batch, {"adv_estimator": estimator, **config})
    return done.batch["advantages"]


def test_a_trajectory_is_one_member_of_its_group_however_many_rows_it_has() -> None:
    scores = [1.0, 0.0, 2.0, 4.0]
    rows = lay_out_rows(trajectories(FORKED, scores))
    found = advantages(arrange_rows(rows, 2, 2), "grpo")
    arranged = arrange_rows(rows, 2, 2)
    single = trajectories([[[1]], [[1]], [[1]], [[1]]], scores)
    single.batch["token_level_rewards"] = single.batch["token_level_scores"]
    expected = compute_advantage(single, {"adv_estimator": "grpo"}).batch["advantages"][:, 0].tolist()
    for owner, mask, values in zip(
        arranged.batch["trajectory"].tolist(), arranged.batch["response_mask"].bool(), found, strict=True
    ):
        assert (values[~mask] == 0).all()
        if owner == PADDING:
            assert not mask.any()
        else:
            assert values[mask].tolist() == pytest.approx([expected[owner]] * int(mask.sum()))


def test_values_of_the_next_row_follow_those_of_the_row_before() -> None:
    """GAE by hand: the trajectory as one row, its given tokens left out."""
    rows = lay_out_rows(trajectories([[[1, 1], [0, 0, 1, 1, 1]]], [1.0], n=1))
    rows.batch["values"] = torch.arange(2 * R).reshape(2, R) / 10
    found = advantages(rows, "gae", gamma=0.9, lam=0.8)
    values = torch.tensor([[0.0, 0.1, 1.0, 1.1, 1.2]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    expected, _ = compute_gae_advantage_return(rewards, values, torch.ones(1, 5), gamma=0.9, lam=0.8)
    assert torch.cat([found[0, :2], found[1, 2:5]]).tolist() == pytest.approx(expected[0].tolist(), abs=1e-5)


def test_turns_of_neighbouring_rows_are_different_turns() -> None:
    """GiGPO counts turns as runs of the mask: a row that begins with a sampled token must not touch the one before."""
    rows = lay_out_rows(trajectories([[[1, 1], [1, 1]], [[1], [1]]], [1.0, 0.0]))
    rows.non_tensor_batch["state_hashes"] = object_array([["a", "b"]] * len(rows))
    found = advantages(rows, "gigpo", gigpo={"step_advantage_w": 1.0, "mode": "mean_norm"}, gamma=1.0)
    assert torch.isfinite(found).all()
    assert (found[rows.batch["trajectory"] == 0].sum(1) > 0).all()


def test_metrics_count_a_trajectory_once() -> None:
    rows = lay_out_rows(trajectories(FORKED, [1.0, 0.0, 2.0, 4.0]))
    metrics = compute_data_metrics(without_padding(arrange_rows(rows, 2, 2)), False)
    assert metrics["critic/score/mean"] == pytest.approx(7 / 4)
    assert metrics["num_turns/mean"] == pytest.approx(np.mean([2 * len(own) for own in FORKED]))
    assert metrics["response_length/max"] == 5

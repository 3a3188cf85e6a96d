from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.batches import normal, poison
from verl.algorithms.aggregate import masked_whiten
from verl.algorithms.group import (
    Groups,
    compute_grpo_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.errors import DataError

Estimator = Callable[..., tuple[Tensor, Tensor]]
ALL: list[Estimator] = [
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
]


def outcome(scores: list[float], lengths: list[int], width: int = 4) -> tuple[Tensor, Tensor]:
    """Token rewards with each score on the last token, garbage behind it, and the mask."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).float()
    rewards = torch.zeros(len(scores), width)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        if length:
            rewards[i, length - 1] = score
    return poison(rewards, mask), mask


def uids(text: str) -> np.ndarray:
    return np.array(list(text), dtype=object)


def per_sample(advantages: Tensor) -> list[float]:
    return advantages[:, 0].tolist()


# group a: scores 1, 0, 2 (mean 1, std 1, lengths 1, 2, 3), group b: 5, 3 (mean 4, std sqrt 2, lengths 4, 1)
REWARDS, MASK = outcome([1.0, 5.0, 0.0, 3.0, 2.0], [1, 4, 2, 1, 3])
INDEX = uids("ababa")


@pytest.mark.parametrize(
    ("estimator", "kwargs", "expected"),
    [
        (compute_grpo_outcome_advantage, {}, [0.0, 1 / 2**0.5, -1.0, -1 / 2**0.5, 1.0]),
        (compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}, [0.0, 1.0, -1.0, -1.0, 1.0]),
        (compute_grpo_outcome_advantage, {"epsilon": 1.0}, [0.0, 1 / (2**0.5 + 1), -0.5, -1 / (2**0.5 + 1), 0.5]),
        # against the mean of the others: a: 1-1, 0-1.5, 2-.5; b: 5-3, 3-5
        (compute_rloo_outcome_advantage, {}, [0.0, 2.0, -1.5, -2.0, 1.5]),
        # length-weighted baselines: a: (1*1 + 2*0 + 3*2)/6 = 7/6; b: (4*5 + 1*3)/5 = 4.6
        (compute_opo_outcome_advantage, {}, [1 - 7 / 6, 0.4, -7 / 6, -1.6, 2 - 7 / 6]),
    ],
)
def test_literal_numbers(estimator: Estimator, kwargs: dict[str, object], expected: list[float]) -> None:
    advantages, returns = estimator(REWARDS, MASK, INDEX, **kwargs)
    np.testing.assert_allclose(per_sample(advantages), expected, rtol=2e-6, atol=1e-7)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, returns)


def test_reinforce_plus_plus_baseline_whitens_centred_scores_over_tokens() -> None:
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(REWARDS, MASK, INDEX)
    tokens = np.array([0.0] + [1.0] * 4 + [-1.0] * 2 + [-1.0] + [1.0] * 3)
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages[MASK.bool()], expected, rtol=1e-6)


@pytest.mark.parametrize("estimator", ALL)
def test_constant_along_a_response_and_zero_outside_the_mask(estimator: Estimator) -> None:
    advantages, _ = estimator(REWARDS, MASK, INDEX)
    for row, mask in zip(advantages, MASK, strict=True):
        assert row[mask.bool()].unique().numel() == 1
        assert not row[mask == 0].any()


@pytest.mark.parametrize("estimator", ALL[:3])
def test_a_lone_sample_keeps_its_score(estimator: Estimator) -> None:
    rewards, mask = outcome([0.7, 1.0, 0.0], [2, 1, 3])
    advantages, _ = estimator(rewards, mask, uids("xyy"))
    assert advantages[0].tolist() == pytest.approx([0.7, 0.7, 0.0, 0.0])


@pytest.mark.parametrize("estimator", ALL[:3])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6, -7.3, 0.7])
def test_equal_scores_give_exactly_zero(estimator: Estimator, score: float) -> None:
    """Not rounding noise: the mean of equal float64 numbers need not equal them."""
    rewards = torch.full((7, 1), score, dtype=torch.float64)
    advantages, _ = estimator(rewards, torch.ones(7, 1), uids("aaaaaaa"))
    assert not advantages.any()


@pytest.mark.parametrize("estimator", ALL)
def test_order_of_samples_only_permutes_the_result(estimator: Estimator) -> None:
    order = [4, 2, 0, 3, 1]
    straight, _ = estimator(REWARDS, MASK, INDEX)
    shuffled, _ = estimator(REWARDS[order], MASK[order], INDEX[order])
    torch.testing.assert_close(shuffled, straight[order])


@pytest.mark.parametrize("estimator", ALL)
def test_only_equality_of_uids_matters(estimator: Estimator) -> None:
    expected, _ = estimator(REWARDS, MASK, INDEX)
    for index in (uids("zqzqz"), [7, 1, 7, 1, 7], torch.tensor([0, 9, 0, 9, 0]), np.array(["p", "r", "p", "r", "p"])):
        assert torch.equal(estimator(REWARDS, MASK, index)[0], expected)


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8),
    scale=st.floats(0.1, 10),
    shift=st.floats(-10, 10),
)
def test_grpo_does_not_see_scale_and_offset_of_rewards(scores: list[float], scale: float, shift: float) -> None:
    assume(np.std(scores) > 0.1)
    n, index = len(scores), uids("a" * len(scores))
    mask = torch.ones(n, 1)
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    plain, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    affine, _ = compute_grpo_outcome_advantage(rewards * scale + shift, mask, index)
    torch.testing.assert_close(plain, affine, rtol=1e-3, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), groups=st.integers(1, 5))
def test_against_a_loop_over_groups(seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    index = rng.integers(0, groups, 16)
    mask = (torch.arange(5) < torch.tensor(rng.integers(1, 6, 16))[:, None]).float()
    rewards = normal(16, 5, seed=seed)
    scores = (rewards * mask).sum(-1).numpy()
    lengths = mask.sum(-1).numpy()
    grpo, rloo, opo = np.empty(16), np.empty(16), np.empty(16)
    for i in range(16):
        members = [j for j in range(16) if index[j] == index[i]]
        if len(members) == 1:
            grpo[i] = rloo[i] = opo[i] = scores[i]
            continue
        group = scores[members]
        grpo[i] = (scores[i] - group.mean()) / (group.std(ddof=1) + 1e-6)
        rloo[i] = scores[i] - np.mean([scores[j] for j in members if j != i])
        opo[i] = scores[i] - np.average(group, weights=lengths[members])
    for estimator, expected in zip(ALL, (grpo, rloo, opo), strict=False):
        advantages, _ = estimator(poison(rewards, mask), mask, index)
        np.testing.assert_allclose(per_sample(advantages), expected, rtol=1e-5, atol=1e-6)
    whitened, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    centred, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(whitened, masked_whiten(centred, mask))


def test_small_differences_between_large_scores_survive() -> None:
    """Group statistics in float32 would give a mean that is off by more than the scores differ."""
    rewards = torch.tensor([[1e6], [1e6 + 0.0625], [1e6 + 0.125]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), uids("aaa"))
    np.testing.assert_allclose(per_sample(advantages), [-1, 0, 1], atol=1e-4)


def test_an_empty_response_counts_with_score_zero() -> None:
    rewards, mask = outcome([4.0, 9.0], [2, 0])
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, uids("aa"))
    assert advantages.tolist() == [[4.0, 4.0, 0.0, 0.0], [0.0] * 4]


def test_a_uid_array_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(DataError, match="3 entries for 5 samples"):
        compute_grpo_outcome_advantage(REWARDS, MASK, INDEX[:3])


def test_groups_are_numbered_by_first_appearance() -> None:
    groups = Groups.from_index(uids("babcb"), 5, torch.device("cpu"))
    assert groups.ids.tolist() == [0, 1, 0, 2, 0]
    assert groups.size.tolist() == [3.0, 1.0, 1.0]

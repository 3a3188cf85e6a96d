"""Choosing tokens: the right distribution, safely, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.workers.rollout.sampler import (
    SamplingBatch,
    inverse_cdf,
    penalise_repetition,
    process_logits,
    sample,
    sum_by_doubling,
)
from verl.workers.rollout.types import SamplingParams
from verl.workers.rollout.uniforms import uniforms

CPU = torch.device("cpu")


def batch(*params: SamplingParams) -> SamplingBatch:
    return SamplingBatch.build(params, CPU)


def test_inverse_cdf_on_literal_numbers() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).repeat(7, 1)
    uniform = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 0.999, 1 - 2.0**-53], dtype=torch.float64)
    index, total = inverse_cdf(weights, uniform)
    assert index.tolist() == [1, 1, 3, 3, 4, 4, 4]
    assert total.tolist() == [4.0] * 7


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_a_sum_by_doubling_is_the_cumulative_sum(size: int) -> None:
    whole = torch.arange(3 * size).view(3, size).double()
    assert torch.equal(sum_by_doubling(whole), whole.cumsum(-1))
    parts = torch.rand(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(sum_by_doubling(parts), parts.cumsum(-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("size", [7, 512, 513, 1000, 5000])
def test_inverse_cdf_is_monotone_and_never_hits_zero(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(1, size, generator=generator) ** 8
    weights[torch.rand(1, size, generator=generator) < 0.7] = 0.0
    weights[0, 0] = weights[0, -1] = 0.0
    weights[0, size // 2] = 1e-30
    grid = torch.cat([torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1], torch.tensor([1 - 2.0**-53]).double()])
    index, _ = inverse_cdf(weights.expand(len(grid), -1).contiguous(), grid)
    assert bool((weights[0, index] > 0).all())
    assert bool((index.diff() >= 0).all())
    exact = np.cumsum(weights[0].double().numpy())
    expected = np.searchsorted(exact, grid.numpy() * exact[-1], side="right").clip(max=size - 1)
    assert float((torch.from_numpy(expected) != index).double().mean()) < 0.001


@pytest.mark.parametrize("size", [17, 700])
def test_samples_follow_the_softmax(size: int) -> None:
    """Chi-square over 60,000 draws; the bound is the mean of the statistic plus five standard deviations."""
    draws = 60_000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1.5
    uniform = torch.from_numpy(uniforms([123], draws)[0])
    counts = torch.zeros(size)
    for start in range(0, draws, 10_000):
        rows = logits.expand(10_000, -1)
        tokens, log_probs = sample(rows, batch(SamplingParams(1)), uniform[start : start + 10_000])
        counts += torch.bincount(tokens, minlength=size)
        torch.testing.assert_close(log_probs, logits.log_softmax(-1)[tokens], atol=2e-6, rtol=0)
    expected = logits.double().softmax(-1) * draws
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    assert abs(statistic - (size - 1)) < 5 * math.sqrt(2 * (size - 1))


def test_filters_keep_the_tokens_that_their_definitions_say() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05]).log().repeat(8, 1)
    settings = batch(
        SamplingParams(1, top_k=2),
        SamplingParams(1, top_p=0.7),  # 0.4 + 0.3 reaches 0.7
        SamplingParams(1, top_p=0.71),
        SamplingParams(1, min_p=0.3),  # at least 0.12
        SamplingParams(1, top_k=3, top_p=0.5),  # of 0.4, 0.3, 0.15: 0.47 then 0.82
        SamplingParams(1, top_p=0.01),  # always the best one
        SamplingParams(1),
        SamplingParams(1, temperature=0.5, top_p=0.8),  # squares: 0.16, 0.01, 0.09, 0.0225, 0.0025 of 0.285
    )
    kept = [row.isfinite().nonzero().squeeze(1).tolist() for row in process_logits(logits, settings)]
    assert kept == [[0, 2], [0, 2], [0, 2, 3], [0, 2, 3], [0, 2], [0], [0, 1, 2, 3, 4], [0, 2]]


def test_the_repetition_penalty_on_literal_numbers() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0], [2.0, -2.0, 1.0, 0.0], [2.0, -2.0, 1.0, 0.0]])
    seen = torch.tensor([[True, True, False, True]] * 3)
    changed = penalise_repetition(logits, torch.tensor([[4.0], [0.5], [1.0]]), seen)
    assert changed.tolist() == [[0.5, -8.0, 1.0, 0.0], [4.0, -1.0, 1.0, 0.0], [2.0, -2.0, 1.0, 0.0]]
    # greedy looks at it too; a row without a penalty is left alone
    settings = batch(SamplingParams(1, temperature=0.0, repetition_penalty=4.0), SamplingParams(1, temperature=0.0))
    tokens, log_probs = sample(logits[:2], settings, torch.zeros(2, dtype=torch.float64), seen[:2])
    assert tokens.tolist() == [2, 0]
    expected = torch.stack([changed[0].log_softmax(-1)[2], logits[1].log_softmax(-1)[0]])
    torch.testing.assert_close(log_probs, expected)


def test_rows_keep_their_own_settings_in_a_mixed_batch() -> None:
    params = [
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, temperature=0.7, top_k=3),
        SamplingParams(1, top_p=0.9),
        SamplingParams(1, temperature=2.0, min_p=0.05),
        SamplingParams(1),
    ]
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    uniform = torch.tensor([0.9, 0.2, 0.5, 0.7, 0.1], dtype=torch.float64)
    tokens, log_probs = sample(logits, batch(*params), uniform)
    for row, one in enumerate(params):
        token, log_prob = sample(logits[row : row + 1], batch(one), uniform[row : row + 1])
        assert token.item() == tokens[row].item()
        assert log_prob.item() == pytest.approx(log_probs[row].item(), abs=1e-6)
    assert tokens[0] == logits[0].argmax()
    assert log_probs[0].item() == pytest.approx(logits[0].log_softmax(-1).max().item(), abs=1e-6)


def test_temperature_near_zero_is_the_best_token() -> None:
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(3))
    uniform = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens, log_probs = sample(logits, batch(*[SamplingParams(1, temperature=1e-4)] * 64), uniform)
    assert torch.equal(tokens, logits.argmax(-1))
    assert log_probs.abs().max() < 1e-3


def test_large_logits_and_half_precision_are_safe() -> None:
    logits = torch.tensor([[3e4, -3e4, 2e4, 0.0]]).to(torch.bfloat16)
    tokens, log_probs = sample(logits, batch(SamplingParams(1)), torch.tensor([0.999999], dtype=torch.float64))
    assert tokens.item() == 0
    assert log_probs.dtype == torch.float32
    assert log_probs.item() == 0.0


def test_a_large_batch_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout import sampler

    logits = torch.randn(23, 40, generator=torch.Generator().manual_seed(5))
    uniform = torch.rand(23, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    settings = batch(*[SamplingParams(1, temperature=0.5 + row / 10, top_k=row + 1) for row in range(23)])
    whole = sample(logits, settings, uniform)
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", 40 * 5)
    pieces = sample(logits, settings, uniform)
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_uniforms_belong_to_their_seed_and_place() -> None:
    both = uniforms([5, 2**63 + 1], 6)
    assert both.shape == (2, 6)
    assert np.array_equal(uniforms([2**63 + 1], 6)[0], both[1])
    assert np.array_equal(uniforms([5], 3)[0], both[0, :3])
    assert np.array_equal(uniforms([5, 2**63 + 1], 3, [1, 3]), [both[0, 1:4], both[1, 3:6]])
    assert both.min() >= 0
    assert both.max() < 1


def test_uniforms_are_uniform_and_neighbouring_seeds_unrelated() -> None:
    values = uniforms(np.arange(2000), 200)
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    expected = values.size / 100
    assert abs(((counts - expected) ** 2 / expected).sum() - 99) < 5 * math.sqrt(2 * 99)
    neighbours = np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]
    in_time = np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(values.size)
    assert abs(in_time) < 5 / math.sqrt(values.size)

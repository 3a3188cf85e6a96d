from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import MODES, counts, normal, poison, ragged_mask
from verl.algorithms.aggregate import agg_loss, masked_mean, masked_sum, masked_var, masked_whiten
from verl.errors import ConfigError

NAN = float("nan")
LOSS = torch.tensor([[1.0, 2.0, 3.0, NAN], [10.0, NAN, NAN, NAN], [NAN] * 4])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 4),
    ],
)
def test_each_mode_on_literal_numbers(mode: str, expected: float) -> None:
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(expected)


def test_global_counts_and_dp_size_replace_the_local_ones() -> None:
    given_counts = {"dp_size": 4, "batch_num_tokens": 40, "global_batch_size": 20, "loss_scale_factor": 8}
    expected = {
        "token-mean": 16 / 40 * 4,
        "seq-mean-token-sum": 16 / 20 * 4,
        "seq-mean-token-mean": 12 / 20 * 4,
        "seq-mean-token-sum-norm": 16 / 20 / 8 * 4,
    }
    for mode, value in expected.items():
        assert agg_loss(LOSS, MASK, mode, **given_counts).item() == pytest.approx(value)
    as_tensor = {**given_counts, "batch_num_tokens": torch.tensor(40), "global_batch_size": torch.tensor(20)}
    assert agg_loss(LOSS, MASK, "token-mean", **as_tensor).item() == pytest.approx(1.6)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 7), max_size=3), ranks=st.sampled_from([1, 2, 4]))
def test_pieces_add_up_to_the_whole_in_value_and_gradient(mode: str, seed: int, cuts: list[int], ranks: int) -> None:
    mask, x = ragged_mask(8, 6, seed), normal(8, 6, seed=seed)
    whole_x = x.clone().requires_grad_()
    whole = agg_loss(whole_x.square(), mask, mode, loss_scale_factor=5.0)
    whole.backward()

    bounds = sorted({0, 8, *cuts})
    parts_x = x.clone().requires_grad_()
    info = {**counts(mask), "loss_scale_factor": 5.0, "dp_size": ranks}
    pieces = [agg_loss(parts_x[a:b].square(), mask[a:b], mode, **info) / ranks for a, b in itertools.pairwise(bounds)]
    total = torch.stack(pieces).sum()
    total.backward()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(parts_x.grad, whole_x.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_garbage_outside_the_mask_changes_neither_value_nor_gradient(mode: str, garbage: float) -> None:
    mask = ragged_mask(5, 6)
    clean = normal(5, 6, seed=1).requires_grad_()
    dirty = poison(clean.detach(), mask, garbage).requires_grad_()
    expected, actual = agg_loss(clean, mask, mode), agg_loss(dirty, mask, mode)
    expected.backward()
    actual.backward()
    assert torch.equal(actual, expected)
    assert torch.equal(dirty.grad, clean.grad)
    assert not dirty.grad[mask == 0].any()


@pytest.mark.parametrize("mode", MODES)
def test_sample_order_and_extra_padding_do_not_matter(mode: str) -> None:
    mask, loss = ragged_mask(6, 5), normal(6, 5, seed=2)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    expected = agg_loss(loss, mask, mode, loss_scale_factor=5)
    torch.testing.assert_close(agg_loss(loss[order], mask[order], mode, loss_scale_factor=5), expected)
    wide = torch.nn.functional.pad(loss, (0, 3, 0, 2), value=NAN)
    wide_mask = torch.nn.functional.pad(mask, (0, 3, 0, 2))
    torch.testing.assert_close(agg_loss(wide, wide_mask, mode, loss_scale_factor=5), expected)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_at_all_is_a_zero_that_can_be_differentiated(mode: str) -> None:
    loss = torch.full((2, 3), NAN, requires_grad=True)
    for info in ({}, {"batch_num_tokens": 0, "global_batch_size": 0}):
        value = agg_loss(loss, torch.zeros(2, 3), mode, **info)
        assert value.item() == 0.0
        value.backward()
    assert torch.equal(loss.grad, torch.zeros(2, 3))


def test_gradcheck() -> None:
    mask, x = ragged_mask(4, 3), normal(4, 3, seed=3).requires_grad_()
    for mode in MODES:
        assert torch.autograd.gradcheck(lambda v, mode=mode: agg_loss(v, mask, mode, dp_size=2), x)


def test_errors_name_the_choices() -> None:
    with pytest.raises(ConfigError, match="token_mean.*token-mean, seq-mean-token-sum"):
        agg_loss(LOSS, MASK, "token_mean")
    with pytest.raises(ConfigError, match="loss_scale_factor is 0"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", loss_scale_factor=0)


def test_masked_reductions_match_numpy_on_the_selected_values() -> None:
    mask, x = ragged_mask(5, 7), normal(5, 7, seed=4)
    dirty = poison(x, mask)
    chosen = x.numpy()[mask.numpy() > 0]
    assert masked_sum(dirty, mask).item() == pytest.approx(chosen.sum())
    assert masked_mean(dirty, mask).item() == pytest.approx(chosen.mean())
    assert masked_var(dirty, mask).item() == pytest.approx(chosen.var(ddof=1))
    rows = [x.numpy()[i][mask.numpy()[i] > 0] for i in range(5)]
    np.testing.assert_allclose(masked_sum(dirty, mask, dim=-1), [r.sum() for r in rows])
    np.testing.assert_allclose(masked_mean(dirty, mask, dim=-1), [r.mean() if r.size else 0.0 for r in rows])


def test_whitening_is_over_exactly_the_masked_values() -> None:
    mask, x = ragged_mask(5, 7), normal(5, 7, seed=5, scale=3.0) + 10
    white = masked_whiten(poison(x, mask), mask)
    chosen = white[mask.bool()].numpy()
    assert chosen.mean() == pytest.approx(0.0, abs=1e-12)
    assert chosen.std(ddof=1) == pytest.approx(1.0, rel=1e-6)
    assert not white[mask == 0].any()
    kept_mean = masked_whiten(x, mask, shift_mean=False)[mask.bool()].numpy()
    np.testing.assert_allclose(kept_mean, chosen + x[mask.bool()].numpy().mean())


def test_whitening_a_single_value_only_removes_its_mean() -> None:
    white = masked_whiten(torch.tensor([[7.0, NAN]]), torch.tensor([[1, 0]]))
    assert white.tolist() == [[0.0, 0.0]]

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.algorithms.batches import MODES, counts, normal, poison, ragged_mask
from verl.algorithms.value_loss import compute_value_loss
from verl.errors import ConfigError


def one(vpred: float, ret: float, value: float, clip: float | None) -> tuple[float, float]:
    tensors = (torch.tensor([[x]], dtype=torch.float64) for x in (vpred, ret, value))
    loss, clipfrac = compute_value_loss(*tensors, torch.ones(1, 1), clip)
    return loss.item(), clipfrac.item()


@pytest.mark.parametrize(
    ("args", "loss", "clipped"),
    [
        ((1.2, 2.0, 1.0, 0.5), 0.5 * 0.64, 0),  # moved less than the range
        ((1.8, 2.0, 1.0, 0.5), 0.5 * 0.25, 1),  # moved to the target, but counted as if at 1.5
        ((0.0, 2.0, 1.0, 0.5), 0.5 * 4.0, 0),  # moved away: the plain error is the larger
        ((1.8, 2.0, 1.0, None), 0.5 * 0.04, 0),  # no clipping
    ],
)
def test_literal_tokens(args: tuple[float, float, float, float | None], loss: float, clipped: int) -> None:
    value, clipfrac = one(*args)
    assert value == pytest.approx(loss)
    assert clipfrac == clipped


@pytest.mark.parametrize("mode", MODES)
def test_matches_numpy_in_pieces_with_garbage_outside_the_mask(mode: str) -> None:
    mask = ragged_mask(6, 5)
    vpreds, returns, values = (normal(6, 5, seed=s) for s in range(3))
    bounded = np.clip(vpreds.numpy(), values.numpy() - 0.5, values.numpy() + 0.5)
    plain, clipped = (vpreds - returns).numpy() ** 2, (bounded - returns.numpy()) ** 2
    sums = (0.5 * np.maximum(plain, clipped) * mask.numpy()).sum(-1)
    expected = {
        "token-mean": sums.sum() / mask.sum().item(),
        "seq-mean-token-sum": sums.sum() / 5,
        "seq-mean-token-mean": (sums / np.maximum(mask.numpy().sum(-1), 1)).sum() / 5,
        "seq-mean-token-sum-norm": sums.sum() / 5 / 7,
    }[mode]
    x = poison(vpreds, mask).requires_grad_()
    info = {"dp_size": 2, **counts(mask), "loss_scale_factor": 7}
    pieces = [
        compute_value_loss(x[a:b], poison(returns, mask)[a:b], poison(values, mask)[a:b], mask[a:b], 0.5, mode, **info)[
            0
        ]
        for a, b in ((0, 2), (2, 6))
    ]
    total = torch.stack(pieces).sum()
    total.backward()
    assert total.item() == pytest.approx(2 * expected)
    assert torch.isfinite(x.grad).all()
    assert not x.grad[mask == 0].any()

    _, clipfrac = compute_value_loss(vpreds, returns, values, mask, 0.5, mode)
    assert clipfrac.item() == pytest.approx((clipped > plain)[mask.numpy() > 0].mean())


def test_gradcheck_away_from_the_kinks() -> None:
    mask, returns, values = ragged_mask(4, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)
    x = normal(4, 4, seed=3).requires_grad_()
    for mode in MODES:
        assert torch.autograd.gradcheck(
            lambda v, mode=mode: compute_value_loss(v, returns, values, mask, 0.3, mode)[0], x
        )


def test_a_negative_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="cliprange_value is -0.1"):
        one(0.0, 0.0, 0.0, -0.1)

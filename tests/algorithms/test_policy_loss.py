from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.batches import MODES, counts, normal, poison, ragged_mask
from verl.algorithms.policy_loss import compute_policy_loss, compute_policy_loss_vanilla
from verl.errors import ConfigError


def config(**changes: object) -> SimpleNamespace:
    base = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    return SimpleNamespace(**{**base, **changes})


def token(ratio: float, advantage: float, **kwargs: float) -> tuple[float, float, float, float]:
    """The loss of one token with this ratio and advantage."""
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    return tuple(x.item() for x in compute_policy_loss(torch.zeros_like(new), new, a, torch.ones(1, 1), 0.2, **kwargs))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.1, 2.0, -2.2, 0, 0),  # inside the range
        (1.5, 2.0, -2.4, 1, 0),  # above, pushing further up: held at 1.2
        (0.5, 2.0, -1.0, 0, 0),  # below, pulling back up: free
        (0.5, -2.0, 1.6, 1, 0),  # below, pushing further down: held at 0.8
        (1.5, -2.0, 3.0, 0, 0),  # above, pulling back down: free
        (5.0, -2.0, 6.0, 0, 1),  # far above with negative advantage: bounded by c = 3
        (5.0, 2.0, -2.4, 1, 0),  # the bound does not concern positive advantages
    ],
)
def test_literal_tokens(ratio: float, advantage: float, loss: float, clipped: int, lower: int) -> None:
    value, clipfrac, ppo_kl, clipfrac_lower = token(ratio, advantage)
    assert value == pytest.approx(loss)
    assert (clipfrac, clipfrac_lower) == (clipped, lower)
    assert ppo_kl == pytest.approx(-math.log(ratio))


def test_asymmetric_widths() -> None:
    assert token(2.0, 1.0, cliprange_low=0.1, cliprange_high=0.5)[0] == pytest.approx(-1.5)
    assert token(0.5, -1.0, cliprange_low=0.1, cliprange_high=0.5)[0] == pytest.approx(0.9)
    assert token(2.0, 1.0, cliprange_high=0.28)[0] == pytest.approx(-1.28)
    assert token(10.0, -1.0, clip_ratio_c=4.0)[0] == pytest.approx(4.0)


def reference(old: Tensor, new: Tensor, adv: Tensor, mask: Tensor, low: float, high: float, c: float) -> np.ndarray:
    out = np.zeros(mask.shape)
    for i, j in zip(*np.nonzero(mask.numpy()), strict=True):
        ratio, a = math.exp(new[i, j] - old[i, j]), adv[i, j].item()
        loss = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        out[i, j] = min(loss, -c * a) if a < 0 else loss
    return out


@pytest.mark.parametrize("mode", MODES)
def test_registered_loss_matches_a_loop_and_ignores_garbage(mode: str) -> None:
    mask = ragged_mask(5, 6)
    old, new, adv, weights = (normal(5, 6, seed=s) for s in range(4))
    per_token = torch.from_numpy(reference(old, new, adv, mask, 0.1, 0.3, 2.0)) * weights
    info = {"dp_size": 3, **counts(mask), "loss_scale_factor": 6}
    cfg = config(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0, global_batch_info=info)

    x = poison(new, mask).requires_grad_()
    loss, metrics = compute_policy_loss_vanilla(
        poison(old, mask), x, poison(adv, mask), mask, mode, cfg, poison(weights, mask)
    )
    loss.backward()
    sums = (per_token * mask).sum(-1)
    expected = {
        "token-mean": sums.sum() / mask.sum(),
        "seq-mean-token-sum": sums.sum() / 4,
        "seq-mean-token-mean": (sums / mask.sum(-1).clamp(min=1)).sum() / 4,
        "seq-mean-token-sum-norm": sums.sum() / 4 / 6,
    }[mode]
    torch.testing.assert_close(loss.detach(), 3 * expected)
    assert torch.isfinite(x.grad).all()
    assert not x.grad[mask == 0].any()

    ratio = (new - old).exp()
    clipped = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.9, 1.3))
    assert set(metrics) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
    at = mask.bool()
    assert float(metrics["actor/ppo_kl"]) == pytest.approx((old - new)[at].mean().item())
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx((clipped > -adv * ratio)[at].double().mean().item())
    lower = (adv < 0) & (clipped > -adv * 2.0)
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(lower[at].double().mean().item())


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up(mode: str) -> None:
    mask = ragged_mask(6, 5)
    old, new, adv = normal(6, 5, seed=1), normal(6, 5, seed=2), normal(6, 5, seed=3)
    cfg = config(global_batch_info={"dp_size": 1, **counts(mask), "loss_scale_factor": 5})
    whole, _ = compute_policy_loss_vanilla(old, new, adv, mask, mode, cfg)
    pieces = [
        compute_policy_loss_vanilla(old[a:b], new[a:b], adv[a:b], mask[a:b], mode, cfg)[0]
        for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    torch.testing.assert_close(torch.stack(pieces).sum(), whole)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_on_policy_the_ratio_is_one_and_the_loss_minus_the_mean_advantage_exactly(seed: int) -> None:
    mask = ragged_mask(4, 6, seed)
    log_prob = normal(4, 6, seed=seed, dtype=torch.float32) * 10
    adv = torch.where(mask.bool(), normal(4, 6, seed=seed + 1, dtype=torch.float32), 0.0)
    loss, clipfrac, ppo_kl, lower = compute_policy_loss(log_prob, log_prob.clone(), adv, mask, 0.2)
    assert loss.item() == (-adv.sum() / mask.sum()).item()
    assert (clipfrac.item(), ppo_kl.item(), lower.item()) == (0.0, 0.0, 0.0)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    log_prob = torch.zeros(1, 3, requires_grad=True)
    adv = torch.tensor([[1.0, -2.0, 0.5]])
    compute_policy_loss(log_prob.detach(), log_prob, adv, torch.ones(1, 3), 0.2)[0].backward()
    torch.testing.assert_close(log_prob.grad, -adv / 3)


def test_gradcheck_away_from_the_kinks() -> None:
    mask, adv = ragged_mask(4, 5), normal(4, 5, seed=1)
    old = normal(4, 5, seed=2)
    x = (old + normal(4, 5, seed=3)).requires_grad_()
    for mode in MODES:
        assert torch.autograd.gradcheck(
            lambda v, mode=mode: compute_policy_loss_vanilla(old, v, adv, mask, mode, config())[0], x
        )


def test_a_clipped_token_has_no_gradient() -> None:
    x = torch.tensor([[math.log(1.5), math.log(0.5), math.log(5.0)]], requires_grad=True)
    compute_policy_loss(torch.zeros(1, 3), x, torch.tensor([[1.0, -1.0, -1.0]]), torch.ones(1, 3), 0.2)[0].backward()
    assert x.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_an_absurd_ratio_stays_finite() -> None:
    x = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss, *_ = compute_policy_loss(torch.zeros(1, 2), x, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), 0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()


def test_weights_multiply_the_loss_and_carry_no_gradient() -> None:
    weights = torch.tensor([[2.0, 0.5]], requires_grad=True)
    x = torch.zeros(1, 2, requires_grad=True)
    adv = torch.tensor([[1.0, 4.0]])
    loss, _ = compute_policy_loss_vanilla(x.detach(), x, adv, torch.ones(1, 2), "token-mean", config(), weights)
    loss.backward()
    assert loss.item() == pytest.approx(-(2.0 + 2.0) / 2)
    assert weights.grad is None


def test_config_may_be_a_mapping_or_absent() -> None:
    old, new, adv, mask = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    assert compute_policy_loss_vanilla(old, new, adv, mask)[0].item() == pytest.approx(-1.2)
    mapping = {"clip_ratio": 0.4, "global_batch_info": {"batch_num_tokens": 2}}
    loss, _ = compute_policy_loss_vanilla(old, new, adv, mask, config=mapping)
    assert loss.item() == pytest.approx(-0.7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cliprange": 0.2, "clip_ratio_c": 1.0}, "clip_ratio_c is 1.0"),
        ({"cliprange": -0.2}, "must not be negative"),
        ({}, "no clip width"),
    ],
)
def test_bad_settings_are_refused(kwargs: dict[str, float], message: str) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=message):
        compute_policy_loss(one, one, one, one, **kwargs)

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.batches import MODES, counts, normal, ragged_mask
from verl.algorithms.entropy import compute_entropy_loss, entropy_from_logits


def test_known_distributions() -> None:
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -math.inf, -math.inf], [50.0, -50.0, -50.0, -50.0]]
    )
    expected = [math.log(4), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), 0.0]
    assert entropy_from_logits(logits).tolist() == pytest.approx(expected, abs=1e-6)
    assert entropy_from_logits(logits + 123.0).tolist() == pytest.approx(expected, abs=1e-4)


def test_matches_torch_distributions_and_keeps_float32_for_low_precision() -> None:
    logits = normal(3, 4, 11, seed=1, scale=3)
    torch.testing.assert_close(entropy_from_logits(logits), torch.distributions.Categorical(logits=logits).entropy())
    assert entropy_from_logits(logits.bfloat16()).dtype == torch.float32


def test_a_forbidden_token_does_not_spoil_the_gradient() -> None:
    logits = torch.tensor([[1.0, 0.0, -math.inf]], requires_grad=True)
    entropy_from_logits(logits).sum().backward()
    assert torch.isfinite(logits.grad).all()
    free = torch.tensor([[1.0, 0.0]], requires_grad=True)
    entropy_from_logits(free).sum().backward()
    torch.testing.assert_close(logits.grad[:, :2], free.grad)


@pytest.mark.parametrize("mode", MODES)
def test_loss_aggregates_masked_entropies(mode: str) -> None:
    mask, logits = ragged_mask(5, 4), normal(5, 4, 7, seed=2)
    sums = (torch.distributions.Categorical(logits=logits).entropy() * mask).sum(-1)
    expected = {
        "token-mean": sums.sum() / mask.sum(),
        "seq-mean-token-sum": sums.sum() / 4,
        "seq-mean-token-mean": (sums / mask.sum(-1).clamp(min=1)).sum() / 4,
        "seq-mean-token-sum-norm": sums.sum() / 4 / 4,
    }[mode]
    dirty = torch.where(mask.bool()[..., None], logits, float("nan")).requires_grad_()
    loss = compute_entropy_loss(dirty, mask, mode)
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert torch.isfinite(dirty.grad).all()
    pieces = [compute_entropy_loss(logits[a:b], mask[a:b], mode, **counts(mask)) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(sum(pieces), expected)


def test_gradcheck() -> None:
    mask = ragged_mask(3, 3)
    logits = normal(3, 3, 5, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: compute_entropy_loss(v, mask, "seq-mean-token-mean"), logits)

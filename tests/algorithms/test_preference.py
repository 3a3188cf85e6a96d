"""Losses over pairs of answers, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.preference import dpo_losses, pairwise_reward_losses
from verl.errors import ConfigError

# margins: 0.5 * ((-1 - -2) - (-3 - -3)) = 0.5, and 0.5 * ((-4 - -2) - (-1 - -2)) = -1.5
CHOSEN, REJECTED = torch.tensor([-1.0, -4.0]), torch.tensor([-3.0, -1.0])
REF_CHOSEN, REF_REJECTED = torch.tensor([-2.0, -2.0]), torch.tensor([-3.0, -2.0])


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "expected"),
    [
        ("sigmoid", 0.0, [softplus(-0.5), softplus(1.5)]),
        ("sigmoid", 0.1, [0.9 * softplus(-0.5) + 0.1 * softplus(0.5), 0.9 * softplus(1.5) + 0.1 * softplus(-1.5)]),
        ("hinge", 0.0, [0.5, 2.5]),
        ("ipo", 0.0, [(1.0 - 1.0) ** 2, (-3.0 - 1.0) ** 2]),
    ],
)
def test_dpo_literals(loss_type: str, smoothing: float, expected: list[float]) -> None:
    losses, better, worse = dpo_losses(
        CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.5, loss_type=loss_type, label_smoothing=smoothing
    )
    torch.testing.assert_close(losses, torch.tensor(expected))
    torch.testing.assert_close(better, torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(worse, torch.tensor([0.0, 0.5]))


def test_dpo_gradient_is_beta_times_the_chance_of_being_wrong() -> None:
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    losses, better, _ = dpo_losses(chosen, rejected, REF_CHOSEN, REF_REJECTED, beta=0.5)
    losses.sum().backward()
    wrong = torch.sigmoid(torch.tensor([-0.5, 1.5]))
    torch.testing.assert_close(chosen.grad, -0.5 * wrong)
    torch.testing.assert_close(rejected.grad, 0.5 * wrong)
    assert not better.requires_grad


def test_unknown_form_is_named() -> None:
    with pytest.raises(ConfigError, match="'sigmoyd'.*sigmoid, hinge or ipo"):
        dpo_losses(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, loss_type="sigmoyd")


def test_reward_model_literals() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])
    torch.testing.assert_close(pairwise_reward_losses(chosen, rejected), torch.tensor([softplus(-1.0), softplus(3.0)]))
    torch.testing.assert_close(
        pairwise_reward_losses(chosen, rejected, torch.tensor([0.5, 1.0]), center_coef=0.1),
        torch.tensor([softplus(-0.5) + 0.9, softplus(4.0) + 0.9]),
    )

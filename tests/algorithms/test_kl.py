from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.batches import normal
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    check_kl_penalty,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from verl.errors import ConfigError

P = torch.tensor([[0.0, -1.0, -2.0]])
Q = torch.tensor([[-0.5, -1.0, -1.0]])  # d = log p - log q = 0.5, 0, -1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("kl", "k1"), [0.5, 0.0, -1.0]),
        (("abs",), [0.5, 0.0, 1.0]),
        (("mse", "k2"), [0.125, 0.0, 0.5]),
        (("low_var_kl", "k3"), [math.exp(-0.5) - 1 + 0.5, 0.0, math.e - 1 - 1]),
    ],
)
def test_literal_numbers(names: tuple[str, ...], expected: list[float]) -> None:
    for name in names:
        assert kl_penalty(P, Q, name)[0].tolist() == pytest.approx(expected)
        assert kl_penalty(P, Q, name + "+")[0].tolist() == pytest.approx(expected)


def test_straight_through_takes_the_gradient_of_k2() -> None:
    for name in ("k1+", "kl+", "abs+", "k3+", "low_var_kl+", "k2+", "mse+"):
        x = P.clone().requires_grad_()
        kl_penalty(x, Q, name).sum().backward()
        torch.testing.assert_close(x.grad, P - Q)


def test_gradients_of_the_plain_forms() -> None:
    d = P - Q
    expected = {"k1": torch.ones_like(d), "abs": d.sign(), "k2": d, "k3": 1 - torch.exp(-d)}
    for name, gradient in expected.items():
        x = P.clone().requires_grad_()
        kl_penalty(x, Q, name).sum().backward()
        torch.testing.assert_close(x.grad, gradient)
    x, ref = normal(2, 3, seed=1).requires_grad_(), normal(2, 3, seed=2)
    for name in ("k1", "abs", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda v, name=name: kl_penalty(v, ref, name), x)


def test_estimates_average_to_the_exact_kl_under_the_policy() -> None:
    """Weighted by the policy over a whole vocabulary, k1 and k3 are the KL itself."""
    logits, ref = normal(1, 1, 9, seed=3), normal(1, 1, 9, seed=4)
    exact = kl_penalty(logits, ref, "full")
    p, q = torch.softmax(logits, -1).numpy(), torch.softmax(ref, -1).numpy()
    assert exact.item() == pytest.approx(float((p * np.log(p / q)).sum()))
    assert exact.shape == (1, 1)
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(ref, -1)
    for name in ("k1", "k3"):
        assert (log_p.exp() * kl_penalty(log_p, log_q, name)).sum().item() == pytest.approx(exact.item())


def test_gradient_of_k2_averages_to_the_gradient_of_the_exact_kl() -> None:
    logits, ref = normal(1, 1, 9, seed=5), torch.log_softmax(normal(1, 1, 9, seed=6), -1)
    x = logits.clone().requires_grad_()
    kl_penalty(x, ref, "full").sum().backward()
    for name in ("k2", "k1+", "k3+"):
        y = logits.clone().requires_grad_()
        log_p = torch.log_softmax(y, -1)
        (log_p.detach().exp() * kl_penalty(log_p, ref, name)).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)


def test_full_ignores_what_the_policy_cannot_sample_and_gradchecks() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]])
    assert kl_penalty(logits, torch.zeros(1, 1, 3), "full").item() == pytest.approx(math.log(1.5))
    x, ref = normal(2, 2, 4, seed=7).requires_grad_(), normal(2, 2, 4, seed=8)
    assert torch.autograd.gradcheck(lambda v: kl_penalty(v, ref, "full"), x)
    with pytest.raises(ValueError, match=r"whole vocabulary.*\(1, 3\)"):
        kl_penalty(P, Q, "full")


def test_k3_is_accurate_near_zero_and_bounded_far_away() -> None:
    tiny = torch.tensor([[1e-4]])
    assert kl_penalty(tiny, torch.zeros(1, 1), "k3").item() == pytest.approx(5e-9, rel=1e-3)
    x = torch.tensor([[-300.0, 300.0]], requires_grad=True)
    value = kl_penalty(x, torch.zeros(1, 2), "k3")
    assert value[0, 0].item() == 10.0
    value.sum().backward()
    assert x.grad[0].tolist() == [0.0, 0.0]
    assert (kl_penalty(normal(50, 50, seed=9), normal(50, 50, seed=10), "k3") >= 0).all()


@pytest.mark.parametrize("name", ["k4", "full+", "", "k1++", "+"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown kl_penalty.*low_var_kl"):
        kl_penalty(P, Q, name)


def test_full_is_refused_where_only_sampled_tokens_are_known() -> None:
    check_kl_penalty("k3+", sampled_tokens_only=True)
    with pytest.raises(ConfigError, match="'full'"):
        check_kl_penalty("full", sampled_tokens_only=True)


def test_compute_rewards_subtracts_the_log_ratio() -> None:
    scores = torch.tensor([[0.0, 0.0, 1.0]])
    torch.testing.assert_close(compute_rewards(scores, P, Q, 0.1), torch.tensor([[-0.05, 0.0, 1.1]]))


def test_fixed_controller_never_moves() -> None:
    controller = FixedKLController(0.3)
    controller.update(current_kl=100.0, n_steps=1000)
    assert controller.value == 0.3


def test_adaptive_controller_follows_the_formula() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=1000)
    controller.update(current_kl=0.11, n_steps=100)  # error 0.1
    assert controller.value == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    controller.value = 0.2
    controller.update(current_kl=5.0, n_steps=100)  # error clipped to 0.2
    assert controller.value == pytest.approx(0.2 * 1.02)
    controller.value = 0.2
    controller.update(current_kl=0.0, n_steps=100)  # clipped to -0.2
    assert controller.value == pytest.approx(0.2 * 0.98)
    controller.update(current_kl=0.0, n_steps=1_000_000)
    assert controller.value == 0.0


def test_adaptive_state_survives_a_checkpoint_and_a_fixed_coefficient_follows_the_config() -> None:
    trained = AdaptiveKLController(0.2, 0.1, 1000)
    trained.update(5.0, 100)
    resumed = AdaptiveKLController(0.2, 0.1, 1000)
    resumed.load_state_dict(trained.state_dict())
    assert resumed.value == trained.value != 0.2
    fixed = FixedKLController(0.5)
    fixed.load_state_dict(FixedKLController(0.1).state_dict())
    assert fixed.value == 0.5


def test_controller_from_config() -> None:
    fixed = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.01))
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.01
    adaptive = get_kl_controller({"type": "adaptive", "kl_coef": 0.02, "target_kl": 0.3, "horizon": 50})
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.02, 0.3, 50)
    with pytest.raises(ConfigError, match="'adaptiv'"):
        get_kl_controller({"type": "adaptiv"})
    with pytest.raises(ConfigError, match="must be positive"):
        get_kl_controller({"type": "adaptive", "horizon": 0})


def average_gradient(name: str, logits: Tensor, ref: Tensor) -> Tensor:
    """Gradient of an estimate as a loss, averaged over all tokens as the policy samples them."""
    x = logits.clone().requires_grad_()
    log_p = torch.log_softmax(x, -1)
    (log_p.detach().exp() * kl_penalty(log_p, ref, name)).sum().backward()
    return x.grad


def test_as_a_loss_k1_averages_to_nothing_and_k3_to_the_other_direction() -> None:
    logits, ref = normal(1, 1, 7, seed=11), torch.log_softmax(normal(1, 1, 7, seed=12), -1)
    torch.testing.assert_close(average_gradient("k1", logits, ref), torch.zeros_like(logits), atol=1e-12, rtol=0)

    x = logits.clone().requires_grad_()
    (ref.exp() * (ref - torch.log_softmax(x, -1))).sum().backward()
    torch.testing.assert_close(average_gradient("k3", logits, ref), x.grad)

    x = logits.clone().requires_grad_()
    (torch.softmax(x, -1) - ref.exp()).abs().sum().backward()  # twice the total variation
    torch.testing.assert_close(average_gradient("abs", logits, ref), x.grad)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k2+"])
def test_gradcheck_of_forms_whose_value_and_gradient_belong_together(name: str) -> None:
    x, ref = normal(3, 4, seed=13).requires_grad_(), normal(3, 4, seed=14)
    assert torch.autograd.gradcheck(lambda v: kl_penalty(v, ref, name), x)


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_straight_through_forms_have_the_value_of_their_name_and_the_gradient_of_k2(name: str) -> None:
    x, ref = normal(3, 4, seed=15).requires_grad_(), normal(3, 4, seed=16)
    value = kl_penalty(x, ref, name + "+")
    torch.testing.assert_close(value, kl_penalty(x, ref, name))
    value.sum().backward()
    torch.testing.assert_close(x.grad, (x - ref).detach())

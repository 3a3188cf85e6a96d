"""What holds for every registered policy loss, and each loss on its own numbers."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.batches import MODES, counts, normal, poison, ragged_mask
from tests.algorithms.losses import TOKEN_LOSSES, aggregate, covariance, settings
from verl.algorithms.covariance_loss import prepare_clip_cov, prepare_kl_cov, select_clip_cov, select_kl_cov
from verl.algorithms.divergence_loss import binary_kl, binary_total_variation
from verl.algorithms.registry import POLICY_LOSSES, get_policy_loss_fn, loss_fields, prepare_loss_fields
from verl.errors import ConfigError

BUILT_IN = sorted(name for name in POLICY_LOSSES if POLICY_LOSSES[name].__module__.startswith("verl."))
B, R = 7, 6
MASK = ragged_mask(B, R, seed=5)


def tensors(dirty: bool = False) -> dict[str, Tensor]:
    """Log-probs that moved by about 0.4, advantages of both signs."""
    old = -normal(B, R, seed=1).abs() - 0.1
    fields = {
        "old_log_prob": old,
        "log_prob": (old + 0.4 * normal(B, R, seed=2)).clamp(max=-0.01),
        "advantages": normal(B, R, seed=3),
    }
    return {name: poison(value, MASK) for name, value in fields.items()} if dirty else fields


def chosen_tokens(name: str) -> dict[str, Tensor]:
    """What the trainer prepares from the whole batch."""
    data = tensors()
    fields = {"old_log_probs": data["old_log_prob"], "advantages": data["advantages"], "response_mask": MASK}
    return dict(prepare_loss_fields(get_policy_loss_fn(name), fields, settings()))


def call(
    name: str,
    data: dict[str, Tensor],
    rows: slice | list[int] = slice(None),
    mode: str = "token-mean",
    config: Any = None,
    **extra: Tensor,
) -> tuple[Tensor, dict[str, Any]]:
    cut = {key: value[rows] for key, value in {**data, **chosen_tokens(name), **extra}.items()}
    return get_policy_loss_fn(name)(
        response_mask=MASK[rows], loss_agg_mode=mode, config=config if config is not None else settings(), **cut
    )


def test_every_built_in_loss_is_covered_here() -> None:
    assert set(BUILT_IN) == {*TOKEN_LOSSES, "clip_cov", "kl_cov"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(TOKEN_LOSSES))
def test_value_against_plain_python(name: str, mode: str) -> None:
    data = tensors(dirty=True)
    weights = normal(B, R, seed=4).exp()
    config = settings(global_batch_info={"dp_size": 3, **counts(MASK), "loss_scale_factor": 5})
    loss, _ = call(name, data, mode=mode, config=config, rollout_is_weights=poison(weights, MASK))
    clean = {key: value.numpy() for key, value in tensors().items()}
    token = TOKEN_LOSSES[name](clean["old_log_prob"], clean["log_prob"], clean["advantages"], MASK.numpy(), settings())
    expected = 3 * aggregate(token * weights.numpy(), MASK.numpy(), mode, scale=5)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


#: losses with a constant factor in their gradient: their value is not its antiderivative
STOP_GRADIENT = ("cispo", "bypass_mode", "gspo_token")


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in STOP_GRADIENT])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_against_finite_differences(name: str, mode: str) -> None:
    data = tensors()
    x = data.pop("log_prob").requires_grad_()
    assert torch.autograd.gradcheck(lambda v: call(name, {**data, "log_prob": v}, mode=mode)[0], x)


def constant_weights(name: str, data: dict[str, Tensor]) -> Tensor:
    log_ratio = data["log_prob"] - data["old_log_prob"]
    if name == "cispo":
        return log_ratio.exp().clamp(0.85, 1.35)
    return log_ratio.exp().clamp(max=1.4)


@pytest.mark.parametrize("name", ["cispo", "bypass_mode"])
def test_gradient_of_weighted_losses_is_that_of_the_log_prob_alone(name: str) -> None:
    data = tensors()
    weight = constant_weights(name, data)
    x = data["log_prob"].clone().requires_grad_()
    call(name, {**data, "log_prob": x})[0].backward()
    step = 1e-6
    for i, t in MASK.nonzero().tolist():
        moved = data["log_prob"].clone()
        moved[i, t] += step
        difference = -(weight * data["advantages"] * (moved - data["log_prob"]) * MASK).sum() / MASK.sum() / step
        assert x.grad[i, t].item() == pytest.approx(difference.item(), rel=1e-6)


def test_gradient_of_the_token_form_of_gspo_by_finite_differences() -> None:
    """Its ratio follows the token's own log-prob around a constant sequence ratio."""
    data = tensors()
    x = data["log_prob"].clone().requires_grad_()
    call("gspo_token", {**data, "log_prob": x})[0].backward()
    sequence = ((data["log_prob"] - data["old_log_prob"]) * MASK).sum(-1) / MASK.sum(-1).clamp(min=1)

    def token_loss(i: int, t: int, move: float) -> float:
        ratio, a = math.exp(sequence[i].item() + move), data["advantages"][i, t].item()
        return -min(ratio * a, min(max(ratio, 0.85), 1.35) * a)

    for i, t in MASK.nonzero().tolist():
        slope = (token_loss(i, t, 1e-6) - token_loss(i, t, -1e-6)) / 2e-6 / MASK.sum().item()
        assert x.grad[i, t].item() == pytest.approx(slope, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_garbage_outside_the_mask_changes_nothing(name: str, garbage: float) -> None:
    clean = tensors()
    dirty = {key: poison(value, MASK, garbage) for key, value in clean.items()}
    results = []
    for data in (clean, dirty):
        x = data["log_prob"].clone().requires_grad_()
        loss, metrics = call(name, {**data, "log_prob": x})
        loss.backward()
        results.append((loss.detach(), x.grad, {key: float(value) for key, value in metrics.items()}))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert not results[1][1][MASK == 0].any()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("mode", MODES)
def test_any_split_and_order_give_the_same_loss_gradient_and_metrics(name: str, mode: str) -> None:
    config = settings(global_batch_info={**counts(MASK), "loss_scale_factor": 5})
    order = [3, 0, 6, 2, 5, 1, 4]
    results = []
    for parts in ([slice(None)], [slice(0, 1), slice(1, 4), slice(4, 7)], [order[:2], order[2:3], order[3:]]):
        data = tensors()
        x = data["log_prob"].requires_grad_()
        total, sums = torch.zeros((), dtype=torch.float64), {}
        for part in parts:
            loss, metrics = call(name, data, part, mode, config)
            total = total + loss
            tokens = MASK[part].sum().item()
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + float(value) * tokens
        total.backward()
        results.append((total.item(), x.grad, sums))
    for total, grad, sums in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-12)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-12, atol=1e-15)
        assert sums == pytest.approx(results[0][2], rel=1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
def test_on_policy_the_gradient_is_that_of_plain_policy_gradient(name: str) -> None:
    """For advantages that are constant along a response; Clip-Cov leaves its drawn tokens out."""
    log_prob = tensors()["old_log_prob"].clone().requires_grad_()
    adv = normal(B, 1, seed=3).expand(B, R)
    data = {"old_log_prob": log_prob.detach().clone(), "log_prob": log_prob, "advantages": adv}
    loss, metrics = (
        call(name, data, mode="seq-mean-token-mean", selected_tokens=torch.zeros(B, R))
        if ("selected_tokens" in set().union(*loss_fields(get_policy_loss_fn(name))))
        else call(name, data, mode="seq-mean-token-mean")
    )
    loss.backward()
    expected = -adv * MASK / MASK.sum(-1, keepdim=True).clamp(min=1) / counts(MASK)["global_batch_size"]
    torch.testing.assert_close(log_prob.grad, expected)
    if "actor/ppo_kl" in metrics:
        assert float(metrics["actor/ppo_kl"]) == 0.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_batch_without_tokens_is_a_zero_that_can_be_differentiated(name: str) -> None:
    x = torch.full((2, 3), float("nan"), requires_grad=True)
    nothing = torch.zeros(2, 3)
    loss, metrics = get_policy_loss_fn(name)(x.detach(), x, x.detach(), nothing, "token-mean", settings())
    assert loss.item() == 0.0
    loss.backward()
    assert torch.equal(x.grad, nothing)
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_absurd_log_probs_stay_finite(name: str) -> None:
    x = torch.tensor([[0.0, -300.0], [-1e-12, -90.0]], requires_grad=True)
    old = torch.tensor([[-300.0, 0.0], [-90.0, -1e-12]])
    adv = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    loss, metrics = get_policy_loss_fn(name)(old, x, adv, torch.ones(2, 2), "token-mean", settings())
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()
    assert all(not math.isnan(float(value)) for value in metrics.values())


def one(name: str, ratio: float, advantage: float, p_old: float = 0.1, **changes: Any) -> float:
    """The loss of a single token that had probability ``p_old`` and now has ``ratio * p_old``."""
    old = torch.tensor([[math.log(p_old)]], dtype=torch.float64)
    new, a = old + math.log(ratio), torch.tensor([[advantage]], dtype=torch.float64)
    return get_policy_loss_fn(name)(old, new, a, torch.ones(1, 1), "token-mean", settings(**changes))[0].item()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "expected"),
    [
        # SAPO: 4/tau * sigmoid(tau * (r - 1)); tau 0.8 for A > 0, 1.5 for A < 0. At r = 1 the sigmoid is one half.
        ("sapo", 1.0, 1.0, -2.5),
        ("sapo", 1.0, -3.0, 4.0),
        ("sapo", 2.0, 1.0, -5.0 * 0.6899744811276125),  # sigmoid(0.8) = 1/(1 + 0.4493290)
        # CISPO: the weight 2 is cut to 1.35, 0.5 is raised to 0.85; log p = log 0.2, log 0.05
        ("cispo", 2.0, 1.0, 1.35 * 1.6094379124341003),
        ("cispo", 0.5, -1.0, -0.85 * 2.995732273553991),
        # DRO with beta 0.3: -A log p + 0.15 (log 2)^2
        ("dro", 2.0, 1.0, 1.6094379124341003 + 0.15 * 0.4804530139182014),
        # DPPO: p goes from 0.1 to 0.4 (TV 0.3 < 0.35, kept) and to 0.5 (0.4, dropped); never when A pulls back
        ("dppo_tv", 4.0, 1.0, -4.0),
        ("dppo_tv", 5.0, 1.0, 0.0),
        ("dppo_tv", 5.0, -1.0, 5.0),
        # KL of (.1, .9) from (.5, .5): .1 log .2 + .9 log 1.8 = 0.36806 > 0.35; from (.4, .6): 0.22628
        ("dppo_kl", 5.0, 1.0, 0.0),
        ("dppo_kl", 4.0, 1.0, -4.0),
        # GMPO: the log ratio log 2 = 0.69 is cut to 0.35, -0.69 to -0.15
        ("geo_mean", 2.0, 1.0, -1.4190675485932573),  # e^0.35
        ("geo_mean", 0.5, -1.0, 0.8607079764250578),  # e^-0.15
        ("geo_mean", 0.5, 1.0, -0.5),
        # reinforce: weight min(2, 1.4), log p = log 0.2
        ("bypass_mode", 2.0, 1.0, 1.4 * 1.6094379124341003),
    ],
)
def test_literal_tokens(name: str, ratio: float, advantage: float, expected: float) -> None:
    assert one(name, ratio, advantage) == pytest.approx(expected, rel=1e-12)


def test_gspo_on_literal_numbers() -> None:
    """Ratios 4 and 1: geometric mean 2, cut to 1.35 for A > 0; ratios 1 and 1/4: 1/2."""
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.tensor([[math.log(4.0), 0.0], [0.0, -math.log(4.0)]], dtype=torch.float64)
    adv = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    mode = "seq-mean-token-mean"
    fn = get_policy_loss_fn("gspo")
    loss, metrics = fn(old, new, adv, torch.ones(2, 2), mode, settings())
    assert loss.item() == pytest.approx((-1.35 * 2.0 - 0.5 * 2.0) / 2)
    assert float(metrics["actor/pg_clipfrac"]) == 0.5
    token, _ = get_policy_loss_fn("gspo_token")(old, new, adv, torch.ones(2, 2), mode, settings())
    assert token.item() == pytest.approx((-1.35 * (1.0 + 3.0) / 2 - 0.5 * 2.0) / 2)


def test_both_forms_of_gspo_agree_for_constant_advantages() -> None:
    adv = normal(B, 1, seed=9).expand(B, R)
    grads = []
    for name in ("gspo", "gspo_token"):
        data = {**tensors(), "advantages": adv}
        x = data["log_prob"].requires_grad_()
        loss, _ = call(name, data, mode="seq-mean-token-mean")
        loss.backward()
        grads.append((loss.item(), x.grad))
    assert grads[0][0] == pytest.approx(grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1])


def test_sapo_gradient_is_one_on_policy_and_fades_on_both_sides() -> None:
    def slope(log_ratio: float, advantage: float) -> float:
        x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
        a = torch.tensor([[advantage]], dtype=torch.float64)
        get_policy_loss_fn("sapo")(torch.zeros_like(x), x, a, torch.ones(1, 1), "token-mean", settings())[0].backward()
        return x.grad.item()

    assert slope(0.0, 2.0) == pytest.approx(-2.0)
    assert slope(0.0, -2.0) == pytest.approx(2.0)
    # d/dlog r of 4/tau sigmoid(tau (r-1)) = 4 s (1-s) r, tau = 1.5 and r = 3
    s = 1 / (1 + math.exp(-3.0))
    assert slope(math.log(3.0), -1.0) == pytest.approx(4 * s * (1 - s) * 3)
    with pytest.raises(ConfigError, match="tau_neg is 0"):
        one("sapo", 1.0, 1.0, tau_neg=0)


def test_binary_divergences_against_their_formulas() -> None:
    mu, pi = np.array([0.1, 0.5, 0.9, 0.3]), np.array([0.5, 0.5, 0.05, 0.31])
    new, old = torch.tensor(np.log(pi)), torch.tensor(np.log(mu))
    np.testing.assert_allclose(binary_total_variation(new, old), np.abs(pi - mu))
    np.testing.assert_allclose(
        binary_kl(new, old), mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi)), atol=1e-15
    )
    certain = torch.zeros(1)
    assert binary_kl(certain, certain).item() == 0.0
    assert binary_kl(torch.tensor([math.log(0.5)]), certain).item() == pytest.approx(math.log(2), rel=1e-6)


def test_kl_cov_penalises_the_tokens_of_largest_covariance() -> None:
    data = tensors()
    old, new, adv = (data[key].numpy() for key in ("old_log_prob", "log_prob", "advantages"))
    tokens = int(MASK.sum())
    cov = np.where(MASK.numpy() > 0, covariance(old, adv, MASK.numpy()), -np.inf)
    count = int(0.25 * tokens)
    expected_choice = cov >= np.sort(cov.flatten())[-count]
    chosen = chosen_tokens("kl_cov")["selected_tokens"]
    np.testing.assert_array_equal(chosen, expected_choice)
    token = -adv * np.exp(new - old) + np.where(expected_choice, 0.7 * np.abs(new - old), 0.0)
    loss, metrics = call("kl_cov", data)
    assert loss.item() == pytest.approx(aggregate(token, MASK.numpy(), "token-mean", 1))
    assert float(metrics["actor/cov_selected"]) == pytest.approx(count / tokens)


def test_clip_cov_holds_drawn_tokens_at_ratio_one() -> None:
    data = tensors()
    old, new, adv = (data[key].numpy() for key in ("old_log_prob", "log_prob", "advantages"))
    cov = covariance(old, adv, MASK.numpy())
    eligible = (MASK.numpy() > 0) & (cov > 0.0) & (cov < 1.5)
    chosen = chosen_tokens("clip_cov")["selected_tokens"].numpy()
    assert chosen.sum() == min(int(0.3 * MASK.sum()), eligible.sum())
    assert not (chosen & ~eligible).any()
    x = data["log_prob"].requires_grad_()
    loss, _ = call("clip_cov", data)
    loss.backward()
    ratio = np.exp(new - old)
    token = np.where(chosen, -adv, np.maximum(-adv * ratio, -adv * np.clip(ratio, 0.85, 1.35)))
    assert loss.item() == pytest.approx(aggregate(token, MASK.numpy(), "token-mean", 1))
    assert not x.grad[torch.from_numpy(chosen)].any()


def test_the_draw_of_clip_cov_depends_on_the_tokens_alone() -> None:
    """Another order, extra padding or other last digits of the log-probs draw the same tokens; other tokens others."""
    data = tensors()
    old, adv = data["old_log_prob"], data["advantages"]
    responses = torch.randint(0, 50_000, (B, R), generator=torch.Generator().manual_seed(0))
    drawn = select_clip_cov(old, adv, MASK, ratio=0.1, low=0.0, responses=responses)
    assert drawn.sum() == int(0.1 * MASK.sum())
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    shuffled = select_clip_cov(old[order], adv[order], MASK[order], ratio=0.1, low=0.0, responses=responses[order])
    assert torch.equal(shuffled, drawn[order])
    rounded = select_clip_cov(old * (1 + 1e-9), adv, MASK, ratio=0.1, low=0.0, responses=responses)
    assert torch.equal(rounded, drawn)
    other = [select_clip_cov(old, adv, MASK, ratio=0.1, low=0.0, responses=responses + i) for i in range(1, 20)]
    assert any(not torch.equal(draw, drawn) for draw in other)


def test_the_draw_of_clip_cov_is_even() -> None:
    """Each of 200 eligible tokens is drawn about as often as any other."""
    old = torch.linspace(-3, -1, 200, dtype=torch.float64).repeat(1, 2).view(2, 200)
    adv = torch.cat([-torch.ones(1, 200), torch.ones(1, 200)]).double()
    mask = torch.ones(2, 200)
    hits = torch.zeros(2, 200)
    for seed in range(300):
        responses = torch.randint(0, 1000, (2, 200), generator=torch.Generator().manual_seed(seed))
        hits += select_clip_cov(old, adv, mask, ratio=0.1, low=-1e9, high=1e9, responses=responses)
    # 40 of 400 tokens, 300 times: each is expected 30 times, with standard deviation about 5.2
    assert hits.sum() == 300 * 40
    assert hits.min() > 30 - 5 * 5.2
    assert hits.max() < 30 + 5 * 5.2


def test_preparing_reads_the_whole_batch_and_the_settings() -> None:
    data = tensors()
    fields = {"old_log_probs": data["old_log_prob"], "advantages": data["advantages"], "response_mask": MASK}
    everything = prepare_kl_cov(fields, settings(kl_cov_ratio=1.0))["selected_tokens"]
    assert torch.equal(everything, MASK.bool())
    assert prepare_clip_cov(fields, settings(clip_cov_lb=1e6, clip_cov_ub=1e7))["selected_tokens"].sum() == 0
    assert prepare_loss_fields(get_policy_loss_fn("vanilla"), fields, settings()) == {}
    assert select_kl_cov(data["old_log_prob"], data["advantages"], MASK).sum() == 1  # 2e-4 of few tokens is one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_cov_ratio": 0.0}, "kl_cov_ratio is 0.0"),
        ({"kl_cov_ratio": 1.5}, "kl_cov_ratio is 1.5"),
    ],
)
def test_bad_shares_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one("kl_cov", 1.0, 1.0, **changes)
    with pytest.raises(ConfigError, match="must be below"):
        one("clip_cov", 1.0, 1.0, clip_cov_lb=2.0)


def test_bypass_mode_as_clipped_loss_is_vanilla() -> None:
    data = tensors()
    clipped, metrics = call("bypass_mode", data, config=settings(bypass_loss_type="ppo_clip"))
    plain, expected = call("vanilla", data)
    assert clipped.item() == plain.item()
    assert metrics == expected


def test_bypass_mode_takes_sequence_weights() -> None:
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.log(torch.tensor([[0.5, 0.5], [0.9, 1.0]], dtype=torch.float64))
    adv = torch.ones(2, 2, dtype=torch.float64)
    loss, metrics = get_policy_loss_fn("bypass_mode")(
        old, new, adv, torch.ones(2, 2), "token-mean", settings(bypass_is="sequence")
    )
    expected = -(0.25 * 2 * math.log(0.5) + 0.9 * (math.log(0.9) + 0.0)) / 4
    assert loss.item() == pytest.approx(expected)
    assert float(metrics["actor/bypass_is_weight"]) == pytest.approx((0.25 + 0.9) / 2)
    plain, _ = get_policy_loss_fn("bypass_mode")(
        old, new, adv, torch.ones(2, 2), "token-mean", settings(bypass_is=None)
    )
    assert plain.item() == pytest.approx(-new.mean().item())


def test_bypass_mode_refuses_unknown_settings() -> None:
    with pytest.raises(ConfigError, match="bypass_loss_type='trpo'"):
        one("bypass_mode", 1.0, 1.0, bypass_loss_type="trpo")
    with pytest.raises(ConfigError, match="unknown level 'word'"):
        one("bypass_mode", 1.0, 1.0, bypass_is="word")


def test_dapo_combination_on_literal_numbers() -> None:
    """Clip-higher with a token mean over the global batch: GRPO's loss with widths 0.2 and 0.28."""
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = torch.log(torch.tensor([[1.5, 1.25, 1.0], [0.5, 1.0, 1.0]], dtype=torch.float64))
    adv = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0,
        global_batch_info={"dp_size": 2, "batch_num_tokens": 10, "global_batch_size": 5},
    )  # fmt: skip
    loss, _ = get_policy_loss_fn("vanilla")(old, new, adv, mask, "token-mean", config)
    assert loss.item() == pytest.approx((-1.28 - 1.25 - 1.0 + 0.8) / 10 * 2)


def test_rejected_tokens_keep_their_place_in_the_denominator() -> None:
    data = tensors()
    weights = torch.ones(B, R, dtype=torch.float64)
    weights[0] = 0.0
    for name, mode in itertools.product(("vanilla", "sapo", "dppo_tv"), ("token-mean", "seq-mean-token-mean")):
        token = TOKEN_LOSSES[name](*(data[k].numpy() for k in ("old_log_prob", "log_prob", "advantages")),
                                   MASK.numpy(), settings())  # fmt: skip
        token[0] = 0.0
        loss, _ = call(name, data, mode=mode, rollout_is_weights=weights)
        assert loss.item() == pytest.approx(aggregate(token, MASK.numpy(), mode, 1))

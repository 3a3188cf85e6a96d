from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from tests.algorithms.batches import MODES, normal, poison, ragged_mask
from verl.algorithms.registry import register_policy_loss
from verl.config import ActorConfig, CriticConfig, seal
from verl.errors import ConfigError
from verl.utils.metrics import MetricSet, mmax
from verl.workers.engine.base import GlobalBatchInfo
from verl.workers.losses import actor_loss, critic_loss, sft_loss

B, R = 6, 5
MASK = ragged_mask(B, R)  # one row with a hole, one empty


def sealed_actor(loss_mode: str = "vanilla", **changes: Any) -> ActorConfig:
    config = ActorConfig()
    config.policy_loss.loss_mode = loss_mode
    for name, value in changes.items():
        setattr(config, name, value)
    return seal(config)


def actor_batch(mask: Tensor = MASK, dirty: bool = True, **extra: Tensor) -> TensorDict:
    fields = {
        "old_log_probs": normal(B, R, seed=1),
        "advantages": normal(B, R, seed=2),
        "ref_log_prob": normal(B, R, seed=3),
        **extra,
    }
    if dirty:
        fields = {name: poison(value, mask) for name, value in fields.items()}
    return TensorDict({"response_mask": mask.long(), **fields}, batch_size=[B])


def outputs(mask: Tensor = MASK, dirty: bool = True) -> dict[str, Tensor]:
    made = {"log_probs": normal(B, R, seed=4), "entropys": normal(B, R, seed=5).exp(), "values": normal(B, R, seed=6)}
    return {name: (poison(value, mask) if dirty else value).requires_grad_() for name, value in made.items()}


def info(mask: Tensor = MASK, dp_size: int = 1) -> GlobalBatchInfo:
    return GlobalBatchInfo(dp_size, int(mask.sum()), int((mask.sum(-1) > 0).sum()))


def aggregate(token: np.ndarray, mode: str, mask: Tensor = MASK, scale: float = R) -> float:
    m = mask.numpy()
    sums, sequences = (np.where(m > 0, token, 0)).sum(-1), (m.sum(-1) > 0).sum()
    if mode == "token-mean":
        return sums.sum() / m.sum()
    if mode == "seq-mean-token-mean":
        return (sums / np.maximum(m.sum(-1), 1)).sum() / sequences
    return sums.sum() / sequences / (scale if mode.endswith("norm") else 1.0)


def split_loss(
    loss: Callable[..., tuple[Tensor, MetricSet]],
    out: Mapping[str, Tensor],
    batch: TensorDict,
    bounds: list[int],
    ranks: int,
) -> tuple[Tensor, MetricSet]:
    """What training computes: micro-batches spread over ranks, losses averaged over ranks, metrics merged."""
    pieces = [
        loss({k: v[a:b] for k, v in out.items()}, batch[a:b], info(dp_size=ranks))
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.stack([value for value, _ in pieces]).sum() / ranks, MetricSet.merged(m for _, m in pieces)


FULL = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "clip_ratio_high": 0.3}


@pytest.mark.parametrize("mode", MODES)
def test_actor_loss_is_policy_loss_less_entropy_plus_kl(mode: str) -> None:
    loss = actor_loss(sealed_actor(loss_agg_mode=mode, kl_loss_type="k2", **FULL))
    out, batch = outputs(), actor_batch()
    value, metrics = loss(out, batch, info())
    value.backward()

    clean, fields = outputs(dirty=False), actor_batch(dirty=False)
    new, entropys = clean["log_probs"].detach().numpy(), clean["entropys"].detach().numpy()
    old, adv, ref = (fields[name].numpy() for name in ("old_log_probs", "advantages", "ref_log_prob"))
    ratio = np.exp(new - old)
    surrogate = np.maximum(-adv * ratio, -adv * np.clip(ratio, 0.8, 1.3))
    surrogate = np.where(adv < 0, np.minimum(surrogate, -adv * 3.0), surrogate)
    pg, kl = aggregate(surrogate, mode), aggregate((new - ref) ** 2 / 2, mode)
    assert value.item() == pytest.approx(pg - 0.01 * aggregate(entropys, mode) + 0.1 * kl)

    numbers = metrics.values_by_name()
    at = MASK.numpy() > 0
    assert numbers["actor/pg_loss"] == pytest.approx(pg)
    assert numbers["actor/kl_loss"] == pytest.approx(kl)
    assert numbers["actor/kl_coef"] == pytest.approx(0.1)
    assert numbers["actor/entropy"] == pytest.approx(entropys[at].mean())
    assert numbers["actor/ppo_kl"] == pytest.approx((old - new)[at].mean())
    for name in ("log_probs", "entropys"):
        assert torch.isfinite(out[name].grad).all()
        assert not out[name].grad[MASK == 0].any()
        assert out[name].grad[MASK > 0].any()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, B - 1), max_size=4), ranks=st.sampled_from([1, 2, 4]))
def test_any_split_gives_the_same_loss_gradient_and_metrics(mode: str, cuts: list[int], ranks: int) -> None:
    loss = actor_loss(sealed_actor(loss_agg_mode=mode, **FULL))
    whole_out, split_out = outputs(), outputs()
    whole, whole_metrics = loss(whole_out, actor_batch(), info())
    split, split_metrics = split_loss(loss, split_out, actor_batch(), sorted({0, B, *cuts}), ranks)
    whole.backward()
    split.backward()
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(split_out["log_probs"].grad, whole_out["log_probs"].grad)
    assert split_metrics.values_by_name() == pytest.approx(whole_metrics.values_by_name())


def test_metrics_of_several_mini_batches_average() -> None:
    loss = actor_loss(sealed_actor())
    _, first = loss(outputs(), actor_batch(), info())
    other = actor_batch(advantages=normal(B, R, seed=9))
    _, second = loss(outputs(), other, info())
    both = MetricSet.merged([first, second]).values_by_name()["actor/pg_loss"]
    assert both == pytest.approx((first["actor/pg_loss"].value + second["actor/pg_loss"].value) / 2)


def test_rank_without_tokens_adds_nothing() -> None:
    loss = actor_loss(sealed_actor(**FULL))
    empty = torch.zeros(B, R)
    value, metrics = loss(outputs(empty), actor_batch(empty), info(dp_size=2))
    assert value.item() == 0.0
    value.backward()
    _, real = loss(outputs(), actor_batch(), info(dp_size=2))
    expected = real.values_by_name()
    assert MetricSet.merged([metrics, real]).values_by_name() == pytest.approx(expected)
    assert np.isfinite(list(metrics.values_by_name().values())).all()


def test_on_policy_loss_is_minus_the_mean_advantage_exactly() -> None:
    mask = MASK
    log_probs = normal(B, R, seed=1, dtype=torch.float32)
    advantages = normal(B, R, seed=2, dtype=torch.float32)
    batch = actor_batch(old_log_probs=log_probs.clone(), advantages=advantages)
    value, metrics = actor_loss(sealed_actor())({"log_probs": log_probs.requires_grad_()}, batch, info())
    expected = (-torch.where(mask.bool(), advantages, 0.0).sum() / mask.sum()).item()
    assert value.item() == expected
    assert metrics["actor/pg_loss"].value == expected
    assert metrics["actor/ppo_kl"].value == 0.0
    assert metrics["actor/pg_clipfrac"].value == 0.0


def test_what_a_loss_needs_follows_the_config() -> None:
    plain = actor_loss(sealed_actor())
    assert plain.want == {"log_probs"}
    assert plain.fields == {"response_mask", "old_log_probs", "advantages"}
    assert plain.optional_fields == {"rollout_is_weights"}
    full = actor_loss(sealed_actor(**FULL))
    assert full.want == {"log_probs", "entropys"}
    assert full.fields == plain.fields | {"ref_log_prob"}
    assert critic_loss(CriticConfig()).want == {"values"}
    assert critic_loss(CriticConfig()).fields == {"response_mask", "values", "returns"}
    assert sft_loss().want == {"log_probs"}


def test_rollout_weights_are_used_when_the_batch_has_them() -> None:
    loss = actor_loss(sealed_actor())
    plain, _ = loss(outputs(), actor_batch(), info())
    doubled, _ = loss(outputs(), actor_batch(rollout_is_weights=torch.full((B, R), 2.0)), info())
    torch.testing.assert_close(doubled, 2 * plain)


def test_a_plug_in_gets_the_global_counts_and_its_metrics_are_exact() -> None:
    """A loss written for the public signature: raw exp, a float metric, a Metric, counts from the config."""
    seen: list[Any] = []

    @register_policy_loss("test_losses_plug_in")
    def plug_in(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        from verl.trainer.ppo.core_algos import agg_loss

        seen.append((config.global_batch_info, config.clip_ratio, config.get("clip_ratio_c"), config.get("nope", 3)))
        ratio = torch.exp(log_prob - old_log_prob)
        token = -advantages * ratio
        kept = token.detach()[response_mask.bool()]
        metrics = {"my/mean": kept.mean().item(), "my/max": mmax(kept.max() if len(kept) else -np.inf)}
        return agg_loss(token, response_mask, loss_agg_mode, **config.global_batch_info), metrics

    loss = actor_loss(sealed_actor("test_losses_plug_in", loss_scale_factor=7))
    out = outputs()
    value, metrics = split_loss(loss, out, actor_batch(), [0, 1, 3, B], ranks=1)
    value.backward()
    assert torch.isfinite(out["log_probs"].grad).all()
    counts = {"dp_size": 1, "batch_num_tokens": int(MASK.sum()), "global_batch_size": B - 1, "loss_scale_factor": 7}
    assert seen[0] == (counts, 0.2, 3.0, 3)
    clean, fields = outputs(dirty=False)["log_probs"].detach(), actor_batch(dirty=False)
    token = (-fields["advantages"] * (clean - fields["old_log_probs"]).exp())[MASK.bool()]
    assert value.item() == pytest.approx(token.mean().item())
    assert metrics["my/mean"].value == pytest.approx(token.mean().item())
    assert metrics["my/max"].value == pytest.approx(token.max().item())


def test_a_plug_in_may_multiply_by_the_mask() -> None:
    """0 * nan would be nan: inputs outside the mask arrive as numbers."""

    @register_policy_loss("test_losses_product")
    def plug_in(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        token = -advantages * (log_prob - old_log_prob).exp() * rollout_is_weights
        return (token * response_mask).sum() / config.global_batch_info["batch_num_tokens"], {}

    out = outputs()
    batch = actor_batch(rollout_is_weights=torch.ones(B, R))
    value, _ = actor_loss(sealed_actor("test_losses_product"))(out, batch, info())
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(out["log_probs"].grad).all()


def test_a_plug_in_without_weights_refuses_a_batch_that_has_them() -> None:
    @register_policy_loss("test_losses_no_weights")
    def plug_in(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        return log_prob.sum(), {}

    loss = actor_loss(sealed_actor("test_losses_no_weights"))
    loss(outputs(), actor_batch(), info())
    with pytest.raises(ConfigError, match="'test_losses_no_weights' has no parameter"):
        loss(outputs(), actor_batch(rollout_is_weights=torch.ones(B, R)), info())


def test_wrong_configurations_are_refused_when_the_loss_is_built() -> None:
    with pytest.raises(ConfigError, match="unknown policy loss 'vanila'"):
        actor_loss(sealed_actor("vanila"))
    with pytest.raises(ConfigError, match="unknown kl_penalty 'full'"):
        actor_loss(sealed_actor(use_kl_loss=True, kl_loss_type="full"))


def test_the_sealed_config_is_left_alone() -> None:
    config = sealed_actor()
    actor_loss(config)(outputs(), actor_batch(), info())
    assert dict(config.global_batch_info) == {}


def test_actor_loss_gradcheck() -> None:
    loss, batch = actor_loss(sealed_actor(**FULL)), actor_batch()

    def fn(log_probs: Tensor, entropys: Tensor) -> Tensor:
        return loss({"log_probs": log_probs, "entropys": entropys}, batch, info(dp_size=2))[0]

    clean = outputs(dirty=False)
    assert torch.autograd.gradcheck(fn, (clean["log_probs"], clean["entropys"]))


@pytest.mark.parametrize("mode", MODES)
def test_critic_loss_and_its_metrics_for_any_split(mode: str) -> None:
    config = CriticConfig()
    config.loss_agg_mode, config.cliprange_value = mode, 0.4
    loss = critic_loss(seal(config))
    returns, values = normal(B, R, seed=7), normal(B, R, seed=8)
    batch = actor_batch(returns=returns, values=values)
    vpreds = outputs(dirty=False)["values"].detach().numpy()
    bounded = np.clip(vpreds, values.numpy() - 0.4, values.numpy() + 0.4)
    plain, clipped = (vpreds - returns.numpy()) ** 2, (bounded - returns.numpy()) ** 2
    at = MASK.numpy() > 0
    for bounds, ranks in (([0, B], 1), ([0, 1, 4, B], 2)):
        out = outputs()
        value, metrics = split_loss(loss, out, batch, bounds, ranks)
        value.backward()
        assert value.item() == pytest.approx(aggregate(np.maximum(plain, clipped) / 2, mode))
        assert torch.isfinite(out["values"].grad).all()
        assert metrics.values_by_name() == pytest.approx(
            {
                "critic/vf_loss": value.item(),
                "critic/vf_clipfrac": (clipped > plain)[at].mean(),
                "critic/vpred_mean": vpreds[at].mean(),
            }
        )


def test_sft_loss_is_the_token_mean_over_the_loss_mask() -> None:
    log_probs = normal(B, R, seed=4)
    loss_mask = MASK.clone()
    loss_mask[:, -1] = 0
    for mask, extra in ((MASK, {}), (loss_mask, {"loss_mask": loss_mask})):
        batch = TensorDict({"response_mask": MASK, **extra}, batch_size=[B])
        x = poison(log_probs, mask).requires_grad_()
        pieces = [sft_loss()({"log_probs": x[a:b]}, batch[a:b], info(mask)) for a, b in ((0, 2), (2, B))]
        expected = -log_probs[mask.bool()].mean().item()
        assert sum(value.item() for value, _ in pieces) == pytest.approx(expected)
        assert MetricSet.merged(m for _, m in pieces)["train/loss"].value == pytest.approx(expected)
        sum(value for value, _ in pieces).backward()
        assert torch.isfinite(x.grad).all()


def test_a_loss_gets_the_batch_fields_that_it_names() -> None:
    @register_policy_loss("test_losses_extra")
    def loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str,
        config: Any, rollout_is_weights: Tensor | None = None, *, difficulty: Tensor, hint: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        seen = {"hinted": float(hint is not None)}
        return (log_prob * difficulty).sum(), seen

    built = actor_loss(sealed_actor("test_losses_extra"))
    assert "difficulty" in built.fields
    assert built.optional_fields == {"rollout_is_weights", "hint"}
    difficulty = normal(B, R, seed=8)
    for extra, hinted in (({}, 0.0), ({"hint": torch.arange(B)}, 1.0)):
        out, batch = outputs(), actor_batch(difficulty=difficulty)
        batch.update(extra)
        value, metrics = built(out, batch, info())
        value.backward()
        expected = (out["log_probs"].detach().nan_to_num() * difficulty * MASK).sum()
        torch.testing.assert_close(value.detach(), expected)
        assert torch.isfinite(out["log_probs"].grad).all()
        assert metrics["hinted"].value == hinted


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_from_the_whole_batch_before_it_is_split(name: str) -> None:
    config = ActorConfig()
    config.policy_loss.loss_mode = name
    for key in ("clip_cov_ratio", "kl_cov_ratio"):
        setattr(config.policy_loss, key, 0.3)
    config.policy_loss.clip_cov_lb = 0.0
    loss = actor_loss(seal(config))
    batch = actor_batch()
    prepared = loss.prepare(dict(batch.items()))
    assert prepared["selected_tokens"].shape == (B, R)
    assert not prepared["selected_tokens"][MASK == 0].any()
    batch["selected_tokens"] = prepared["selected_tokens"]
    whole_out, split_out = outputs(), outputs()
    whole, whole_metrics = loss(whole_out, batch, info())
    split, split_metrics = split_loss(loss, split_out, batch, [0, 1, 4, B], 2)
    whole.backward()
    split.backward()
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(split_out["log_probs"].grad, whole_out["log_probs"].grad)
    assert split_metrics.values_by_name() == pytest.approx(whole_metrics.values_by_name())
    assert split_metrics.values_by_name()["actor/cov_selected"] > 0

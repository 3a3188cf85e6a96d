"""The losses that engines train with, put together from the algorithm layer.

A loss is called once per micro-batch as ``loss(outputs, micro_batch, info)`` and says beforehand what it needs:
``want`` are the outputs that the engine must compute, ``fields`` the batch fields it reads, ``optional_fields`` those
it uses when the batch has them.

Every loss is divided by the global counts in ``info``. The loss values among the metrics are therefore shares of the
mini-batch's number: they add up over micro-batches and ranks, whatever the split.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algorithms.aggregate import agg_loss, keep_masked, masked_mean
from verl.algorithms.kl import check_kl_penalty, kl_penalty
from verl.algorithms.preference import dpo_losses, pairwise_reward_losses
from verl.algorithms.prime import implicit_reward_loss
from verl.algorithms.registry import MetricValue, PolicyLossFn, get_policy_loss_fn, loss_fields, prepare_loss_fields
from verl.algorithms.value_loss import compute_value_loss
from verl.errors import ConfigError
from verl.utils.metrics import Metric, MetricSet

if TYPE_CHECKING:
    from verl.config import ActorConfig, CriticConfig, PreferenceLossConfig, RewardModelConfig
    from verl.workers.engine.base import GlobalBatchInfo

Batch: TypeAlias = TensorDict | Mapping[str, Tensor]


def _counts(info: GlobalBatchInfo, loss_scale_factor: float | None) -> dict[str, Any]:
    return {
        "dp_size": info.dp_size,
        "batch_num_tokens": info.batch_num_tokens,
        "global_batch_size": info.global_batch_size,
        "loss_scale_factor": loss_scale_factor,
    }


def _metric_set(
    mask: Tensor,
    info: GlobalBatchInfo,
    *,
    losses: Mapping[str, Tensor],
    means: Mapping[str, MetricValue],
) -> MetricSet:
    """Turn a micro-batch's numbers into metrics that merge exactly.

    Args:
        mask: ``(B, R)``, of the micro-batch.
        info: counts of the mini-batch.
        losses: scalars from ``agg_loss``. Their weights are shares of the mini-batch's tokens and sum to 1 over its
            pieces, so merging pieces adds the values up, and merging several mini-batches averages their losses.
        means: means over the micro-batch's tokens, or complete metrics.
    """
    tensors = {name: value for name, value in {**losses, **means}.items() if isinstance(value, Tensor)}
    # One transfer: reading scalars one at a time would stall an accelerator's queue for each of them.
    numbers = torch.stack([t.detach().double() for t in (mask.bool().sum(), *tensors.values())]).tolist()
    tokens, values = numbers[0], dict(zip(tensors, numbers[1:], strict=True))

    out = MetricSet()
    for name in losses:
        out[name] = Metric("mean", values[name] / info.dp_size, tokens / max(float(info.batch_num_tokens), 1.0))
    for name, value in means.items():
        if isinstance(value, Metric):
            out[name] = value
        else:
            number = values[name] if name in values else float(value)
            out[name] = Metric("mean", number * tokens if tokens else 0.0, tokens)
    return out


def _harmless(values: Tensor, mask: Tensor) -> Tensor:
    """Token values with 0 outside the mask; anything that is not one value per token stays as it is."""
    # A zero of the same type: whole numbers, such as token ids, must stay whole.
    return torch.where(mask.bool(), values, values.new_zeros(())) if values.shape == mask.shape else values


@dataclass(frozen=True)
class ActorLoss:
    """Policy loss, less the entropy bonus, plus the KL loss; build it with :func:`actor_loss`."""

    config: ActorConfig
    policy_loss: PolicyLossFn
    takes_weights: bool
    want: frozenset[str]
    fields: frozenset[str]
    optional_fields: frozenset[str] = field(default=frozenset({"rollout_is_weights"}))
    extra_fields: frozenset[str] = frozenset()

    def prepare(self, fields: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Fields that the loss wants made from the whole batch, once per step and before it is split.

        Args:
            fields: all fields of the step's batch, with old log-probs and advantages.

        Returns:
            Fields to add to the batch, one row per sample; empty for most losses.
        """
        return prepare_loss_fields(self.policy_loss, fields, self.config)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        """Loss of a micro-batch.

        Args:
            outputs: ``log_probs`` and, if wanted, ``entropys``, ``(B, R)``, with gradients.
            batch: the micro-batch.
            info: counts of the mini-batch.

        Returns:
            ``(loss, metrics)``.
        """
        config = self.config
        mask = batch["response_mask"]
        counts = _counts(info, config.loss_scale_factor)
        weights = batch.get("rollout_is_weights", None)
        if weights is not None and not self.takes_weights:
            raise ConfigError(
                f"the batch has rollout_is_weights, but policy loss {config.policy_loss.loss_mode!r} has no parameter "
                "of that name; add it to the loss or turn rollout importance weights off"
            )
        # Plug-ins compute on padding too, so it gets harmless values: exp(nan) spoils gradients even if masked later.
        log_probs = keep_masked(outputs["log_probs"], mask)
        old_log_probs = log_probs.detach() if config.skip_old_log_prob else batch["old_log_probs"]
        found = {name: batch.get(name, None) for name in sorted(self.extra_fields)}
        extra = {name: _harmless(values, mask) for name, values in found.items() if values is not None}
        if weights is not None:
            extra["rollout_is_weights"] = keep_masked(weights, mask)
        loss, plugin_metrics = self.policy_loss(
            keep_masked(old_log_probs, mask),
            log_probs,
            keep_masked(batch["advantages"], mask),
            mask,
            config.loss_agg_mode,
            config.with_batch_info(counts),  # plug-ins find the counts there, as config.global_batch_info
            **extra,
        )
        losses: dict[str, Tensor] = {"actor/pg_loss": loss}
        means: dict[str, MetricValue] = dict(plugin_metrics)
        if "entropys" in self.want:
            entropys = keep_masked(outputs["entropys"], mask)
            loss = loss - config.entropy_coeff * agg_loss(entropys, mask, config.loss_agg_mode, **counts)
            means["actor/entropy"] = masked_mean(entropys.detach().double(), mask)
        if config.use_kl_loss:
            estimate = kl_penalty(log_probs, keep_masked(batch["ref_log_prob"], mask), config.kl_loss_type)
            kl_loss = agg_loss(estimate, mask, config.loss_agg_mode, **counts)
            loss = loss + config.kl_loss_coef * kl_loss
            losses["actor/kl_loss"] = kl_loss
            means["actor/kl_coef"] = config.kl_loss_coef
        return loss, _metric_set(mask, info, losses=losses, means=means)


def actor_loss(config: ActorConfig) -> ActorLoss:
    """Build the policy's loss from the actor section.

    Raises:
        ConfigError: unknown policy loss or KL estimate, or a KL estimate that needs logits.
    """
    policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)
    parameters = inspect.signature(policy_loss).parameters.values()
    required, optional = loss_fields(policy_loss)
    fields = {"response_mask", "advantages", *required}
    if not config.skip_old_log_prob:
        fields.add("old_log_probs")
    if config.use_kl_loss:
        check_kl_penalty(config.kl_loss_type, sampled_tokens_only=True)
        fields.add("ref_log_prob")
    return ActorLoss(
        config=config,
        policy_loss=policy_loss,
        takes_weights=any(p.name == "rollout_is_weights" or p.kind is p.VAR_KEYWORD for p in parameters),
        want=frozenset({"log_probs", "entropys"} if config.entropy_coeff != 0 else {"log_probs"}),
        fields=frozenset(fields),
        optional_fields=frozenset({"rollout_is_weights"}) | optional,
        extra_fields=required | optional,
    )


@dataclass(frozen=True)
class CriticLoss:
    """Clipped value loss; build it with :func:`critic_loss`."""

    config: CriticConfig
    want: frozenset[str] = frozenset({"values"})
    fields: frozenset[str] = frozenset({"response_mask", "values", "returns"})
    optional_fields: frozenset[str] = frozenset()

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        """Loss of a micro-batch; ``outputs["values"]`` has gradients, ``batch["values"]`` is from before the update."""
        mask = batch["response_mask"]
        vpreds = keep_masked(outputs["values"], mask)
        counts = _counts(info, getattr(self.config, "loss_scale_factor", None))
        loss, clipfrac = compute_value_loss(
            vpreds,
            batch["returns"],
            batch["values"],
            mask,
            self.config.cliprange_value,
            self.config.loss_agg_mode,
            **counts,
        )
        means: dict[str, MetricValue] = {
            "critic/vf_clipfrac": clipfrac,
            "critic/vpred_mean": masked_mean(vpreds.detach().double(), mask),
        }
        return loss, _metric_set(mask, info, losses={"critic/vf_loss": loss}, means=means)


def critic_loss(config: CriticConfig) -> CriticLoss:
    """Build the critic's loss from the critic section."""
    return CriticLoss(config)


@dataclass(frozen=True)
class ImplicitRewardLoss:
    """Cross-entropy of outcomes under summed implicit rewards; build it with :func:`implicit_reward_model_loss`."""

    beta: float
    want: frozenset[str] = frozenset({"log_probs"})
    fields: frozenset[str] = frozenset({"response_mask", "rm_ref_log_prob", "outcomes"})
    optional_fields: frozenset[str] = frozenset()

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        """Loss of a micro-batch, a mean over responses."""
        mask = batch["response_mask"]
        loss, accuracy = implicit_reward_loss(
            outputs["log_probs"],
            batch["rm_ref_log_prob"],
            mask,
            batch["outcomes"],
            self.beta,
            dp_size=info.dp_size,
            global_batch_size=info.global_batch_size,
        )
        metrics = _metric_set(mask, info, losses={"reward_model/loss": loss}, means={})
        rows = float(mask.bool().any(-1).sum())
        metrics["reward_model/accuracy"] = Metric("mean", float(accuracy) * rows, rows)
        return loss, metrics


def implicit_reward_model_loss(config: RewardModelConfig) -> ImplicitRewardLoss:
    """Build the loss of an implicit process reward model from the reward model's section."""
    return ImplicitRewardLoss(config.beta)


@dataclass(frozen=True)
class SFTLoss:
    """Cross-entropy of the tokens to imitate; build it with :func:`sft_loss`."""

    want: frozenset[str] = frozenset({"log_probs"})
    fields: frozenset[str] = frozenset({"response_mask"})
    optional_fields: frozenset[str] = frozenset({"loss_mask"})

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        """Token-mean negative log-likelihood over ``loss_mask`` if the batch has one, else ``response_mask``."""
        mask = batch.get("loss_mask", None)
        if mask is None:
            mask = batch["response_mask"]
        loss = agg_loss(-outputs["log_probs"], mask, "token-mean", **_counts(info, None))
        return loss, _metric_set(mask, info, losses={"train/loss": loss}, means={})


def sft_loss() -> SFTLoss:
    """Build the supervised loss; ``info.batch_num_tokens`` must count the same mask."""
    return SFTLoss()


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into those of chosen and those of rejected answers, which follow each other in turn."""
    return values[0::2], values[1::2]


def _pair_metrics(losses: Tensor, scores: tuple[Tensor, Tensor], info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
    """Mean loss over the pairs of the mini-batch, and how well the pairs are told apart."""
    chosen, rejected = scores
    pairs, everywhere = len(losses), max(info.global_batch_size // 2, 1)
    total = losses.sum() / everywhere
    means = {
        "train/accuracy": (chosen > rejected).double().mean(),
        "train/margin": (chosen - rejected).double().mean(),
        "train/chosen_score": chosen.double().mean(),
        "train/rejected_score": rejected.double().mean(),
    }
    numbers = torch.stack([losses.detach().double().sum(), *means.values()]).tolist()
    metrics = MetricSet({name: Metric("mean", n * pairs, pairs) for name, n in zip(means, numbers[1:], strict=True)})
    metrics["train/loss"] = Metric("mean", numbers[0] / everywhere, pairs / everywhere)
    return total * info.dp_size, metrics


@dataclass(frozen=True)
class DPOLoss:
    """Direct preference optimisation over rows that alternate chosen, rejected, chosen, ...."""

    config: PreferenceLossConfig
    want: frozenset[str] = frozenset({"log_probs"})
    fields: frozenset[str] = frozenset({"response_mask", "ref_log_prob"})
    optional_fields: frozenset[str] = frozenset()

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        """Mean over pairs; scores are the implicit rewards."""
        mask, config = batch["response_mask"], self.config
        chosen, rejected = _pairs(keep_masked(outputs["log_probs"], mask).sum(-1))
        ref_chosen, ref_rejected = _pairs(keep_masked(batch["ref_log_prob"], mask).sum(-1))
        losses, better, worse = dpo_losses(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=config.beta,
            loss_type=config.loss_type,
            label_smoothing=config.label_smoothing,
        )
        return _pair_metrics(losses, (better, worse), info)


@dataclass(frozen=True)
class PairwiseRewardLoss:
    """Bradley-Terry loss of a reward model over rows that alternate chosen, rejected, chosen, ...."""

    config: PreferenceLossConfig
    want: frozenset[str] = frozenset({"scores"})
    fields: frozenset[str] = frozenset()
    optional_fields: frozenset[str] = frozenset({"margin"})

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        """Mean over pairs; ``margin`` (B,) is that of the pair, on both of its rows."""
        chosen, rejected = _pairs(outputs["scores"])
        margin = batch.get("margin", None)
        losses = pairwise_reward_losses(
            chosen, rejected, None if margin is None else margin[0::2], center_coef=self.config.center_coef
        )
        return _pair_metrics(losses, (chosen.detach(), rejected.detach()), info)

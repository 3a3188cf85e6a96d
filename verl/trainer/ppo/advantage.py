"""From scores to advantages: the controller-side steps between reward and update, as functions of a batch."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_mean
from verl.algorithms.group import sequence_scores
from verl.algorithms.kl import KLController
from verl.algorithms.kl import kl_penalty as kl_estimate
from verl.algorithms.registry import (
    EstimatorState,
    call_estimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    prepare_loss_fields,
)
from verl.algorithms.reweight import draw, pf_ppo_weights
from verl.algorithms.settings import setting
from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.trainer.ppo.fields import tensors_of


def compute_response_mask(data: DataProto) -> Tensor:
    """Response mask ``(B, R)`` of single-turn responses: the end of ``attention_mask`` ``(B, S)``."""
    tensors = tensors_of(data)
    mask: Tensor = tensors["attention_mask"][:, -tensors["responses"].shape[1] :]
    return mask


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    r"""Subtract the KL penalty from the scores and let the controller adapt (``algorithm.use_kl_in_reward``).

    .. math:: r_t = s_t - \beta\,\widehat{KL}_t

    The controller sees the mean KL per response token of the whole batch, and is told the number of samples.

    Args:
        data: has ``token_level_scores``, ``old_log_probs``, ``ref_log_prob`` and ``response_mask``, all ``(B, R)``.
        kl_ctrl: holds and adapts :math:`\beta`.
        kl_penalty: name of the estimate, see :func:`verl.algorithms.kl.kl_penalty`.

    Returns:
        ``data`` with ``token_level_rewards`` added, and the metrics ``actor/reward_kl_penalty`` (KL in nats per
        token) and ``actor/reward_kl_penalty_coeff`` (:math:`\beta` used for this batch).

    Raises:
        SchemaError: a field is missing.
    """
    needed = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
    batch = tensors_of(data)
    missing = [name for name in needed if name not in batch]
    if missing:
        raise SchemaError(
            f"the KL penalty in the reward needs {', '.join(missing)}, which the batch lacks; `ref_log_prob` comes "
            "from a reference policy, which algorithm.use_kl_in_reward=True starts"
        )
    mask = batch["response_mask"]
    kl = kl_estimate(keep_masked(batch["old_log_probs"], mask), keep_masked(batch["ref_log_prob"], mask), kl_penalty)
    coefficient = kl_ctrl.value
    batch["token_level_rewards"] = keep_masked(batch["token_level_scores"] - coefficient * kl, mask)
    mean_kl = float(masked_mean(kl.double(), mask))
    samples = int(batch["last_row"].sum()) if "last_row" in batch else len(data)
    kl_ctrl.update(current_kl=mean_kl, n_steps=samples)
    return data, {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: DataProto,
    config: Any = None,
    *,
    adv_estimator: str | Enum | None = None,
    state: EstimatorState | None = None,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> DataProto:
    """Add ``advantages`` and ``returns``, both ``(B, R)`` float32, from the configured estimator.

    With ``config.use_pf_ppo`` the rows are drawn anew afterwards, see :func:`compute_pf_ppo_reweight_data`.

    Args:
        data: the batch, with all fields that the estimator's parameters name.
        config: the ``algorithm`` section.
        adv_estimator: the estimator; default ``config.adv_estimator``.
        state: what a stateful estimator keeps between steps, from :func:`verl.algorithms.registry.make_state`.
        generator: source of randomness of PF-PPO.
        settings: hyper-parameters such as ``gamma`` that go before those in ``config``.

    Raises:
        ConfigError: unknown estimator, or a stateful one without ``state``.
        SchemaError: the batch lacks a field, or the estimator returned something of another shape.
    """
    fn = get_adv_estimator_fn(adv_estimator if adv_estimator is not None else setting(config, "adv_estimator", "gae"))
    batch = tensors_of(data)
    fields: dict[str, Any] = {**data.non_tensor_batch, **dict(batch.items())}
    whole = {"batch": batch, "non_tensor_batch": data.non_tensor_batch}
    advantages, returns = call_estimator(fn, fields, config, settings=settings, whole=whole, state=state)
    shape = batch["response_mask"].shape
    for name, value in (("advantages", advantages), ("returns", returns)):
        if value.shape != shape:
            raise SchemaError(
                f"advantage estimator {fn.__name__} returned {name} of shape {tuple(value.shape)}; both results must "
                f"have the shape of response_mask, {tuple(shape)}"
            )
        batch[name] = value.float()
    if setting(config, "use_pf_ppo", False):
        pf_ppo = setting(config, "pf_ppo", None)
        return compute_pf_ppo_reweight_data(
            data,
            setting(pf_ppo, "reweight_method", "pow"),
            setting(pf_ppo, "weight_pow", 2.0),
            generator=generator,
        )
    return data


def compute_pf_ppo_reweight_data(
    data: DataProto,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    *,
    generator: torch.Generator | None = None,
) -> DataProto:
    """Draw as many rows as there are, with replacement and by their scores (PF-PPO, arXiv:2409.06957).

    The n-th draw takes the place of the row with the n-th ``sample_index`` and keeps that index, so that the result
    does not depend on how the rows are arranged.

    Args:
        data: has ``token_level_scores`` (or ``token_level_rewards``) and ``response_mask``, and ``uid`` for the methods
            that compare the samples of a prompt.
        reweight_method: ``pow``, ``max_min`` or ``max_random``; see :func:`verl.algorithms.reweight.pf_ppo_weights`.
        weight_pow: the power of ``pow``.
        generator: source of randomness; by default one with seed 0.

    Raises:
        ConfigError: unknown method.
        SchemaError: there are no scores.
    """
    batch = tensors_of(data)
    name = next((n for n in ("token_level_scores", "token_level_rewards") if n in batch), None)
    if name is None:
        raise SchemaError("PF-PPO draws samples by their scores, but the batch has no token_level_scores")
    places = torch.argsort(batch["sample_index"], stable=True) if "sample_index" in batch else torch.arange(len(data))
    places = places.cpu()
    uid = data.non_tensor_batch.get("uid")
    weights = pf_ppo_weights(
        sequence_scores(batch[name], batch["response_mask"])[places],
        None if uid is None else uid[places.numpy()],
        reweight_method=reweight_method,
        weight_pow=weight_pow,
    )
    rows = torch.empty_like(places)
    rows[places] = places[draw(weights, generator)]
    drawn = data.select_idxs(rows)
    if "sample_index" in batch:
        tensors_of(drawn)["sample_index"] = batch["sample_index"].clone()
    return drawn


def prepare_policy_loss(data: DataProto, actor: Any) -> DataProto:
    """Add the fields that the policy loss wants made from the whole batch; for most losses there are none.

    Called once per step, when advantages and old log-probs are there and before the batch is split.

    Args:
        data: the step's batch.
        actor: the actor section.
    """
    fn = get_policy_loss_fn(setting(setting(actor, "policy_loss", None), "loss_mode", "vanilla"))
    batch = tensors_of(data)
    fields: dict[str, Any] = {**data.non_tensor_batch, **dict(batch.items())}
    for name, value in prepare_loss_fields(fn, fields, actor).items():
        batch[name] = value
    return data

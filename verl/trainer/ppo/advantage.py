"""From scores to advantages: the controller-side steps between reward and update, as functions of a batch."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_mean
from verl.algorithms.kl import KLController
from verl.algorithms.kl import kl_penalty as kl_estimate
from verl.algorithms.registry import call_estimator, get_adv_estimator_fn
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
    kl_ctrl.update(current_kl=mean_kl, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: DataProto, config: Any = None, *, adv_estimator: str | Enum | None = None, **settings: Any
) -> DataProto:
    """Add ``advantages`` and ``returns``, both ``(B, R)`` float32, from the configured estimator.

    Args:
        data: the batch, with all fields that the estimator's parameters name.
        config: the ``algorithm`` section.
        adv_estimator: the estimator; default ``config.adv_estimator``.
        settings: hyper-parameters such as ``gamma`` that go before those in ``config``.

    Raises:
        ConfigError: unknown estimator.
        SchemaError: the batch lacks a field, or the estimator returned something of another shape.
    """
    fn = get_adv_estimator_fn(adv_estimator if adv_estimator is not None else setting(config, "adv_estimator", "gae"))
    batch = tensors_of(data)
    fields: dict[str, Any] = {**data.non_tensor_batch, **dict(batch.items())}
    whole = {"batch": batch, "non_tensor_batch": data.non_tensor_batch}
    advantages, returns = call_estimator(fn, fields, config, settings=settings, whole=whole)
    shape = batch["response_mask"].shape
    for name, value in (("advantages", advantages), ("returns", returns)):
        if value.shape != shape:
            raise SchemaError(
                f"advantage estimator {fn.__name__} returned {name} of shape {tuple(value.shape)}; both results must "
                f"have the shape of response_mask, {tuple(shape)}"
            )
        batch[name] = value.float()
    return data

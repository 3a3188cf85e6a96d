"""Per-token KL estimates against a reference policy, and the controllers of the KL coefficient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from verl.algorithms.settings import setting
from verl.algorithms.surrogate import LOG_RATIO_LIMIT
from verl.errors import ConfigError

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
# The k3 estimate grows like exp(log ratio): one outlier token would outweigh a whole batch.
K3_LIMIT = 10.0


def _estimate(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return logprob - ref_logprob
    if kind == "abs":
        return (logprob - ref_logprob).abs()
    if kind == "k2":
        return 0.5 * (logprob - ref_logprob).square()
    if kind == "k3":
        log_ratio = (ref_logprob - logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where on-policy training lives.
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=K3_LIMIT)
    if logprob.dim() < 3:
        raise ValueError(
            f"kl_penalty 'full' needs logits (or log-probs) of the whole vocabulary, (B, R, V); got shape "
            f"{tuple(logprob.shape)}. With log-probs of the sampled tokens use 'k1', 'k2' or 'k3'"
        )
    log_p, log_q = torch.log_softmax(logprob, -1), torch.log_softmax(ref_logprob, -1)
    p = log_p.exp()
    # A token that the policy cannot sample adds nothing, whatever the reference thinks of it.
    difference = torch.where(p > 0, log_p - log_q, 0.0)
    return (p * difference).sum(-1)


def check_kl_penalty(kl_penalty: str, *, sampled_tokens_only: bool = False) -> None:
    """Raise ``ConfigError`` unless ``kl_penalty`` is a known name (with ``sampled_tokens_only``: not ``full``)."""
    base = kl_penalty.removesuffix("+")
    known = tuple(k for k in KL_PENALTIES if not (sampled_tokens_only and k == "full"))
    if base not in known or kl_penalty == "full+":
        plus = ", ".join(k for k in known if k != "full")
        raise ConfigError(
            f"unknown kl_penalty {kl_penalty!r}; choose one of {', '.join(known)}, or with a final '+' {plus}"
        )


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    r"""Estimate :math:`KL(\pi \| \pi_{ref})` token by token, for tokens sampled by :math:`\pi`.

    The estimates are compared in Schulman, "Approximating KL Divergence" (2020).
    With :math:`d = \log\pi - \log\pi_{ref}` of the sampled token:

    =======================  =========================  ==============================================
    ``kl``, ``k1``           :math:`d`                  unbiased, high variance, may be negative
    ``abs``                  :math:`|d|`                not a KL estimate; a symmetric penalty
    ``mse``, ``k2``          :math:`d^2/2`              biased; its *gradient* is unbiased
    ``low_var_kl``, ``k3``   :math:`e^{-d} - 1 + d`     unbiased, never negative, low variance
    ``full``                 sum over the vocabulary    exact; needs logits ``(B, R, V)``
    =======================  =========================  ==============================================

    ``k3`` clamps :math:`d` to ±20 and the result to at most 10; a clamped token has no gradient. A final ``+``
    (``k1+``, ``k3+``, ...) keeps the value of the named estimate and takes the gradient of ``k2``. As a loss on
    on-policy samples, ``k1`` has gradient zero on average and ``k3`` that of the other direction,
    :math:`KL(\pi_{ref}\|\pi)`; ``k2`` has the gradient of :math:`KL(\pi\|\pi_{ref})` itself.

    There is no mask here: positions outside it come back as they are, so mask the inputs or the result.

    Args:
        logprob: ``(B, R)`` log-probs of the sampled tokens, or ``(B, R, V)`` for ``full``.
        ref_logprob: same shape, of the reference.
        kl_penalty: the estimate's name.

    Returns:
        ``(B, R)``, in nats.

    Raises:
        ConfigError: unknown name.
        ValueError: ``full`` without a vocabulary dimension.
    """
    check_kl_penalty(kl_penalty)
    base = kl_penalty.removesuffix("+")
    value = _estimate(logprob, ref_logprob, _ALIASES.get(base, base))
    if not kl_penalty.endswith("+"):
        return value
    slope = _estimate(logprob, ref_logprob, "k2")
    return value.detach() + (slope - slope.detach())


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores less the k1 KL penalty: ``scores - kl_ratio * (old_log_prob - ref_log_prob)``, all ``(B, R)``."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


class KLController(Protocol):
    """Holds the KL coefficient ``value`` and may adapt it after each step."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Take note of the KL of a step in nats per token, over ``n_steps`` samples."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient, for the record."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the configured coefficient: a resumed run may deliberately use another one."""


class AdaptiveKLController:
    r"""A coefficient that steers the KL towards a target (Ziegler et al., arXiv:1909.08593).

    .. math::
        \beta \leftarrow \beta \Bigl(1 + \operatorname{clip}\bigl(\tfrac{KL}{target} - 1, -0.2, 0.2\bigr)
        \tfrac{n}{horizon}\Bigr)

    *n* is the number of samples in the step; the factor never drops below 0.

    Args:
        init_kl_coef: first coefficient.
        target_kl: wanted KL in nats per token, positive.
        horizon: samples over which a correction builds up, positive.

    Raises:
        ConfigError: target or horizon is not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(
                f"kl_ctrl.target_kl is {target_kl} and kl_ctrl.horizon is {horizon}; both must be positive"
            )
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a step of ``n_steps`` samples whose KL was ``current_kl``."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        # A batch several times the horizon would turn the factor negative, and the penalty into a reward.
        self.value *= max(1.0 + error * n_steps / self.horizon, 0.0)

    def state_dict(self) -> dict[str, float]:
        """The current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the coefficient that was saved."""
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """Build the controller that ``algorithm.kl_ctrl`` describes.

    Args:
        kl_ctrl: has ``type`` (``fixed`` or ``adaptive``), ``kl_coef``, and for ``adaptive`` ``target_kl`` and
            ``horizon``.

    Raises:
        ConfigError: unknown type or bad value.
    """
    kind = setting(kl_ctrl, "type", "fixed")
    coefficient = setting(kl_ctrl, "kl_coef", 0.001)
    if kind == "fixed":
        return FixedKLController(coefficient)
    if kind == "adaptive":
        return AdaptiveKLController(coefficient, setting(kl_ctrl, "target_kl", 0.1), setting(kl_ctrl, "horizon", 10000))
    raise ConfigError(f"unknown algorithm.kl_ctrl.type {kind!r}; choose 'fixed' or 'adaptive'")

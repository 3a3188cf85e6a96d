r"""Rollout correction: what to do when the policy that sampled is not the policy that is trained.

The two differ when they compute in other precisions or kernels, sample with other settings, or when samples are older
than the weights. With the log ratio

.. math:: \ell_t = \log\pi_{train}(y_t) - \log\pi_{rollout}(y_t)

a **weight** :math:`w` multiplies a token's loss, so that the expectation under the rollout becomes the expectation
under the training policy, and **rejection** leaves tokens or whole responses out. In decoupled PPO (Hilton et al.,
arXiv:2110.00641) :math:`\pi_{train}` is the proximal policy at the start of the step (``old_log_probs``): the weight
is constant, and the clipped ratio is taken between the policy being trained and the proximal one. Three policies take
part. In bypass mode there are two: the rollout stands in for the proximal policy.

Everything here is computed on the whole batch in float64, before it is split, and carries no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_mean, masked_sum
from verl.algorithms.settings import setting
from verl.errors import ConfigError

#: exp(20) is about 5e8: beyond it a ratio says no more than "not the same policy"
LOG_RATIO_LIMIT = 20.0

WEIGHT_LEVELS = ("token", "sequence", "geometric", "icepop")
REJECTION_LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Correction:
    """What a correction does to a batch.

    Attributes:
        weights: ``(B, R)`` float32 factors of the token losses, 0 outside the mask; None = no weights.
        accepted: ``(B, R)`` bool, the response tokens that take part in the update; None = all.
        metrics: numbers about the two by name, without prefix; see also :func:`mismatch_metrics`.
    """

    weights: Tensor | None
    accepted: Tensor | None
    metrics: dict[str, float]


def log_ratios(train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    r"""Token log ratios :math:`\ell_t` ``(B, R)`` in float64 without gradient, 0 outside the mask."""
    train, rollout = (keep_masked(x.detach().double(), response_mask) for x in (train_log_prob, rollout_log_prob))
    return train - rollout


def ratios_at(log_ratio: Tensor, response_mask: Tensor, level: str) -> Tensor:
    r"""Importance ratios at a level, raw, as a matrix of token values.

    ===============  ==============================================================
    ``token``        :math:`w_t = e^{\ell_t}`
    ``sequence``     :math:`w = \prod_t e^{\ell_t}`, the same for all tokens of a response
    ``geometric``    :math:`w = (\prod_t e^{\ell_t})^{1/T}`, the same for all tokens of a response
    ===============  ==============================================================

    ``token`` has little variance and is biased for responses of more than one token; ``sequence`` is exact and varies
    exponentially in the length; ``geometric`` is a length-independent measure of drift rather than an importance
    weight. Log ratios are clamped to ±20 before the exponential.

    Args:
        log_ratio: ``(B, R)`` from :func:`log_ratios`.
        response_mask: ``(B, R)``.
        level: one of the above.

    Returns:
        ``(B, R)`` float64; what lies outside the mask has no meaning.
    """
    if level == "token":
        exponent = log_ratio
    elif level == "sequence":
        exponent = masked_sum(log_ratio, response_mask, dim=-1).unsqueeze(-1).expand_as(log_ratio)
    elif level == "geometric":
        exponent = masked_mean(log_ratio, response_mask, dim=-1).unsqueeze(-1).expand_as(log_ratio)
    else:
        raise ConfigError(f"unknown level {level!r} of importance ratios; choose one of {', '.join(REJECTION_LEVELS)}")
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    level: str,
    *,
    upper: float = 2.0,
    lower: float | None = None,
) -> Tensor:
    r"""Importance weights with bounded variance.

    ``token``, ``sequence`` and ``geometric`` truncate from above, :math:`\min(w, C)` (Ionides, 2008; for the gap
    between rollout and training engines: Yao et al., 2025). ``icepop`` (Ling team, arXiv:2510.18855) keeps token
    weights between two bounds and sets the others to 0: their tokens give no gradient but stay in the loss's
    denominator.

    Args:
        log_ratio: ``(B, R)`` from :func:`log_ratios`.
        response_mask: ``(B, R)``.
        level: one of :data:`WEIGHT_LEVELS`.
        upper: *C*; for ``icepop`` the largest weight that is kept.
        lower: the smallest weight that ``icepop`` keeps; default ``1 / upper``. Others have no lower bound.

    Returns:
        ``(B, R)`` float64, 0 outside the mask.

    Raises:
        ConfigError: unknown level or a bound that is not positive.
    """
    lower = 1.0 / upper if lower is None and upper > 0 else lower
    if upper <= 0 or lower is None or lower <= 0:
        raise ConfigError(f"bounds of importance weights are {lower} and {upper}; both must be positive")
    if level == "icepop":
        raw = ratios_at(log_ratio, response_mask, "token")
        weights = torch.where((raw >= lower) & (raw <= upper), raw, 0.0)
    else:
        weights = ratios_at(log_ratio, response_mask, level).clamp(max=upper)
    return keep_masked(weights, response_mask)


def normalize_weights(weights: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """Divide weights by their mean over the batch, so that they redistribute the gradient without scaling it.

    The mean runs over tokens for ``token`` and ``icepop``, and over responses for ``sequence`` and ``geometric``, so
    that a long response counts once. Weights that are all 0 stay 0.

    Args:
        weights: ``(B, R)`` from :func:`importance_weights`.
        response_mask: ``(B, R)``; tokens that are not in the update must not be in it.
        level: level of the weights.
    """
    if level in ("sequence", "geometric"):
        rows = response_mask.bool().any(-1)
        mean = masked_mean(masked_mean(weights, response_mask, dim=-1), rows)
    else:
        mean = masked_mean(weights, response_mask)
    return torch.where(mean > 0, weights / mean.clamp(min=torch.finfo(weights.dtype).tiny), weights)


def acceptance(
    log_ratio: Tensor,
    response_mask: Tensor,
    level: str | None,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    veto: float | None = None,
) -> Tensor:
    """Which response tokens take part in the update.

    Args:
        log_ratio: ``(B, R)`` from :func:`log_ratios`.
        response_mask: ``(B, R)``.
        level: ``token`` rejects tokens whose ratio is out of bounds; ``sequence`` and ``geometric`` reject whole
            responses by the ratio of that name; None rejects by veto only.
        upper: largest accepted ratio.
        lower: smallest accepted ratio; default ``1 / upper``.
        veto: a response with a token ratio below this is rejected as a whole: one such token means that the
            training policy would hardly ever have continued like this. None = no veto.

    Returns:
        ``(B, R)`` bool, False outside the mask.
    """
    accepted = response_mask.bool().clone()
    if level is not None:
        ratio = ratios_at(log_ratio, response_mask, level)
        accepted &= (ratio >= (1.0 / upper if lower is None else lower)) & (ratio <= upper)
    if veto is not None:
        accepted &= ~vetoed(log_ratio, response_mask, veto).unsqueeze(-1)
    return accepted


def vetoed(log_ratio: Tensor, response_mask: Tensor, veto: float) -> Tensor:
    """``(B,)`` bool: the response has a token whose ratio is below ``veto``."""
    return ((ratios_at(log_ratio, response_mask, "token") < veto) & response_mask.bool()).any(-1)


def mismatch_metrics(train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, float]:
    r"""How far rollout and training probabilities are apart; plain estimates, nothing truncated.

    Returns:
        * ``kl``: mean of :math:`-\ell_t`, the simple estimate of KL(rollout ‖ train) in nats per token;
        * ``k3_kl``: mean of :math:`e^{\ell_t} - \ell_t - 1`, the same with less variance and never negative;
        * ``log_prob_abs_diff``: mean :math:`|\ell_t|`;
        * ``training_ppl``, ``rollout_ppl``: perplexity of a response's sampled tokens, averaged over responses;
        * ``ppl_ratio``: training over rollout perplexity, averaged over responses;
        * ``log_ppl_diff``, ``log_ppl_abs_diff``: difference of a response's log perplexities, training less rollout,
          and its absolute value, averaged over responses.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    log_ratio = log_ratios(train_log_prob, rollout_log_prob, mask)
    rows = mask.any(-1)
    train, rollout = (masked_mean(x.detach().double(), mask, dim=-1)[rows] for x in (train_log_prob, rollout_log_prob))
    per_row, by_token = train - rollout, log_ratio[mask]
    bounded = by_token.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "kl": float(-by_token.mean()),
        "k3_kl": float((bounded.exp() - bounded - 1).mean()),
        "log_prob_abs_diff": float(by_token.abs().mean()),
        "training_ppl": float((-train).exp().mean()),
        "rollout_ppl": float((-rollout).exp().mean()),
        "ppl_ratio": float((-per_row).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().mean()),
        "log_ppl_diff": float((-per_row).mean()),
        "log_ppl_abs_diff": float(per_row.abs().mean()),
    }


def weight_metrics(
    log_ratio: Tensor, response_mask: Tensor, level: str, *, upper: float, lower: float
) -> dict[str, float]:
    r"""What the importance weights look like *before* any truncation, normalisation or rejection.

    Statistics run over tokens for ``token`` and ``icepop`` and over responses for the other levels.

    Returns:
        ``rollout_is_{mean,std,min,max}``; ``rollout_is_eff_sample_size`` :math:`(\sum w)^2 / (n \sum w^2)`, 1 when all
        weights are equal; ``rollout_is_ratio_fraction_{high,low}``, shares above ``upper`` and below ``lower``;
        ``chi2_token`` and ``chi2_seq``, mean :math:`w^2 - 1` of the token and sequence ratios, the variance that
        importance sampling adds.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    rows = mask.any(-1)
    by_token = ratios_at(log_ratio, mask, "token")[mask]
    by_sequence = ratios_at(log_ratio, mask, "sequence")[rows, 0]
    if level in ("token", "icepop"):
        raw = by_token
    else:
        raw = ratios_at(log_ratio, mask, level)[rows, 0]
    return {
        "rollout_is_mean": float(raw.mean()),
        "rollout_is_std": float(raw.std(correction=0)),
        "rollout_is_min": float(raw.min()),
        "rollout_is_max": float(raw.max()),
        "rollout_is_eff_sample_size": float(raw.sum().square() / (len(raw) * raw.square().sum())),
        "rollout_is_ratio_fraction_high": float((raw > upper).double().mean()),
        "rollout_is_ratio_fraction_low": float((raw < lower).double().mean()),
        "chi2_token": float(by_token.square().mean() - 1),
        "chi2_seq": float(by_sequence.square().mean() - 1),
    }


def rejection_metrics(
    accepted: Tensor, log_ratio: Tensor, response_mask: Tensor, veto: float | None
) -> dict[str, float]:
    """Shares of tokens and of responses that a rejection touches, and those that the veto hits."""
    mask = response_mask.bool()
    rows = mask.any(-1)
    rejected = mask & ~accepted
    metrics = {
        "rollout_rs_masked_fraction": float(masked_mean(rejected.double(), mask)),
        "rollout_rs_seq_masked_fraction": float(masked_mean(rejected.any(-1).double(), rows)),
    }
    if veto is not None:
        low = ratios_at(log_ratio, mask, "token") < veto
        metrics["rollout_is_veto_fraction"] = float(masked_mean(vetoed(log_ratio, mask, veto).double(), rows))
        metrics["rollout_is_catastrophic_token_fraction"] = float(masked_mean(low.double(), mask))
    return metrics


def correct_rollout(
    train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: Any = None
) -> Correction:
    """Weights and accepted tokens of a whole batch, as configured.

    Rejection comes first, so that normalised weights have mean 1 over what is trained on.

    Args:
        train_log_prob: ``(B, R)`` of the policy at the start of the step.
        rollout_log_prob: ``(B, R)`` as sampled.
        response_mask: ``(B, R)``.
        config: the ``algorithm.rollout_correction`` section.
    """
    with torch.no_grad():
        level = setting(config, "rollout_is", None)
        rejection = setting(config, "rollout_rs", None)
        veto = setting(config, "rollout_token_veto_threshold", None)
        upper = setting(config, "rollout_is_threshold", 2.0)
        lower = setting(config, "rollout_is_threshold_lower", 1.0 / upper)
        if level is None and rejection is None and veto is None:
            return Correction(None, None, {})
        mask = response_mask.bool()
        log_ratio = log_ratios(train_log_prob, rollout_log_prob, mask)
        metrics: dict[str, float] = {}

        accepted = None
        if rejection is not None or veto is not None:
            rs_upper = setting(config, "rollout_rs_threshold", upper)
            accepted = acceptance(
                log_ratio,
                mask,
                rejection,
                upper=rs_upper,
                lower=setting(config, "rollout_rs_threshold_lower", 1.0 / rs_upper),
                veto=veto,
            )
            metrics |= rejection_metrics(accepted, log_ratio, mask, veto)

        weights = None
        if level is not None:
            metrics |= weight_metrics(log_ratio, mask, level, upper=upper, lower=lower)
            weights = importance_weights(log_ratio, mask, level, upper=upper, lower=lower)
            if setting(config, "rollout_is_batch_normalize", False):
                weights = normalize_weights(weights, mask if accepted is None else accepted, level)
            weights = weights.float()
        return Correction(weights, accepted, metrics)

"""The policy losses once more, token by token in plain Python and NumPy, for the tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

Matrix = np.ndarray
TokenLoss = Callable[[Matrix, Matrix, Matrix, Matrix, SimpleNamespace], Matrix]


def settings(**changes: object) -> SimpleNamespace:
    """An actor section with values unlike the defaults, so that a setting which is not read shows."""
    policy_loss = SimpleNamespace(
        clip_cov_ratio=0.3,
        clip_cov_lb=0.0,
        clip_cov_ub=1.5,
        kl_cov_ratio=0.25,
        ppo_kl_coef=0.7,
        dro_beta=0.3,
        bypass_loss_type="reinforce",
        bypass_is="token",
        bypass_is_threshold=1.4,
        bypass_is_threshold_lower=None,
    )
    base = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.35,
        "clip_ratio_c": 2.0,
        "tau_pos": 0.8,
        "tau_neg": 1.5,
        "policy_loss": policy_loss,
        "global_batch_info": {},
    }
    for name in list(changes):
        if hasattr(policy_loss, name):
            setattr(policy_loss, name, changes.pop(name))
    return SimpleNamespace(**{**base, **changes})


def _by_token(rule: Callable[[float, float, float, SimpleNamespace], float]) -> TokenLoss:
    def loss(old: Matrix, new: Matrix, adv: Matrix, mask: Matrix, s: SimpleNamespace) -> Matrix:
        out = np.zeros(mask.shape)
        for i, t in zip(*np.nonzero(mask), strict=True):
            out[i, t] = rule(old[i, t], new[i, t], adv[i, t], s)
        return out

    return loss


def _ppo(ratio: float, a: float, low: float, high: float) -> float:
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def vanilla(old: float, new: float, a: float, s: SimpleNamespace) -> float:
    loss = _ppo(math.exp(new - old), a, s.clip_ratio_low, s.clip_ratio_high)
    return min(loss, -s.clip_ratio_c * a) if a < 0 else loss


def sapo(old: float, new: float, a: float, s: SimpleNamespace) -> float:
    tau = s.tau_pos if a > 0 else s.tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1)))


def dro(old: float, new: float, a: float, s: SimpleNamespace) -> float:
    return -(a * new - s.policy_loss.dro_beta / 2 * (new - old) ** 2)


def cispo(old: float, new: float, a: float, s: SimpleNamespace) -> float:
    weight = min(max(math.exp(new - old), 1 - s.clip_ratio_low), 1 + s.clip_ratio_high)
    return -weight * a * new


def _dppo(distance: Callable[[float, float], float]) -> Callable[[float, float, float, SimpleNamespace], float]:
    def loss(old: float, new: float, a: float, s: SimpleNamespace) -> float:
        far = distance(math.exp(old), math.exp(new))
        leaves = (a > 0 and new > old and far > s.clip_ratio_high) or (a < 0 and new < old and far > s.clip_ratio_low)
        return 0.0 if leaves else -a * math.exp(new - old)

    return loss


def bernoulli_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def bypass_reinforce_token(old: float, new: float, a: float, s: SimpleNamespace) -> float:
    return -min(math.exp(new - old), s.policy_loss.bypass_is_threshold) * a * new


def _by_sequence(rule: Callable[[Matrix, Matrix, float, SimpleNamespace], float]) -> TokenLoss:
    """The loss of a sequence, given to each of its tokens."""

    def loss(old: Matrix, new: Matrix, adv: Matrix, mask: Matrix, s: SimpleNamespace) -> Matrix:
        out = np.zeros(mask.shape)
        for i in range(len(mask)):
            at = np.flatnonzero(mask[i])
            if len(at):
                out[i, at] = rule(old[i, at], new[i, at], float(adv[i, at].mean()), s)
        return out

    return loss


def gspo(old: Matrix, new: Matrix, a: float, s: SimpleNamespace) -> float:
    return _ppo(math.exp((new - old).mean()), a, s.clip_ratio_low, s.clip_ratio_high)


def geo_mean(old: Matrix, new: Matrix, a: float, s: SimpleNamespace) -> float:
    """As the paper writes it: the root of the product of the ratios that PPO's minimum keeps, with the sign of A."""
    low, high = math.exp(-s.clip_ratio_low), math.exp(s.clip_ratio_high)
    kept = []
    for ratio in np.exp(new - old):
        clipped = min(max(ratio, low), high)
        kept.append(min(ratio * a, clipped * a))
    return -math.copysign(np.prod(np.abs(kept)) ** (1 / len(kept)), a)


def gspo_token(old: Matrix, new: Matrix, adv: Matrix, mask: Matrix, s: SimpleNamespace) -> Matrix:
    out = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        at = np.flatnonzero(mask[i])
        ratio = math.exp((new[i, at] - old[i, at]).mean())
        out[i, t] = _ppo(ratio, adv[i, t], s.clip_ratio_low, s.clip_ratio_high)
    return out


TOKEN_LOSSES: dict[str, TokenLoss] = {
    "vanilla": _by_token(vanilla),
    "gpg": _by_token(lambda old, new, a, s: -a * new),
    "sapo": _by_token(sapo),
    "dro": _by_token(dro),
    "cispo": _by_token(cispo),
    "dppo_tv": _by_token(_dppo(lambda mu, pi: abs(mu - pi))),
    "dppo_kl": _by_token(_dppo(bernoulli_kl)),
    "bypass_mode": _by_token(bypass_reinforce_token),
    "gspo": _by_sequence(gspo),
    "gspo_token": gspo_token,
    "geo_mean": _by_sequence(geo_mean),
}


def covariance(old: Matrix, adv: Matrix, mask: Matrix) -> Matrix:
    at = mask > 0
    return np.where(at, (old - old[at].mean()) * (adv - adv[at].mean()), 0.0)


def aggregate(token: Matrix, mask: Matrix, mode: str, scale: float) -> float:
    sums, lengths = np.where(mask > 0, token, 0.0).sum(-1), mask.sum(-1)
    sequences = (lengths > 0).sum()
    if mode == "token-mean":
        return sums.sum() / mask.sum()
    if mode == "seq-mean-token-mean":
        return (sums / np.maximum(lengths, 1)).sum() / sequences
    return sums.sum() / sequences / (scale if mode.endswith("norm") else 1.0)

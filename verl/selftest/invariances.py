"""What must hold whatever the numbers are: laws of estimators, and of losses on the first step after sampling.

A law belongs to named algorithms. A plug-in may claim some for itself::

    from verl.selftest import estimator_laws, loss_laws

    estimator_laws("my_estimator", "shift", "tied")
    loss_laws("my_loss", "minus-mean-advantage")

Names that are not registered cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config import AlgorithmConfig
from verl.errors import ConfigError
from verl.selftest.batches import Fields, object_array
from verl.selftest.compare import field_deviation
from verl.selftest.entries import estimate

_SHIFT, _SCALE = 0.75, 3.0

_ESTIMATORS: dict[str, frozenset[str]] = {
    "grpo": frozenset({"group-shift", "scale-free", "tied", "centred"}),
    "grpo_vectorized": frozenset({"group-shift", "scale-free", "tied", "centred"}),
    "rloo": frozenset({"group-shift", "scale", "tied", "centred"}),
    "rloo_vectorized": frozenset({"group-shift", "scale", "tied", "centred"}),
    "opo": frozenset({"group-shift", "scale", "tied"}),
    "gpg": frozenset({"group-shift", "scale", "tied", "centred"}),
    "grpo_passk": frozenset({"group-shift", "scale-free", "tied"}),
    "reinforce_plus_plus": frozenset({"shift", "scale-free"}),
    "reinforce_plus_plus_baseline": frozenset({"group-shift", "scale-free", "tied"}),
    "gdpo": frozenset({"group-shift", "scale-free", "tied"}),
    "maxrl": frozenset({"scale-free", "tied", "centred"}),
    "gigpo": frozenset({"group-shift", "scale", "tied"}),
    "spo": frozenset({"shift", "scale-free"}),
    # no shift: where one response of a group is left, its baseline is 0
    "optimal_token_baseline": frozenset({"scale"}),
    "tir_optimal_token_baseline": frozenset({"scale"}),
    "gae": frozenset({"scale-free-at-zero-values"}),
}

#: loss at ratio 1, and whether its gradient is that of -mean(A log p); see loss_laws
_LOSSES: dict[str, frozenset[str]] = {
    "vanilla": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "gspo": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "gspo_token": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "geo_mean": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "clip_cov": frozenset({"minus-mean-advantage"}),
    "kl_cov": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "dppo_tv": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "dppo_kl": frozenset({"minus-mean-advantage", "policy-gradient"}),
    "gpg": frozenset({"policy-gradient"}),
    "cispo": frozenset({"policy-gradient"}),
    "sapo": frozenset({"policy-gradient"}),
    "dro": frozenset({"policy-gradient"}),
    "bypass_mode": frozenset({"minus-mean-advantage", "policy-gradient"}),
}


def estimator_laws(name: str, *laws: str) -> None:
    """Claim laws for an estimator.

    Args:
        name: of the estimator.
        laws: of ``shift`` (a constant added to every score changes nothing), ``group-shift`` (nor does one constant
            for each group), ``scale-free`` (nor does a positive factor), ``scale`` (advantages grow with the factor),
            ``tied`` (a group of equal scores gets advantage 0), ``centred`` (advantages of a group sum to 0).
    """
    _ESTIMATORS[name] = _known(laws, _ESTIMATOR_LAWS)


def loss_laws(name: str, *laws: str) -> None:
    """Claim laws for a policy loss on the first step, where every ratio is 1.

    Args:
        name: of the loss.
        laws: of ``minus-mean-advantage`` (the loss is -mean(A)) and ``policy-gradient`` (its gradient is that of
            -mean(A log p), for advantages constant along a response).
    """
    _LOSSES[name] = _known(laws, LOSS_LAWS)


def laws_of_loss(name: str) -> frozenset[str]:
    """The laws that a policy loss is held to."""
    return _LOSSES.get(name, frozenset())


def laws_of_estimator(name: str) -> frozenset[str]:
    """The laws that an estimator is held to, besides those that hold for all."""
    return _ESTIMATORS.get(name, frozenset())


def _known(laws: tuple[str, ...], table: Mapping[str, Any] | frozenset[str]) -> frozenset[str]:
    if unknown := [law for law in laws if law not in table]:
        raise ConfigError(f"unknown law {', '.join(unknown)}; the laws are {', '.join(sorted(table))}")
    return frozenset(laws)


def check_estimator(name: str, batch: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each law and how far the estimator is from it.

    The batch's rows with a token are used, in groups of at least two: one-sample groups and empty responses follow
    rules of their own, which the laws do not cover.

    Args:
        name: of the estimator.
        batch: with every field that it needs.
    """
    rows = _law_rows(batch)
    fields = {key: value[rows if isinstance(value, Tensor) else rows.numpy()] for key, value in batch.items()}
    first = _advantages(name, fields)
    mask = fields["response_mask"] != 0
    yield "zero outside the mask", float(first[~mask].abs().sum()) if bool((~mask).any()) else 0.0
    if "uid" in fields:
        renamed = {**fields, "uid": object_array(("x", str(label)) for label in fields["uid"])}
        yield "names of groups", field_deviation(first, _advantages(name, renamed))
    for law in sorted(laws_of_estimator(name)):
        yield law, _ESTIMATOR_LAWS[law](name, fields, first)


def _law_rows(batch: Mapping[str, Any]) -> Tensor:
    alive = (batch["response_mask"] != 0).any(-1)
    uids = list(batch["uid"])
    counts = {uid: sum(1 for other, ok in zip(uids, alive, strict=True) if other == uid and ok) for uid in uids}
    return torch.tensor([row for row, uid in enumerate(uids) if alive[row] and counts[uid] > 1])


def _advantages(name: str, fields: Fields) -> Tensor:
    config = AlgorithmConfig(adv_estimator=name, gamma=1.0, lam=1.0)
    return estimate(config, fields)["advantages"]


def _rescored(fields: Fields, factor: float = 1.0, shift: Tensor | float = 0.0) -> Fields:
    """Every score ``s`` becomes ``factor * s + shift``; the shift, ``(B, 1)`` or a number, falls on the last token."""
    out = dict(fields)
    for key in ("token_level_rewards", "token_level_scores"):
        out[key] = fields[key] * factor + torch.where(_last_token(fields), shift, 0.0)
    return out


def _last_token(fields: Fields) -> Tensor:
    mask = fields["response_mask"] != 0
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


def _group_level(fields: Fields) -> Tensor:
    """A number of its own for each group, ``(B, 1)``."""
    level = {uid: 0.3 + 0.2 * i for i, uid in enumerate(dict.fromkeys(fields["uid"]))}
    return torch.tensor([[level[uid]] for uid in fields["uid"]])


def _shift(name: str, fields: Fields, first: Tensor) -> float:
    return field_deviation(first, _advantages(name, _rescored(fields, shift=_SHIFT)))


def _group_shift(name: str, fields: Fields, first: Tensor) -> float:
    return field_deviation(first, _advantages(name, _rescored(fields, shift=_group_level(fields))))


def _scale_free(name: str, fields: Fields, first: Tensor) -> float:
    # Large scores: the epsilon beside a standard deviation breaks the law for small ones.
    large = _advantages(name, _rescored(fields, 10.0))
    return field_deviation(large, _advantages(name, _rescored(fields, 10.0 * _SCALE)))


def _scale(name: str, fields: Fields, first: Tensor) -> float:
    return field_deviation(first * _SCALE, _advantages(name, _rescored(fields, _SCALE)))


def _scale_free_without_values(name: str, fields: Fields, first: Tensor) -> float:
    blank = {**fields, "values": torch.zeros_like(fields["values"])}
    return _scale_free(name, blank, _advantages(name, blank))


def _tied(name: str, fields: Fields, first: Tensor) -> float:
    equal = torch.where(_last_token(fields), _group_level(fields), 0.0)
    tied = {**fields, "token_level_rewards": equal, "token_level_scores": equal.clone()}
    return float(_advantages(name, tied).abs().max())


def _centred(name: str, fields: Fields, first: Tensor) -> float:
    mask = fields["response_mask"] != 0
    per_row = torch.where(mask, first, 0.0).double().sum(-1) / mask.sum(-1)
    sums = [float(per_row[torch.from_numpy(np.asarray(fields["uid"] == uid))].sum()) for uid in set(fields["uid"])]
    return max(map(abs, sums))


_ESTIMATOR_LAWS: Mapping[str, Callable[[str, Fields, Tensor], float]] = {
    "shift": _shift,
    "group-shift": _group_shift,
    "scale-free": _scale_free,
    "scale": _scale,
    "scale-free-at-zero-values": _scale_free_without_values,
    "tied": _tied,
    "centred": _centred,
}
LOSS_LAWS = frozenset({"minus-mean-advantage", "policy-gradient"})

"""Advantage estimators, losses and KL estimates: pure functions of tensors and a small configuration.

Importing the package registers everything that is built in. One module per family:

* :mod:`~verl.algorithms.gae`: GAE, with a critic
* :mod:`~verl.algorithms.group`: GRPO, RLOO, OPO, REINFORCE++ with group baseline
* :mod:`~verl.algorithms.baseline`: REINFORCE++
* :mod:`~verl.algorithms.gpg`: GPG, estimator and loss
* :mod:`~verl.algorithms.policy_loss`: the clipped PPO loss
* :mod:`~verl.algorithms.sequence_loss`: GSPO, GMPO
* :mod:`~verl.algorithms.soft_loss`: SAPO, CISPO, DRO
* :mod:`~verl.algorithms.divergence_loss`: DPPO
* :mod:`~verl.algorithms.covariance_loss`: Clip-Cov, KL-Cov
* :mod:`~verl.algorithms.bypass_loss`: training against the rollout's log-probs
* :mod:`~verl.algorithms.correction`: for a rollout whose probabilities are not the training policy's
* :mod:`~verl.algorithms.surrogate`: what policy losses share
* :mod:`~verl.algorithms.value_loss`, :mod:`~verl.algorithms.entropy`, :mod:`~verl.algorithms.kl`
* :mod:`~verl.algorithms.aggregate`: masked reductions and loss aggregation
* :mod:`~verl.algorithms.registry`: how to add one's own
"""

from __future__ import annotations

from verl.algorithms import (
    aggregate,
    baseline,
    bypass_loss,
    correction,
    covariance_loss,
    divergence_loss,
    entropy,
    gae,
    gpg,
    group,
    kl,
    policy_loss,
    registry,
    sequence_loss,
    soft_loss,
    surrogate,
    value_loss,
)

__all__ = [
    "aggregate",
    "baseline",
    "bypass_loss",
    "correction",
    "covariance_loss",
    "divergence_loss",
    "entropy",
    "gae",
    "gpg",
    "group",
    "kl",
    "policy_loss",
    "registry",
    "sequence_loss",
    "soft_loss",
    "surrogate",
    "value_loss",
]

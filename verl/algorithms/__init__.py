"""Advantage estimators, losses and KL estimates: pure functions of tensors and a small configuration.

Importing the package registers everything that is built in. One module per family:

* :mod:`~verl.algorithms.gae`: GAE, with a critic; VAPO's lambdas
* :mod:`~verl.algorithms.group`: GRPO, RLOO, OPO, REINFORCE++ with group baseline
* :mod:`~verl.algorithms.best_of`: pass@k, MaxRL
* :mod:`~verl.algorithms.gdpo`: GDPO, for rewards of several components
* :mod:`~verl.algorithms.gigpo`: GiGPO, for agents; :mod:`~verl.algorithms.turns` finds the turns
* :mod:`~verl.algorithms.token_baseline`: the optimal token baseline
* :mod:`~verl.algorithms.spo`: SPO, which remembers a baseline for each prompt
* :mod:`~verl.algorithms.baseline`: REINFORCE++, ReMax
* :mod:`~verl.algorithms.prime`: PRIME, estimator and reward model's loss
* :mod:`~verl.algorithms.reweight`: PF-PPO
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
    best_of,
    bypass_loss,
    correction,
    covariance_loss,
    divergence_loss,
    entropy,
    gae,
    gdpo,
    gigpo,
    gpg,
    group,
    kl,
    policy_loss,
    prime,
    registry,
    reweight,
    sequence_loss,
    soft_loss,
    spo,
    surrogate,
    token_baseline,
    turns,
    value_loss,
)

__all__ = [
    "aggregate",
    "baseline",
    "best_of",
    "bypass_loss",
    "correction",
    "covariance_loss",
    "divergence_loss",
    "entropy",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "group",
    "kl",
    "policy_loss",
    "prime",
    "registry",
    "reweight",
    "sequence_loss",
    "soft_loss",
    "spo",
    "surrogate",
    "token_baseline",
    "turns",
    "value_loss",
]

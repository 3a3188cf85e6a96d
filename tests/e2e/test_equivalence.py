"""The same run cut in different ways gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

#: numbers that depend on the clock, on memory or on the cut itself
CUT_DEPENDENT = ("timing", "perf/", "global_seqlen/", "weight_sync/")

CUTS = {
    "local, packed, dynamic": [
        "trainer.controller=local",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
    ],
    "ray, 1 worker, packed, fixed": [
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    ],
    "ray, 2 workers, padded, fixed": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ],
    "ray, 2 workers, packed, dynamic": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
    ],
    "ray, 2 workers that share sequences, dynamic": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32",
    ],
}

ALGORITHMS = {
    "grpo": [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=2",
    ],
}


def critic_cut(cut: list[str]) -> list[str]:
    """The same cut for the critic."""
    keys = {
        "actor_rollout_ref.model.use_remove_padding": "critic.model.use_remove_padding",
        "actor_rollout_ref.actor.": "critic.",
    }
    mapped = []
    for override in cut:
        for old, new in keys.items():
            if override.startswith(old):
                mapped.append(override.replace(old, new, 1))
    return mapped


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("algorithm", [pytest.param("grpo", marks=pytest.mark.slow), "ppo"])
def test_every_cut_gives_the_same_numbers(algorithm: str, run_training: Callable[..., list[dict[str, Any]]]) -> None:
    """Reference: the local controller, padded, the whole mini-batch at once. fp32, 1e-5 relative (issue of rounding
    order only; 1e-6 absolute for numbers that are differences of near-equal terms)."""
    reference = run_training(
        "trainer.controller=local", "actor_rollout_ref.model.use_remove_padding=False", *ALGORITHMS[algorithm]
    )
    assert [row["step"] for row in reference] == [1, 2, 3]
    assert all(row["data"]["actor/grad_norm"] > 0 for row in reference)
    for name, cut in CUTS.items():
        rows = run_training(*ALGORITHMS[algorithm], *cut, *(critic_cut(cut) if algorithm == "ppo" else []))
        for expected, actual in zip(reference, rows, strict=True):
            assert comparable(actual) == pytest.approx(comparable(expected), rel=1e-5, abs=1e-6), (name, actual["step"])


def comparable(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step that must not depend on the cut."""
    return {name: value for name, value in row["data"].items() if not name.startswith(CUT_DEPENDENT)}

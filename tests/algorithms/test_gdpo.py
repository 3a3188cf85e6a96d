from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithms.batches import poison
from verl.algorithms.gdpo import compute_gdpo_outcome_advantage
from verl.errors import ConfigError, DataError

MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]])
INDEX = np.array(list("aabba"), dtype=object)
# group a: rows 0, 1, 4; group b: rows 2, 3
CORRECT = np.array([1.0, 0.0, 1.0, 1.0, 0.0], dtype=object)
FORMAT = np.array([1, 1, 0, 4, 0], dtype=object)
TOKENS = poison(torch.ones(5, 2), MASK)


def config(keys: list[str], weights: list[float] | None = None) -> SimpleNamespace:
    return SimpleNamespace(gdpo_reward_keys=keys, gdpo_reward_weights=weights or [])


def expected(weights: tuple[float, float] = (1.0, 1.0), std: bool = True) -> np.ndarray:
    total = np.zeros(5)
    for weight, values in zip(weights, (CORRECT.astype(float), FORMAT.astype(float)), strict=True):
        for rows in ([0, 1, 4], [2, 3]):
            group = values[rows]
            if group.std() == 0:
                continue
            part = group - group.mean()
            total[rows] += weight * (part / (group.std(ddof=1) + 1e-6) if std else part)
    return (total - total.mean()) / (total.std(ddof=1) + 1e-6)


def run(settings: Any, **kwargs: Any) -> list[float]:
    fields = {"correct": CORRECT, "reward_format": FORMAT}
    advantages, returns = compute_gdpo_outcome_advantage(
        TOKENS, MASK, INDEX, config=settings, **{"non_tensor_batch": fields, **kwargs}
    )
    assert torch.equal(advantages, returns)
    assert not advantages[MASK == 0].any()
    return advantages[:, 0].tolist()


def test_components_are_standardised_one_by_one_then_their_sum() -> None:
    assert run(config(["correct", "format"])) == pytest.approx(expected(), rel=1e-5)
    assert run(config(["correct", "format"], [2.0, 0.5])) == pytest.approx(expected((2.0, 0.5)), rel=1e-5)
    assert run(config(["correct", "format"]), norm_adv_by_std_in_grpo=False) == pytest.approx(
        expected(std=False), rel=1e-5
    )


def test_combinations_that_grpo_confuses_stay_apart() -> None:
    """Both groups standardise to the same sums with one reward; with two the better combination is worth more."""
    index = np.array(list("aabb"), dtype=object)
    mask = torch.ones(4, 1)
    one, two = np.array([1, 0, 1, 0], dtype=object), np.array([0, 0, 1, 0], dtype=object)
    advantages, _ = compute_gdpo_outcome_advantage(
        torch.ones(4, 1), mask, index, config=config(["x", "y"]), non_tensor_batch={"x": one, "y": two}
    )
    assert advantages[2].item() > advantages[0].item() > 0


def test_components_may_be_tensors_and_the_score_is_the_default() -> None:
    token_values = poison(torch.tensor([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), MASK)
    found = run(config(["correct", "format"]), non_tensor_batch={"format": FORMAT}, batch={"correct": token_values})
    assert found == pytest.approx(expected(), rel=1e-5)
    rewards = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    advantages, _ = compute_gdpo_outcome_advantage(rewards, torch.ones(4, 1), list("aabb"))
    z = np.array([0.5**0.5, -(0.5**0.5), 0.0, 0.0])
    assert advantages[:, 0].tolist() == pytest.approx(z / z.std(ddof=1), rel=1e-4)


def test_rows_without_tokens_do_not_shift_the_batch() -> None:
    rewards, mask = torch.tensor([[2.0], [0.0], [0.0]]), torch.tensor([[1], [1], [0]])
    advantages, _ = compute_gdpo_outcome_advantage(rewards, mask, list("aab"))
    assert advantages[:, 0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0], rel=1e-4)


def test_order_of_samples_only_permutes_the_result() -> None:
    order = [3, 0, 4, 2, 1]
    advantages, _ = compute_gdpo_outcome_advantage(
        TOKENS[order], MASK[order], INDEX[order], config=config(["correct", "format"]),
        non_tensor_batch={"correct": CORRECT[order], "format": FORMAT[order]},
    )  # fmt: skip
    assert advantages[:, 0].tolist() == pytest.approx([run(config(["correct", "format"]))[i] for i in order])


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(DataError, match="names 'style'.*it has correct, reward_format"):
        run(config(["style"]))
    with pytest.raises(ConfigError, match="1 numbers for 2"):
        run(config(["correct", "format"], [1.0]))
    with pytest.raises(DataError, match="not a number"):
        run(config(["correct"]), non_tensor_batch={"correct": np.array(["yes"] * 5, dtype=object)})
    with pytest.raises(DataError, match="1 other values"):
        run(config(["correct"]), non_tensor_batch={"correct": np.array([1, 1, None, 0, 0], dtype=object)})

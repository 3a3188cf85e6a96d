from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl.algorithms.kl import AdaptiveKLController, FixedKLController
from verl.algorithms.registry import register_adv_est
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import apply_kl_penalty, compute_advantage, compute_response_mask

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


def batch(**tensors: Tensor) -> DataProto:
    uid = np.array(["p", "p"], dtype=object)
    return DataProto.from_dict({"response_mask": MASK, **tensors}, non_tensors={"uid": uid})


def kl_batch() -> DataProto:
    return batch(
        token_level_scores=torch.tensor([[0.0, 0.0, 1.0], [2.0, NAN, NAN]]),
        old_log_probs=torch.tensor([[-1.0, -1.0, -1.0], [-1.0, NAN, -1.0]]),
        ref_log_prob=torch.tensor([[-1.1, -1.2, -1.3], [-2.0, -1.0, NAN]]),
    )


def test_kl_penalty_per_token_and_its_metrics() -> None:
    data, metrics = apply_kl_penalty(kl_batch(), FixedKLController(0.5), "kl")
    expected = torch.tensor([[-0.05, -0.1, 0.85], [1.5, 0.0, 0.0]])
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.1 + 0.2 + 0.3 + 1.0) / 4)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


def test_other_estimates_are_selectable() -> None:
    data, _ = apply_kl_penalty(kl_batch(), FixedKLController(1.0), "mse")
    assert data.batch["token_level_rewards"][1, 0].item() == pytest.approx(2.0 - 0.5)
    with pytest.raises(ConfigError, match="unknown kl_penalty 'k9'"):
        apply_kl_penalty(kl_batch(), FixedKLController(1.0), "k9")


def test_the_adaptive_controller_sees_the_token_mean_of_the_whole_batch() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=0.38, horizon=10)
    _, metrics = apply_kl_penalty(kl_batch(), controller, "kl")
    # token mean 0.4: error 0.4/0.38 - 1; a mean of sequence means would be 0.6 and hit the clip at 0.2
    assert controller.value == pytest.approx(0.5 * (1 + (0.4 / 0.38 - 1) * 2 / 10))
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


def test_the_reference_is_asked_for_when_missing() -> None:
    data = batch(token_level_scores=torch.zeros(2, 3), old_log_probs=torch.zeros(2, 3))
    with pytest.raises(SchemaError, match="needs ref_log_prob"):
        apply_kl_penalty(data, FixedKLController(0.1))


def test_estimator_and_its_settings_come_from_the_config() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [2.0, NAN, NAN]])
    plain = SimpleNamespace(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    data = compute_advantage(batch(token_level_rewards=rewards), plain)
    torch.testing.assert_close(data.batch["advantages"], torch.tensor([[-0.5, -0.5, -0.5], [0.5, 0.0, 0.0]]))
    scaled = SimpleNamespace(adv_estimator="grpo", norm_adv_by_std_in_grpo=True)
    data = compute_advantage(batch(token_level_rewards=rewards), scaled)
    assert data.batch["advantages"][1, 0].item() == pytest.approx(0.5**0.5, rel=1e-5)


def test_gae_takes_values_gamma_and_lam() -> None:
    data = batch(token_level_rewards=torch.tensor([[0.0, 0.0, 8.0], [1.0, 0.0, 0.0]]), values=torch.zeros(2, 3))
    compute_advantage(data, SimpleNamespace(adv_estimator="gae", gamma=0.5, lam=1.0))
    torch.testing.assert_close(data.batch["returns"], torch.tensor([[2.0, 4.0, 8.0], [1.0, 0.0, 0.0]]))


def test_keywords_go_before_the_config() -> None:
    data = batch(token_level_rewards=torch.tensor([[0.0, 0.0, 8.0], [1.0, 0.0, 0.0]]))
    config = SimpleNamespace(adv_estimator="grpo", gamma=1.0)
    compute_advantage(data, config, adv_estimator="reinforce_plus_plus")
    assert data.batch["returns"][0, 0].item() == 8.0
    with pytest.raises(SchemaError, match="values"):
        compute_advantage(data, config, adv_estimator="gae", lam=1.0)


def test_a_plug_in_gets_the_fields_that_it_names() -> None:
    @register_adv_est("test_advantage_plug_in")
    def plug_in(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any, difficulty: Any, config: Any = None
    ) -> tuple[Tensor, Tensor]:
        scale = torch.tensor([float(d) for d in difficulty])[:, None]
        return token_level_rewards * scale, token_level_rewards

    data = batch(token_level_rewards=torch.ones(2, 3))
    data.non_tensor_batch["difficulty"] = np.array([2, 3], dtype=object)
    compute_advantage(data, SimpleNamespace(adv_estimator="test_advantage_plug_in"))
    assert data.batch["advantages"][:, 0].tolist() == [2.0, 3.0]


def test_a_plug_in_that_returns_another_shape_is_refused() -> None:
    @register_adv_est("test_advantage_wrong_shape")
    def plug_in(token_level_rewards: Tensor) -> tuple[Tensor, Tensor]:
        return token_level_rewards.sum(-1), token_level_rewards

    with pytest.raises(SchemaError, match=r"advantages of shape \(2,\).*\(2, 3\)"):
        compute_advantage(batch(token_level_rewards=torch.ones(2, 3)), adv_estimator="test_advantage_wrong_shape")


def test_response_mask_is_the_end_of_the_attention_mask() -> None:
    data = DataProto.from_dict(
        {"responses": torch.zeros(1, 2, dtype=torch.int64), "attention_mask": torch.tensor([[0, 1, 1, 1, 0]])}
    )
    assert compute_response_mask(data).tolist() == [[1, 0]]


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(SchemaError, match="no tensors"):
        compute_response_mask(DataProto(non_tensor_batch={"uid": np.array(["a"], dtype=object)}))

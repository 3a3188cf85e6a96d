from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl.algorithms.kl import AdaptiveKLController, FixedKLController
from verl.algorithms.registry import get_adv_estimator_fn, make_state, register_adv_est, register_policy_loss
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import (
    apply_kl_penalty,
    compute_advantage,
    compute_pf_ppo_reweight_data,
    compute_response_mask,
    prepare_policy_loss,
)

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


def spo_batch(*scores: float) -> DataProto:
    return batch(
        token_level_rewards=torch.tensor([[scores[0], 0.0, 0.0], [scores[1], NAN, NAN]]),
        prompts=torch.tensor([[4, 5], [0, 6]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
    )


def test_a_stateful_estimator_keeps_its_state_between_steps() -> None:
    config = SimpleNamespace(adv_estimator="spo")
    state = make_state(get_adv_estimator_fn("spo"), config)
    compute_advantage(spo_batch(1.0, 0.0), config, state=state)
    assert state.state_dict()["step"] == 1
    data = compute_advantage(spo_batch(0.0, 0.0), config, state=state)
    # values 0.75 and 0.25 after the first step: the first response disappoints more
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    with pytest.raises(ConfigError, match="make_state"):
        compute_advantage(spo_batch(0.0, 0.0), config)


def reweight_batch() -> DataProto:
    n = 8
    return DataProto.from_dict(
        {
            "response_mask": torch.ones(n, 1),
            "token_level_scores": torch.arange(float(n))[:, None],
            "token_level_rewards": torch.arange(float(n))[:, None],
            "sample_index": torch.arange(n),
        },
        non_tensors={"uid": np.array(list("aaaabbbb"), dtype=object)},
    )


def test_pf_ppo_draws_rows_by_score_and_keeps_their_places() -> None:
    data = compute_pf_ppo_reweight_data(reweight_batch(), "max_min", generator=torch.Generator().manual_seed(3))
    scores = data.batch["token_level_scores"][:, 0].tolist()
    assert set(scores) <= {0.0, 3.0, 4.0, 7.0}
    assert scores == sorted(scores)
    assert data.batch["sample_index"].tolist() == list(range(8))
    assert list(data.non_tensor_batch["uid"]) == ["a" if s < 4 else "b" for s in scores]


def test_pf_ppo_does_not_depend_on_the_arrangement_of_rows() -> None:
    order = torch.tensor([6, 1, 7, 0, 3, 2, 5, 4])
    straight = compute_pf_ppo_reweight_data(reweight_batch(), generator=torch.Generator().manual_seed(5))
    shuffled = compute_pf_ppo_reweight_data(
        reweight_batch().select_idxs(order), generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(shuffled.batch["sample_index"], order)
    assert torch.equal(shuffled.batch["token_level_scores"], straight.batch["token_level_scores"][order])


def test_pf_ppo_is_switched_on_by_the_configuration() -> None:
    config = SimpleNamespace(
        adv_estimator="grpo", use_pf_ppo=True, pf_ppo=SimpleNamespace(reweight_method="pow", weight_pow=8.0)
    )
    plain = compute_advantage(reweight_batch(), SimpleNamespace(adv_estimator="grpo"))
    data = compute_advantage(reweight_batch(), config, generator=torch.Generator().manual_seed(0))
    scores = data.batch["token_level_scores"][:, 0].long()
    assert len(scores) == 8
    assert scores.min() >= 3  # 2**8 of about 7**8 has no chance
    assert torch.equal(data.batch["advantages"], plain.batch["advantages"][scores])
    with pytest.raises(SchemaError, match="no token_level_scores"):
        compute_pf_ppo_reweight_data(batch())


def test_fields_for_the_policy_loss_are_made_from_the_whole_batch() -> None:
    def prepare(fields: Any, actor: Any) -> dict[str, Tensor]:
        return {"above": fields["advantages"] > actor.bar}

    @register_policy_loss("test_advantage_above", prepare=prepare)
    def above(*args: Any, above: Tensor) -> tuple[Tensor, dict[str, float]]:
        return args[0].sum(), {}

    actor = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode="test_advantage_above"), bar=0.5)
    data = prepare_policy_loss(batch(advantages=torch.tensor([[1.0, 0.0, 2.0], [0.4, 0.0, 0.0]])), actor)
    assert data.batch["above"].tolist() == [[True, False, True], [False, False, False]]
    plain = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode="vanilla"))
    assert "above" not in prepare_policy_loss(batch(advantages=torch.zeros(2, 3)), plain).batch

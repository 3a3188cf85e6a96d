from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.algorithms.batches import poison
from verl.algorithms.registry import EstimatorState, fields_needed, get_adv_estimator_fn, make_state
from verl.algorithms.spo import ValueTracker, compute_spo_outcome_advantage, prompt_keys
from verl.errors import CheckpointError, ConfigError, SchemaError

PROMPTS = torch.tensor([[0, 5, 6], [7, 8, 9], [0, 5, 6], [0, 0, 5]])
ATTENTION = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
MASK = torch.tensor([[1, 0], [1, 1], [1, 0], [1, 1]])


def rewards(*scores: float) -> torch.Tensor:
    out = torch.zeros(4, 2)
    out[:, 0] = torch.tensor(scores)
    return poison(out, MASK)


def step(state: ValueTracker, *scores: float, **kwargs: torch.Tensor) -> list[float]:
    advantages, returns = compute_spo_outcome_advantage(rewards(*scores), MASK, PROMPTS, ATTENTION, state, **kwargs)
    assert torch.equal(advantages, returns)
    assert not advantages[MASK == 0].any()
    return advantages[:, 0].tolist()


def standardised(*values: float) -> list[float]:
    x = np.array(values)
    return ((x - x.mean()) / (x.std(ddof=1) + 1e-8)).tolist()


def test_prompts_are_known_by_their_tokens() -> None:
    keys = prompt_keys(PROMPTS, ATTENTION)
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3
    wide = torch.nn.functional.pad(PROMPTS, (2, 0), value=99)
    assert prompt_keys(wide, torch.nn.functional.pad(ATTENTION, (2, 0))) == keys


def test_prompts_are_known_by_their_images_too() -> None:
    red, blue = {"pixel_values": torch.zeros(4, 3)}, {"pixel_values": torch.ones(4, 3)}
    later = {"pixel_values": [torch.zeros(4, 3), torch.rand(2, 3)]}  # shown something behind its prompt
    same = PROMPTS[[0, 0, 0, 0]], ATTENTION[[0, 0, 0, 0]]
    keys = prompt_keys(*same, [red, blue, later, None])
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3
    assert keys[3] == prompt_keys(*same)[0]
    state = ValueTracker(rho_min=0.5, rho_max=1.0, half_life_kl=0.1, kl_per_step=0.0)
    compute_spo_outcome_advantage(
        rewards(1.0, 0.0, 1.0, 0.0), MASK, *same, state=state, multi_modal_inputs=[red, blue, red, blue]
    )
    assert state.value(keys[0], -1.0) > 0.5 > state.value(keys[1], -1.0)


def test_values_follow_the_beta_posterior() -> None:
    state = ValueTracker(rho_min=0.5, rho_max=1.0, half_life_kl=0.1, kl_per_step=0.0)
    first = step(state, 1.0, 0.0, 1.0, 0.0)
    assert first == pytest.approx(standardised(0.5, -0.5, 0.5, -0.5))  # first visits: the batch's mean
    # prior 0.5 with weight 1 each; prompt 0 was seen twice with 1: alpha 2.5, beta .5; the others alpha .5, beta 1.5
    keys = prompt_keys(PROMPTS, ATTENTION)
    assert [state.value(key, -1.0) for key in keys] == pytest.approx([2.5 / 3, 0.25, 2.5 / 3, 0.25])
    second = step(state, 0.0, 1.0, 1.0, 0.0)
    assert second == pytest.approx(standardised(-2.5 / 3, 0.75, 0.5 / 3, -0.25), rel=1e-6)
    assert state.value(keys[0], -1.0) == pytest.approx((2.5 + 1.0) / 5)
    assert len(state) == 3


def test_old_evidence_fades_with_the_change_of_the_policy() -> None:
    state = ValueTracker(rho_min=0.3, rho_max=0.9, half_life_kl=0.1, kl_per_step=0.0)
    step(state, 1.0, 0.0, 1.0, 0.0)
    # measured: 0.1 nats halve the evidence; 1 nat would leave 2**-10, but no less than 0.3; 0 keeps at most 0.9
    step(state, 0.0, 0.0, 0.0, 0.0, policy_kl=torch.tensor([0.1, 1.0, 0.1, 0.0]))
    keys = prompt_keys(PROMPTS, ATTENTION)
    assert state.value(keys[0], -1.0) == pytest.approx(0.5 * 2.5 / (0.5 * 3 + 2))
    assert state.value(keys[1], -1.0) == pytest.approx(0.3 * 0.5 / (0.3 * 2 + 1))
    assert state.value(keys[3], -1.0) == pytest.approx(0.9 * 0.5 / (0.9 * 2 + 1))


def test_without_a_measurement_it_fades_with_the_steps() -> None:
    state = ValueTracker(rho_min=0.0, rho_max=1.0, half_life_kl=0.1, kl_per_step=0.05)
    for _ in range(3):
        step(state, 1.0, 1.0, 1.0, 1.0)
    before = state.value(prompt_keys(PROMPTS, ATTENTION)[1], -1.0)
    assert before == pytest.approx(1.0)
    step(state, 0.0, 0.0, 0.0, 0.0)
    rho = 2**-0.5
    weight = 1.0 + 1
    for _ in range(2):
        weight = rho * weight + 1
    assert state.value(prompt_keys(PROMPTS, ATTENTION)[1], -1.0) == pytest.approx(rho * weight / (rho * weight + 1))


def test_a_saved_state_continues_exactly() -> None:
    state, other = make_state(get_adv_estimator_fn("spo")), ValueTracker()
    assert isinstance(state, EstimatorState)
    step(state, 1.0, 0.0, 0.0, 0.0)
    other.load_state_dict(state.state_dict())
    assert step(state, 0.0, 1.0, 0.5, 0.0) == step(other, 0.0, 1.0, 0.5, 0.0)
    assert state.state_dict() == other.state_dict()
    with pytest.raises(CheckpointError, match="not a value tracker's"):
        other.load_state_dict({"value": 0.1})


def test_empty_responses_take_no_part() -> None:
    state = ValueTracker()
    mask = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 0]])
    advantages, _ = compute_spo_outcome_advantage(rewards(1.0, 0.0, 1.0, 50.0), mask, PROMPTS, ATTENTION, state)
    assert advantages[:3, 0].tolist() == pytest.approx(standardised(1 / 3, -2 / 3, 1 / 3))
    assert not advantages[3].any()
    assert len(state) == 2


def test_order_of_samples_only_permutes_the_result() -> None:
    order = [2, 3, 1, 0]
    states = ValueTracker(), ValueTracker()
    for scores in ((0.3, 0.1, 0.9, 0.4), (0.2, 0.7, 0.6, 0.5)):
        straight, _ = compute_spo_outcome_advantage(rewards(*scores), MASK, PROMPTS, ATTENTION, states[0])
        shuffled, _ = compute_spo_outcome_advantage(
            rewards(*scores)[order], MASK[order], PROMPTS[order], ATTENTION[order], states[1]
        )
        torch.testing.assert_close(shuffled, straight[order])
    assert states[0].state_dict() == states[1].state_dict()


def test_settings_come_from_the_algorithm_section() -> None:
    section = SimpleNamespace(spo=SimpleNamespace(rho_min=0.1, rho_max=0.2, half_life_kl=0.3, kl_per_step=0.4))
    state = make_state(get_adv_estimator_fn("spo"), section)
    assert isinstance(state, ValueTracker)
    assert (state.rho_min, state.rho_max, state.half_life_kl, state.kl_per_step) == (0.1, 0.2, 0.3, 0.4)
    assert "state" not in fields_needed(get_adv_estimator_fn("spo"))
    assert make_state(get_adv_estimator_fn("grpo")) is None


@pytest.mark.parametrize("bad", [{"rho_min": 0.9, "rho_max": 0.5}, {"half_life_kl": 0.0}, {"kl_per_step": -1.0}])
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="algorithm.spo"):
        ValueTracker(**bad)


def test_another_state_is_refused() -> None:
    with pytest.raises(SchemaError, match="ValueTracker; got a dict"):
        compute_spo_outcome_advantage(rewards(0.0, 0.0, 0.0, 0.0), MASK, PROMPTS, ATTENTION, {})

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from verl.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    call_estimator,
    fields_needed,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    loss_fields,
    make_state,
    register_adv_est,
    register_policy_loss,
)
from verl.errors import ConfigError, SchemaError

ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gae", {"token_level_rewards", "values", "response_mask"}),
        ("grpo", {"token_level_rewards", "response_mask", "uid"}),
        ("rloo", {"token_level_rewards", "response_mask", "uid"}),
        ("opo", {"token_level_rewards", "response_mask", "uid"}),
        ("gpg", {"token_level_rewards", "response_mask", "uid"}),
        ("reinforce_plus_plus_baseline", {"token_level_rewards", "response_mask", "uid"}),
        ("reinforce_plus_plus", {"token_level_rewards", "response_mask"}),
    ],
)
def test_fields_of_the_built_in_estimators(name: str, fields: set[str]) -> None:
    assert fields_needed(get_adv_estimator_fn(name)) == fields


def test_built_in_names() -> None:
    assert {"vanilla", "gpg"} <= set(POLICY_LOSSES)
    assert {"gae", "grpo", "grpo_vectorized", "rloo", "rloo_vectorized"} <= set(ADV_ESTIMATORS)
    assert get_adv_estimator_fn("grpo") is get_adv_estimator_fn("grpo_vectorized")
    assert get_policy_loss_fn("vanilla").__name__ == "compute_policy_loss_vanilla"


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        get_adv_estimator_fn("grpoo")
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_plug_in_registers_and_returns_itself_unchanged() -> None:
    @register_adv_est("test_registry_estimator")
    def estimator(token_level_rewards: Tensor, response_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return token_level_rewards, token_level_rewards

    @register_policy_loss("test_registry_loss")
    def loss(*args: Any) -> tuple[Tensor, dict[str, float]]:
        return ONE.sum(), {}

    assert get_adv_estimator_fn("test_registry_estimator") is estimator
    assert get_policy_loss_fn("test_registry_loss") is loss
    with pytest.raises(ConfigError, match="already registered"):
        register_adv_est("test_registry_estimator")(lambda: None)


def test_arguments_come_from_batch_then_settings_then_config_then_default() -> None:
    seen: dict[str, Any] = {}

    def estimator(
        token_level_rewards: Tensor,
        index: Any,
        gamma: float,
        lam: float,
        config: Any,
        my_field: Any,
        f_norm: float = 5.0,
        alpha: float = 7.0,
        unset: float = 9.0,
        non_tensor_batch: Any = None,
    ) -> tuple[Tensor, Tensor]:
        seen.update(locals())
        return token_level_rewards, token_level_rewards

    config = SimpleNamespace(gamma=0.9, lam=0.8, f_norm=2.0, unset=None)
    fields = {"token_level_rewards": ONE, "uid": ["a"], "my_field": 3, "unrelated": 4}
    call_estimator(estimator, fields, config, settings={"lam": 0.5}, whole={"non_tensor_batch": "all"})
    seen.pop("seen", None)
    assert seen == {
        "token_level_rewards": ONE,
        "index": ["a"],
        "gamma": 0.9,
        "lam": 0.5,
        "config": config,
        "my_field": 3,
        "f_norm": 2.0,
        "alpha": 7.0,
        "unset": 9.0,
        "non_tensor_batch": "all",
    }
    assert fields_needed(estimator) == {"token_level_rewards", "uid", "my_field"}


def test_a_missing_field_is_named_with_a_remedy() -> None:
    with pytest.raises(SchemaError, match="compute_gae_advantage_return needs .* values, .*critic"):
        call_estimator(
            get_adv_estimator_fn("gae"), {"token_level_rewards": ONE, "response_mask": ONE}, {"gamma": 1.0, "lam": 1.0}
        )


def test_extra_parameters_of_a_loss_are_batch_fields() -> None:
    def loss(
        old: Tensor, new: Tensor, a: Tensor, m: Tensor, mode: str, config: Any, rollout_is_weights: Any, difficulty: Any
    ) -> Any: ...

    def short(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, loss_agg_mode: Any, config: Any,
              *, values: Any, hint: Any = None) -> Any: ...  # fmt: skip

    assert loss_fields(loss) == ({"difficulty"}, frozenset())
    assert loss_fields(short) == ({"values"}, {"hint"})
    assert loss_fields(get_policy_loss_fn("vanilla")) == (frozenset(), frozenset())
    assert loss_fields(get_policy_loss_fn("kl_cov")) == (frozenset(), {"selected_tokens"})


def test_a_stateful_estimator_gets_the_state_of_the_run() -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    @register_adv_est("test_registry_stateful", state=lambda config: Counter(config["start"]))
    def estimator(token_level_rewards: Tensor, state: Counter) -> tuple[Tensor, Tensor]:
        state.count += 1
        return token_level_rewards * state.count, token_level_rewards

    state = make_state(estimator, {"start": 2})
    fields = {"token_level_rewards": ONE}
    assert fields_needed(estimator) == {"token_level_rewards"}
    for factor in (3, 4):
        advantages, _ = call_estimator(estimator, fields, {"start": 2}, state=state)
        assert torch.equal(advantages, factor * ONE)
    with pytest.raises(ConfigError, match="estimator estimator keeps a state"):
        call_estimator(estimator, fields, {"start": 2})

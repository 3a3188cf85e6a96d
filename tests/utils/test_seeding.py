"""Seeds are named, stable and separate; random states come back exactly."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from verl.utils.seeding import (
    derive_seed,
    deterministic,
    get_rng_state,
    set_rng_state,
    set_seed,
    torch_generator,
)


def test_derived_seeds_never_change() -> None:
    # Written down: a new value here would silently change every run and every resumed run.
    assert derive_seed(1) == 3080786352446996400
    assert derive_seed(1, "rollout", 3, 7) == 1526814610866076339
    assert 0 <= derive_seed(0, "x") < 2**63


def test_names_do_not_run_together() -> None:
    seeds = [
        derive_seed(1, "a", "bc"),
        derive_seed(1, "ab", "c"),
        derive_seed(1, "abc"),
        derive_seed(1, 12),
        derive_seed(1, 1, 2),
        derive_seed(1, "12"),
        derive_seed(11, 2),
        derive_seed(2, "abc"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(1, np.int64(5)) == derive_seed(1, 5)


@pytest.mark.parametrize("name", [1.0, True, None, b"x"])
def test_only_strings_and_integers_name_a_seed(name: object) -> None:
    with pytest.raises(TypeError, match="named by strings and integers"):
        derive_seed(1, name)  # type: ignore[arg-type]


def draws() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def test_set_seed_repeats_all_three_generators() -> None:
    set_seed(derive_seed(1, "test"))
    first = draws()
    assert draws() != first
    set_seed(derive_seed(1, "test"))
    assert draws() == first


def test_states_come_back_exactly_also_in_the_middle_of_a_gaussian_pair() -> None:
    set_seed(7)
    random.gauss(0, 1)  # Python keeps the second value of the pair in its state
    np.random.randn()
    state = get_rng_state()
    first = (random.gauss(0, 1), float(np.random.randn()), draws())
    set_rng_state(state)
    assert (random.gauss(0, 1), float(np.random.randn()), draws()) == first


def test_a_python_state_that_went_through_json_is_accepted() -> None:
    state = get_rng_state()
    expected = random.random()
    set_rng_state({**state, "python": json.loads(json.dumps(state["python"]))})
    assert random.random() == expected


def test_a_generator_of_its_own_leaves_the_global_one_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    own = torch.rand(2, generator=torch_generator(5))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(own, torch.rand(2, generator=torch_generator(5)))


def test_deterministic_algorithms_for_the_time_of_a_block() -> None:
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ValueError, match="stop"), deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(True):
            pass
        assert torch.are_deterministic_algorithms_enabled()
        raise ValueError("stop")
    assert not torch.are_deterministic_algorithms_enabled()

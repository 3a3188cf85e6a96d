from __future__ import annotations

import pytest
import torch

from verl.algorithms.reweight import draw, pf_ppo_weights
from verl.errors import ConfigError

SCORES = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.5])
INDEX = list("aaabb")


@pytest.mark.parametrize(
    ("method", "index", "expected"),
    [
        ("pow", INDEX, [1.0, 9.0, 4.0, 0.0, 0.25]),
        ("max_min", INDEX, [0.0, 1.0, 1.0, 1.0, 1.0]),
        ("max_random", INDEX, [0.1, 0.1, 0.4, 0.1, 0.4]),
        ("max_min", None, [0.0, 1.0, 1.0, 0.0, 0.0]),
        ("max_min", list("abcde"), [0.0, 1.0, 1.0, 0.0, 0.0]),  # one sample a prompt: the batch is the group
    ],
)
def test_weights(method: str, index: list[str] | None, expected: list[float]) -> None:
    assert pf_ppo_weights(SCORES, index, reweight_method=method).tolist() == pytest.approx(expected)


def test_power_and_scores_of_zero() -> None:
    assert pf_ppo_weights(SCORES, weight_pow=1.0).tolist() == [1.0, 3.0, 2.0, 0.0, 0.5]
    assert pf_ppo_weights(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_draws_follow_the_weights_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    weights = torch.tensor([0.0, 1.0, 3.0]).repeat(1000)
    rows = draw(weights, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (rows.diff() >= 0).all()
    counts = torch.bincount(rows % 3, minlength=3) / 3000
    assert counts[0] == 0
    # binomial with 3000 draws: standard deviation 0.008
    assert counts[2].item() == pytest.approx(0.75, abs=0.04)
    assert torch.equal(draw(weights), draw(weights))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="reweight_method='best'.*pow, max_min, max_random"):
        pf_ppo_weights(SCORES, reweight_method="best")
    with pytest.raises(ConfigError, match="weight_pow is -1"):
        pf_ppo_weights(SCORES, weight_pow=-1.0)

"""Pass@k, votes of samples without an answer, and independence of the batch size."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from verl.trainer.ppo.validation_metrics import (
    ValidationRecord,
    expected_best,
    majority_value,
    pass_at_k,
    process_validation_metrics,
)


@pytest.mark.parametrize(
    ("total", "correct", "k", "value"),
    [
        (4, 0, 2, 0.0),
        (4, 4, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 2, 3, 1.0),
        (10, 3, 5, 1 - 21 / 252),
        (2, 1, 5, 1.0),  # never more than there are
    ],
)
def test_pass_at_k(total: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(total, correct, k) == pytest.approx(value, abs=1e-15)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    for k in range(1, 8):
        subsets = list(itertools.combinations(values, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(max(s) for s in subsets) / len(subsets))
        assert pass_at_k(7, 2, k) == pytest.approx(expected_best(values, k))


def test_pass_at_k_of_a_validation_run() -> None:
    # p: 1 of 4 right, q: 2 of 4 right
    acc = [True, False, False, False, True, True, False, False]
    infos = {"acc": acc, "reward": [1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0]}
    metrics = process_validation_metrics(["s"] * 8, ["p"] * 4 + ["q"] * 4, infos)
    assert metrics["val-aux/s/acc/pass@1"] == pytest.approx((0.25 + 0.5) / 2)
    assert metrics["val-aux/s/acc/pass@2"] == pytest.approx((0.5 + 5 / 6) / 2)
    assert metrics["val-aux/s/acc/pass@4"] == 1.0
    assert metrics["val-core/s/acc/mean@4"] == pytest.approx(0.375)
    assert metrics["val-core/s/acc/best@4"] == 1.0
    assert metrics["val-aux/s/acc/worst@4"] == 0.0
    # a reward of -1 is no verdict
    assert not any("reward/pass@" in name for name in metrics)


def test_missing_values_do_not_count_as_wrong() -> None:
    metrics = process_validation_metrics(["s"] * 4, ["p"] * 4, {"acc": [1, None, 0, math.nan], "reward": [1, 0, 0, 0]})
    assert metrics["val-aux/s/acc/pass@1"] == 0.5
    assert metrics["val-aux/s/acc/pass@2"] == 1.0


def test_samples_without_an_answer_have_no_vote() -> None:
    assert majority_value(["", "", "", "a"], [0.0, 0.0, 0.0, 1.0]) == 1.0
    assert majority_value(["", ""], [0.0, 0.5]) == 0.25
    infos = {"reward": [0.0, 0.0, 1.0], "pred": [None, math.nan, "a"]}
    assert process_validation_metrics(["s"] * 3, ["p"] * 3, infos)["val-core/s/reward/maj@3"] == 1.0


def rows(count: int) -> list[tuple[str, str, dict[str, object]]]:
    """Samples of which only some report ``acc`` and ``pred``."""
    made: list[tuple[str, str, dict[str, object]]] = []
    for i in range(count):
        values: dict[str, object] = {"reward": (i * 7 % 5) / 4}
        if i >= count // 2:
            values |= {"acc": i % 3 == 0, "pred": str(i % 4)}
        made.append((f"s{i // 32 % 2}", f"p{i // 8}", values))
    return made


def test_summary_does_not_depend_on_the_batch_size() -> None:
    samples = rows(128)
    summaries = []
    for size in (1, 5, 32, 128):
        record = ValidationRecord()
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            names = dict.fromkeys(name for _, _, values in part for name in values)
            columns = {name: [values.get(name) for _, _, values in part] for name in names}
            record.add([s for s, _, _ in part], [u for _, u, _ in part], columns)
        summaries.append(record.metrics(seed=3))
    assert summaries[0] == summaries[1] == summaries[2] == summaries[3]
    assert "val-core/s1/acc/mean@8" in summaries[0]
    assert len([name for name in summaries[0] if "/maj@" in name]) > 0


def test_uneven_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="reward has 1 entries for 2 samples"):
        ValidationRecord().add(["s", "s"], ["p", "p"], {"reward": [1.0]})


def test_global_random_state_is_not_touched() -> None:
    np.random.seed(0)
    random.seed(0)
    before, drawn = np.random.get_state()[1].copy(), random.getstate()
    values = [float(i % 3 == 0) for i in range(32)]
    process_validation_metrics(["s"] * 32, ["p"] * 32, {"acc": values, "pred": [str(i % 5) for i in range(32)]})
    assert (np.random.get_state()[1] == before).all()
    assert random.getstate() == drawn

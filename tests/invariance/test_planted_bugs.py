"""The self-test finds what it is for: each well-known bug, switched on, makes the checks fail that concern it."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError
from verl.selftest import run_selftest
from verl.selftest.planted_bugs import BUGS, plant
from verl.selftest.report import Report

ROWS = ["estimator gae", "estimator grpo", "loss vanilla", "entropy", "kl k2", "value"]
UPDATES = {"estimator gae", "estimator grpo", "loss vanilla", "entropy", "kl k2", "value"}


def caught(report: Report) -> dict[str, set[str]]:
    """The failing checks of each failing row."""
    found: dict[str, set[str]] = {}
    for finding in report.failures:
        assert finding.deviation is not None, finding.error
        found.setdefault(finding.row, set()).add(finding.check)
    return found


def run(bug: str, **options: object) -> dict[str, set[str]]:
    return caught(run_selftest(device="cpu", ranks=(), only=ROWS, bugs=[bug], **options))  # type: ignore[arg-type]


def test_without_a_bug_nothing_fails() -> None:
    assert run_selftest(device="cpu", ranks=(), only=ROWS).ok


@pytest.mark.parametrize("bug", ["local-denominators", "micro-batch-mean"])
def test_denominators_of_a_micro_batch(bug: str) -> None:
    found = run(bug)
    assert set(found) == UPDATES
    for row, checks in found.items():
        assert {"micro-batch", "dynamic", "order"} <= checks, row
        # with the whole batch in one piece the local count is the global one
        assert not checks & {"plain model", "padded", "columns", "outside mask"}, row


def test_metrics_averaged_without_weights() -> None:
    found = run("metric-mean")
    assert set(found) == UPDATES
    for row, checks in found.items():
        assert {"micro-batch", "dynamic", "order"} <= checks, row


@pytest.mark.parametrize("bug", ["unmasked-sum", "mask-product"])
def test_masks_that_do_not_mask(bug: str) -> None:
    found = run(bug)
    assert set(found) == UPDATES
    assert all("outside mask" in checks for checks in found.values())


def test_a_temperature_that_training_forgets() -> None:
    """Every cut forgets it alike; the ratio of the first step tells, and the model computed independently."""
    found = run("training-temperature")
    assert {"first step", "plain model"} <= found["loss vanilla"]
    assert {"first step", "plain model"} <= found["estimator grpo"]
    assert found["entropy"] == found["kl k2"] == {"plain model"}
    assert "value" not in found


def test_a_temperature_that_everything_forgets() -> None:
    """The ratio is 1 then; only the independent model knows better."""
    found = run("no-temperature")
    assert found == {row: {"plain model"} for row in UPDATES - {"value"}}


def test_results_in_the_order_of_computation() -> None:
    found = run("row-order")
    assert "dynamic" in found["estimator gae"]
    assert "value" not in found


@pytest.mark.dist
def test_denominators_of_a_rank() -> None:
    """Right on one process, whatever the micro-batches; found by two ranks alone."""
    report = run_selftest(device="cpu", ranks=(2,), only=ROWS, bugs=["rank-denominators"])
    assert caught(report) == {row: {"2 ranks"} for row in UPDATES}


@pytest.mark.dist
def test_gradients_of_shared_sequences() -> None:
    """Nothing but ranks that share sequences can tell, and of them only the gradient."""
    report = run_selftest(device="cpu", ranks=(2,), only=ROWS, bugs=["sequence-gradient"])
    assert caught(report) == {row: {"2 ranks"} for row in UPDATES}
    assert all("sequences shared" in finding.label for finding in report.failures)


def test_patches_end_with_the_block() -> None:
    for bug in BUGS:
        with plant(bug):
            pass
    assert run_selftest(device="cpu", ranks=(), only=["loss vanilla"]).ok
    with pytest.raises(ConfigError, match="unknown bug 'off-by-one'"), plant("off-by-one"):
        pass

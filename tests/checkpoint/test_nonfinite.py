"""What happens to a run whose update is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.checkpoint.nonfinite import MAX_ROLLBACKS, NonfiniteUpdates
from verl.errors import TrainingError

BAD = {"actor/skipped_steps": 0.5, "critic/skipped_steps": 0.0}
GOOD = {"actor/skipped_steps": 0.0}


def guard(policy: str, newest: Path | None) -> tuple[NonfiniteUpdates, list[Path]]:
    restored: list[Path] = []
    return NonfiniteUpdates(policy, lambda: newest, restored.append), restored


def test_skipping_is_all_that_skip_does() -> None:
    updates, restored = guard("skip", Path("global_step_3"))
    assert updates.check(BAD, 5) == {}
    assert restored == []


def test_stop_names_the_role_and_the_step() -> None:
    updates, _ = guard("stop", None)
    assert updates.check(GOOD, 4) == {}
    with pytest.raises(TrainingError, match="step 5: the loss or gradient of actor is not finite"):
        updates.check(BAD, 5)


def test_rollback_restores_the_newest_and_gives_up_when_that_does_not_help() -> None:
    updates, restored = guard("rollback", Path("global_step_3"))
    assert updates.check(GOOD, 4) == {}
    for _ in range(MAX_ROLLBACKS):
        assert updates.check(BAD, 5) == {"checkpoint/rollbacks": 1.0}
    assert restored == [Path("global_step_3")] * MAX_ROLLBACKS
    with pytest.raises(TrainingError, match="does not recover by itself"):
        updates.check(BAD, 6)


def test_without_a_checkpoint_the_update_is_only_left_out() -> None:
    updates, restored = guard("rollback", None)
    assert updates.check(BAD, 1) == {}
    assert restored == []

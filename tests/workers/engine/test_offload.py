"""Parts come with the first use and leave after the last."""

from __future__ import annotations

import pytest

from verl.workers.engine.offload import Residency


def test_nested_uses_move_a_part_once() -> None:
    moves: list[str] = []
    residency = Residency(lambda part: moves.append(f"fetch {part}"), lambda part: moves.append(f"park {part}"))
    residency.settle("model")  # after building: nobody needs it yet
    with residency.of(["model"]):
        with residency.of(["model", "optimizer"]):
            residency.settle("model")  # somebody needs it
            moves.append("use")
        moves.append("use")
    assert moves == ["park model", "fetch model", "fetch optimizer", "use", "park optimizer", "use", "park model"]


def test_a_part_leaves_after_an_error_too() -> None:
    parked: list[str] = []
    residency = Residency(lambda part: None, parked.append)
    with pytest.raises(KeyError), residency.of(["model", "optimizer"]):
        raise KeyError
    assert parked == ["optimizer", "model"]

"""Parts come with the first use and leave after the last."""

from __future__ import annotations

import pytest

from verl.workers.engine.offload import OffloadContext


def test_nested_uses_move_a_part_once() -> None:
    moves: list[str] = []
    context = OffloadContext(lambda part: moves.append(f"load {part}"), lambda part: moves.append(f"offload {part}"))
    context.release("model")  # after building: nobody needs it yet
    with context.of(["model"]):
        with context.of(["model", "optimizer"]):
            context.release("model")  # somebody needs it
            moves.append("use")
        moves.append("use")
    assert moves == [
        "offload model",
        "load model",
        "load optimizer",
        "use",
        "offload optimizer",
        "use",
        "offload model",
    ]


def test_a_part_leaves_after_an_error_too() -> None:
    offloaded: list[str] = []
    context = OffloadContext(lambda part: None, offloaded.append)
    with pytest.raises(KeyError), context.of(["model", "optimizer"]):
        raise KeyError
    assert offloaded == ["optimizer", "model"]

"""The plain form of samples is whole, and a checkpoint can hold it."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.checkpoint import load_state, save_state
from verl.trajectories import Sample, Segment, Trajectory


def test_a_sample_survives_a_checkpoint(tmp_path: Path) -> None:
    images = {"pixel_values": torch.ones(2, 3), "image_grid_thw": torch.tensor([[1, 1, 2]]), "image_starts": [0]}
    first = Trajectory(
        [Segment([1], [2], [1], [-1.0], [3], (3, 3)), Segment([1, 2], [4], None, [-0.5], None, (3, 4), True)],
        score=0.5,
        turn_scores=[0.25, 0.25],
        num_turns=4,
        columns={"player": "x", "note": None},
        images=images,
    )
    sample = Sample([first, Trajectory([Segment([1], [])])], {"seconds": 1.0}, "timeout", [{"token_ids": [1]}])
    save_state(tmp_path / "state.pt", {"samples": [sample.to_plain()]})
    (plain,) = load_state(tmp_path / "state.pt")["samples"]
    back = Sample.from_plain(plain)
    assert torch.equal(back.trajectory.images["pixel_values"], images["pixel_values"])  # type: ignore[index]
    assert Sample.from_plain({**sample.to_plain()}) == sample
    assert (back.info, back.aborted, back.unfinished) == (sample.info, sample.aborted, sample.unfinished)
    assert back.trajectory.segments == first.segments
    assert back.trajectory.version_range() == (3, 4)
    assert back.trajectories[1] == sample.trajectories[1]
    assert Trajectory([Segment([1], [])]).version_range() == (-1, -1)

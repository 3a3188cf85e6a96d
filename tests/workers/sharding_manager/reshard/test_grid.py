"""Rank grids, the paper's generation groups and its cost formulas."""

from __future__ import annotations

import numpy as np
import pytest

from verl.errors import ConfigError
from verl.workers.sharding_manager.reshard.grid import RankGrid, generation_groups, transition_cost


def test_ranks_count_along_the_axes_in_order() -> None:
    grid = RankGrid.regular(tp=2, pp=2, dp=2)
    assert grid.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.groups("pp", "tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    megatron = RankGrid.regular(tp=2, pp=2, dp=2, order="tp-fsdp-ep-dp-pp", first_rank=10)
    assert megatron.groups("pp") == [(10, 14), (11, 15), (12, 16), (13, 17)]
    assert megatron.groups("dp") == [(10, 12), (11, 13), (14, 16), (15, 17)]


def test_generation_groups_of_the_papers_figure() -> None:
    """Figure 8(b): training 1-4-2, generation 1-2-2-2 on 8 GPUs that it counts from 1."""
    grid = generation_groups(RankGrid.regular(tp=4, dp=2), tp=2)
    plus_one = {
        axis: [tuple(rank + 1 for rank in group) for group in grid.groups(axis)] for axis in ("tp", "micro_dp", "dp")
    }
    assert plus_one["tp"] == [(1, 3), (2, 4), (5, 7), (6, 8)]
    assert plus_one["micro_dp"] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert plus_one["dp"] == [(1, 5), (2, 6), (3, 7), (4, 8)]


def test_generation_groups_with_pipeline_stages() -> None:
    grid = generation_groups(RankGrid.regular(tp=2, pp=4), tp=1, pp=2)
    assert grid.sizes == {"tp": 1, "pp": 2, "ep": 1, "micro_dp": 4, "dp": 1}
    # stages 0 and 1 become the first generation stage; its four ranks are one micro data-parallel group
    assert grid.groups("micro_dp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert grid.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_fully_sharded_ranks_count_as_slices() -> None:
    grid = generation_groups(RankGrid.regular(fsdp=4, dp=2), tp=2)
    assert grid.groups("tp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    # two tensor slices of two pieces each: generation may cut finer than the tensor-parallel training did
    finer = generation_groups(RankGrid.regular(tp=2, fsdp=2), tp=4)
    np.testing.assert_array_equal(finer.axis("tp"), [0, 2, 1, 3])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"tp": 3}, r"tp=3 does not divide the 4"), ({"pp": 2}, r"pp=2 does not divide the 1"), ({"tp": 8}, r"tp=8")],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation_groups(RankGrid.regular(tp=4, dp=2), **sizes)


def test_bad_grids_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 1, not \{'tp': 0\}"):
        RankGrid.regular(tp=0)
    with pytest.raises(ConfigError, match="must name each of"):
        RankGrid.regular(tp=2, order="tp-dp")


def test_cost_formulas() -> None:
    sizes = {"tp": 8, "pp": 2, "dp": 4, "generation_tp": 4, "generation_pp": 1}
    ours = transition_cost("hybridflow", 64.0, **sizes)
    assert (ours.moved, ours.peak, ours.redundant) == (12.0, 16.0, 0.0)  # 3/16 of the model, a quarter of it
    gathered = transition_cost("vanilla", 64.0, **sizes)
    assert (gathered.moved, gathered.peak, gathered.redundant) == (60.0, 64.0, 4.0)
    everywhere = transition_cost("all_ranks", 64.0, **sizes)
    assert (everywhere.moved, everywhere.peak, everywhere.redundant) == (63.0, 64.0, 1.0)
    with pytest.raises(ConfigError, match="unknown method 'magic'"):
        transition_cost("magic", 1.0)

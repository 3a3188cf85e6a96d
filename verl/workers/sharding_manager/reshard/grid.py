"""Ranks on a grid of parallel axes, and the grid of generation that fits a given grid of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verl.errors import ConfigError

AXES = ("tp", "fsdp", "ep", "pp", "dp")


@dataclass(frozen=True, eq=False)
class RankGrid:
    """Ranks with one coordinate per axis.

    Axes that mean something for weights: ``tp`` (slices of a tensor), ``fsdp`` (further pieces of a slice), ``ep``
    (ownership of experts), ``pp`` (pipeline stages). Ranks that differ in any other axis hold the same weights.

    Attributes:
        ranks: (N,) int64, global ranks.
        sizes: axis -> size.
        coords: axis -> (N,) int64, the coordinate of each of ``ranks``.
    """

    ranks: np.ndarray
    sizes: Mapping[str, int]
    coords: Mapping[str, np.ndarray] = field(repr=False)

    @classmethod
    def regular(
        cls,
        *,
        tp: int = 1,
        fsdp: int = 1,
        ep: int = 1,
        pp: int = 1,
        dp: int = 1,
        order: str = "tp-fsdp-ep-pp-dp",
        first_rank: int = 0,
    ) -> RankGrid:
        """Consecutive ranks, counted along the axes in ``order``, the first one fastest.

        The default keeps a whole model on consecutive ranks; Megatron counts ``tp-fsdp-ep-dp-pp``.

        Raises:
            ConfigError: a size below 1, or an order that does not name each axis once.
        """
        sizes = {"tp": tp, "fsdp": fsdp, "ep": ep, "pp": pp, "dp": dp}
        wrong = {name: size for name, size in sizes.items() if size < 1}
        if wrong:
            raise ConfigError(f"parallel sizes must be at least 1, not {wrong}")
        axes = order.split("-")
        if sorted(axes) != sorted(AXES):
            raise ConfigError(f"rank order {order!r} must name each of {', '.join(AXES)} once, joined by '-'")
        index = np.arange(math.prod(sizes.values()))
        coords = {}
        stride = 1
        for axis in axes:
            coords[axis] = index // stride % sizes[axis]
            stride *= sizes[axis]
        return cls(index + first_rank, sizes, coords)

    def __len__(self) -> int:
        return len(self.ranks)

    def axis(self, name: str) -> np.ndarray:
        """(N,) coordinates along an axis; zeros for an axis that the grid does not have."""
        found = self.coords.get(name)
        return np.zeros(len(self), dtype=np.int64) if found is None else found

    def size(self, name: str) -> int:
        """Size of an axis; 1 for an axis that the grid does not have."""
        return self.sizes.get(name, 1)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Groups of ranks that differ along ``axes`` only, each in order of these coordinates, last axis fastest."""
        others = [self.axis(name) for name in self.sizes if name not in axes]
        own = [self.axis(name) for name in axes]
        order = np.lexsort((*reversed(own), *reversed(others)))  # the last key is the most significant one
        size = math.prod(self.size(name) for name in axes)
        rows: np.ndarray = self.ranks[order].reshape(-1, size)
        groups: list[tuple[int, ...]] = [tuple(int(rank) for rank in row) for row in rows]
        return sorted(groups)


def generation_groups(train: RankGrid, *, tp: int = 1, pp: int = 1, ep: int = 1) -> RankGrid:
    """The grid of generation in which every rank's training shard lies inside its generation shard.

    Section 5.3 of HybridFlow (https://arxiv.org/abs/2409.19256): with training t·p and generation t_g·p_g, the ranks of
    a generation tensor group are t/t_g apart and those of a pipeline group p/p_g stages apart, and each training
    replica becomes d_g = t·p/(t_g·p_g) micro data-parallel replicas of neighbouring ranks. The weights that a rank
    trains are then part of those it generates with, so that nothing has to be kept twice and only the rest has to move.

    Fully sharded data parallelism counts as further tensor slices here. Its shards lie inside generation shards where
    both cut the same dimension of a tensor
    (:func:`~verl.workers.sharding_manager.reshard.layout.aligned_shard_dim`).

    Args:
        train: the grid of training.
        tp, pp, ep: sizes of generation.

    Returns:
        The same ranks with axes ``tp``, ``pp``, ``ep``, ``micro_dp`` and ``dp``. There are ``micro_dp × dp`` replicas.

    Raises:
        ConfigError: a size of generation does not divide that of training.
    """
    slices = train.size("tp") * train.size("fsdp")
    for name, have, want, what in (
        ("tp", slices, tp, "tensor × fsdp shards"),
        ("pp", train.size("pp"), pp, "pipeline stages"),
        ("ep", train.size("ep"), ep, "expert shards"),
    ):
        if want < 1 or have % want:
            raise ConfigError(
                f"generation {name}={want} does not divide the {have} {what} of training; choose a divisor of {have} "
                "(generation replicas are made by splitting training replicas, never by joining them)"
            )
    piece = train.axis("tp") * train.size("fsdp") + train.axis("fsdp")
    micro = np.zeros(len(train), dtype=np.int64)
    coords = {}
    for name, coordinate, have, want in (
        ("pp", train.axis("pp"), train.size("pp"), pp),
        ("ep", train.axis("ep"), train.size("ep"), ep),
        ("tp", piece, slices, tp),
    ):
        coords[name] = coordinate // (have // want)
        micro = micro * (have // want) + coordinate % (have // want)
    replicas = slices // tp * (train.size("pp") // pp) * (train.size("ep") // ep)
    coords |= {"micro_dp": micro, "dp": train.axis("dp")}
    sizes = {"tp": tp, "pp": pp, "ep": ep, "micro_dp": replicas, "dp": train.size("dp")}
    return RankGrid(train.ranks, sizes, coords)


def sharing_ranks(
    world: int, *, shards: int, parallel: int, local_world: int | None = None
) -> list[tuple[int, ...]] | None:
    """Which ranks generate together with one split model, after fully sharded or tensor-parallel training.

    Groups of :func:`generation_groups` where they stay within a machine and the model divides; there each rank trains
    a part of what it generates with. Elsewhere neighbours, whose talk during generation costs more than a weight sync.

    Args:
        world: number of ranks.
        shards: consecutive ranks that a parameter is divided over; other ranks hold replicas, or other parameters.
        parallel: ranks that share a model in generation.
        local_world: consecutive ranks on a machine; None: all.

    Returns:
        Groups in the order of their parts; None: neighbours.
    """
    local = world if local_world is None else local_world
    if parallel == 1 or shards % parallel or local % shards or world % shards:
        return None
    return generation_groups(RankGrid.regular(fsdp=shards, dp=world // shards), tp=parallel).groups("tp")


@dataclass(frozen=True)
class TransitionCost:
    """What going from training to generation costs one rank, in the unit of the model size that was given.

    Attributes:
        moved: received from other ranks.
        peak: most weight memory at any time.
        redundant: kept for training beside the generation weights, because these do not contain it.
    """

    moved: float
    peak: float
    redundant: float


def transition_cost(
    method: str, model: float, *, tp: int = 1, pp: int = 1, dp: int = 1, generation_tp: int = 1, generation_pp: int = 1
) -> TransitionCost:
    """The closed formulas of HybridFlow's Table 2, for a model that divides evenly.

    ``"hybridflow"``: groups of :func:`generation_groups`, (tp·pp − t_g·p_g)/(t_g·p_g·tp·pp) · M moved.
    ``"vanilla"``: all-gather of the whole model within the training replica, (tp·pp − 1)/(tp·pp) · M.
    ``"all_ranks"``: all-gather over all ranks of a fully sharded model, (tp·pp·dp − 1)/(tp·pp·dp) · M.

    Args:
        method: one of the three.
        model: size of the model, M.

    Raises:
        ConfigError: an unknown method.
    """
    shards, generation = tp * pp, generation_tp * generation_pp
    if method == "hybridflow":
        return TransitionCost((shards - generation) / (generation * shards) * model, model / generation, 0.0)
    if method == "vanilla":
        return TransitionCost((shards - 1) / shards * model, model, model / shards)
    if method == "all_ranks":
        return TransitionCost((shards * dp - 1) / (shards * dp) * model, model, model / (shards * dp))
    raise ConfigError(f"unknown method {method!r} (known: hybridflow, vanilla, all_ranks)")

"""The places of ranks along a data-parallel axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """The ranks' places along one data-parallel axis.

    Attributes:
        dp_ranks: for each rank the shard that it computes.
        collect_ranks: for each shard the rank that its result is taken from.
    """

    dp_ranks: tuple[int, ...]
    collect_ranks: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        """Number of shards."""
        return len(self.collect_ranks)

    @classmethod
    def of_ranks(cls, name: str, places: Sequence[tuple[int, bool]]) -> Mesh:
        """Build it from each rank's ``(dp_rank, is_collect)``.

        Raises:
            ConfigError: shards are not numbered 0, 1, ..., or one has no collecting rank or several.
        """
        dp_ranks = tuple(dp_rank for dp_rank, _ in places)
        if set(dp_ranks) != set(range(max(dp_ranks) + 1)):
            raise ConfigError(f"mesh {name!r}: data-parallel ranks {sorted(set(dp_ranks))} do not count from 0")
        collecting: dict[int, list[int]] = {shard: [] for shard in range(max(dp_ranks) + 1)}
        for rank, (dp_rank, is_collect) in enumerate(places):
            if is_collect:
                collecting[dp_rank].append(rank)
        wrong = {shard: ranks for shard, ranks in collecting.items() if len(ranks) != 1}
        if wrong:
            raise ConfigError(
                f"mesh {name!r}: each shard needs one rank with is_collect=True, found (shard: ranks) {wrong}"
            )
        return cls(dp_ranks, tuple(ranks[0] for ranks in collecting.values()))

"""The base class of everything that runs in a worker process."""

from __future__ import annotations

import os
from typing import Any

from verl.errors import ConfigError


class Worker:
    """One process's part of a worker group.

    The controller sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` before the constructor runs, so a process group can be initialised from the environment there.
    Under Ray each process sees only its own GPU. Without a controller the worker is rank 0 of 1.
    """

    _rank: int
    _world_size: int
    _local_rank: int
    _local_world_size: int
    _meshes: dict[str, tuple[int, bool]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        # here and not in __init__, so that the identity is known to a constructor that does not call super() first
        self = super().__new__(cls)
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._meshes = {}
        return self

    @property
    def rank(self) -> int:
        """Rank in the worker group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of processes in the worker group."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """Place among the group's processes on this node."""
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the group's processes on this node."""
        return self._local_world_size

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port where the group's process group meets; the port is reserved on rank 0's node."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Tell the controller this rank's place in a mesh, for methods dispatched over that mesh.

        Args:
            mesh_name: name of the mesh, as given to ``make_nd_compute_dataproto_dispatch_fn``.
            dp_rank: which data-parallel shard of a batch this rank computes, from 0.
            is_collect: whether the shard's result is taken from this rank; true for one rank of each shard.

        Raises:
            ConfigError: the rank registered something else under this name before.
        """
        info = (int(dp_rank), bool(is_collect))
        if self._meshes.setdefault(mesh_name, info) != info:
            raise ConfigError(
                f"mesh {mesh_name!r}: rank {self.rank} registered {self._meshes[mesh_name]} before and now {info}; "
                "the controller may have used the first"
            )

    def _query_dispatch_collect_info(self, mesh_name: str) -> tuple[int, bool]:
        """``(dp_rank, is_collect)`` of this rank in a mesh."""
        if mesh_name not in self._meshes:
            known = ", ".join(sorted(self._meshes)) or "none"
            raise ConfigError(
                f"mesh {mesh_name!r} is not registered on rank {self.rank} (registered: {known}); call "
                "_register_dispatch_collect_info() in the method that builds the model, and that method first"
            )
        return self._meshes[mesh_name]

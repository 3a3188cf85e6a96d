"""Workers that the tests run in other processes."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Basic(Worker):
    """Answers about itself and does small sums."""

    def __init__(self, offset: float = 0.0) -> None:
        self.at_init = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
        self.offset = offset
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self) -> dict:
        """Rank, pid and environment."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {name: os.environ.get(name) for name in names}
        return {"rank": self.rank, "world_size": self.world_size, "pid": os.getpid(), "env": env, "init": self.at_init}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto, amount: float = 1.0) -> DataProto:
        """``x + amount + offset`` and the rank of each row."""
        x = data.batch["x"]
        return DataProto.from_dict(
            {"y": x + amount + self.offset, "rank": torch.full((len(x),), self.rank)},
            {"seen": np.array([f"{self.rank}" for _ in range(len(x))], dtype=object)},
            {"metrics": {"rows": len(x)}},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        """``y = x + 1`` without waiting."""
        return DataProto.from_dict({"x": data.batch["x"] + 1})

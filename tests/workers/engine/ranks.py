"""Running a function on several gloo ranks, each a fresh process with one thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from verl.utils.distributed import destroy_process_group, free_port, init_process_group


def _entry(rank: int, world: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        HF_HUB_OFFLINE="1",
    )
    torch.set_num_threads(1)
    init_process_group("cpu", timeout_s=60)
    try:
        function(rank, *args)
    finally:
        destroy_process_group()


def run_ranks(world: int, function: Callable[..., None], *args: Any) -> None:
    """Call ``function(rank, *args)`` on ``world`` processes; an error of any of them is raised here.

    Args:
        world: number of processes.
        function: module-level, so that it can be found by a new process.
        args: picklable.
    """
    mp.spawn(_entry, (world, free_port(), function, args), nprocs=world)

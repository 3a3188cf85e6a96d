"""vLLM as a guest in a training process: what it changes there while it starts is put back."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import ConfigError
from verl.utils.distributed import env_local_rank

#: read by vLLM, also later
_DEFAULTS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_OWN_PREFIXES = ("VLLM_", "TORCHINDUCTOR_")


def require_vllm() -> None:
    """Import vLLM with the settings that an engine in this process needs.

    Raises:
        ConfigError: the package is missing, or it was set to run in processes of its own.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name='vllm': the package vllm is not installed; install verl[vllm] (GPU) or run "
            "`make install-vllm` (CPU), or set actor_rollout_ref.rollout.name=hf"
        )
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ConfigError(
            "environment variable VLLM_ENABLE_V1_MULTIPROCESSING=1: the engine shares the training processes; unset it"
        )
    with own_environment():
        import vllm  # noqa: F401


@contextlib.contextmanager
def own_environment(local_device: int | None = None) -> Iterator[None]:
    """Put environment variables, thread settings and random states back afterwards.

    vLLM preloads libraries for children, renames the number of local processes, seeds every generator and replaces
    ``torch.set_num_threads`` on CPUs; none of that is meant for the trainer and its other children.

    Args:
        local_device: index of this process's GPU; None on CPU.
    """
    before = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(env_local_rank() if local_device is None else local_device)
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with own_random_state(local_device is not None):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for name in os.environ.keys() | before.keys():
            if name.startswith(_OWN_PREFIXES):
                continue
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


@contextlib.contextmanager
def own_random_state(cuda: bool) -> Iterator[None]:
    """Random numbers drawn inside do not advance torch's generators."""
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


@contextlib.contextmanager
def named_shared_memory() -> Iterator[None]:
    """Name the shared memory of vLLM's tensor-parallel ranks on a CPU after the trainer's meeting point.

    vLLM takes the name from the address that it would meet at, which is the same for all external launchers: two
    trainings on one machine would write into each other's memory.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    original = ExecutorWithExternalLauncher._distributed_args

    def distributed_args(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        _, rank, local_rank = original(self)
        address, port = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "0")
        return f"tcp://{address}:{port}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original


@contextlib.contextmanager
def placed_groups(groups: Sequence[Sequence[int]] | None) -> Iterator[None]:
    """Let vLLM split weights over these groups of ranks instead of over neighbours.

    Args:
        groups: of equal sizes, each rank once; the k-th rank of a group has the k-th part. None: neighbours.
    """
    if groups is None:
        yield
        return
    from vllm.distributed import parallel_state

    original = parallel_state.init_model_parallel_group
    rank_at = [rank for group in groups for rank in group]  # where vLLM thinks of rank r, the r-th of these is

    def init_group(group_ranks: list[list[int]], *arguments: Any, **options: Any) -> Any:
        return original([[rank_at[rank] for rank in ranks] for ranks in group_ranks], *arguments, **options)

    parallel_state.init_model_parallel_group = init_group
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


def leave_stale_groups() -> None:
    """Forget vLLM's process groups when the default group that they were made from is gone."""
    from vllm.distributed import parallel_state

    world = getattr(parallel_state, "_WORLD", None)
    if world is None:
        return
    groups = torch.distributed.distributed_c10d._world.pg_map
    if torch.distributed.is_initialized() and world.cpu_group in groups:
        return
    for name in [name for name, value in vars(parallel_state).items() if _is_group_global(name, value)]:
        setattr(parallel_state, name, None)


def _is_group_global(name: str, value: object) -> bool:
    from vllm.distributed.parallel_state import GroupCoordinator

    return name.startswith("_") and isinstance(value, GroupCoordinator)

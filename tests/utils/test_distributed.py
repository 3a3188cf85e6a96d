"""Process groups: alone without any set-up, and several over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verl.errors import ConfigError
from verl.utils.distributed import (
    all_reduce,
    all_reduce_numbers,
    barrier,
    destroy_process_group,
    free_port,
    get_rank,
    get_world_size,
    init_process_group,
)


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    destroy_process_group()


def test_a_single_process_needs_no_environment() -> None:
    assert init_process_group("cpu") == torch.device("cpu")
    assert (get_rank(), get_world_size()) == (0, 1)
    assert all_reduce(torch.tensor([2.0])).tolist() == [2.0]
    assert all_reduce_numbers([1, 2.5], "max") == [1.0, 2.5]
    barrier()
    gathered = [torch.zeros(1)]
    dist.all_gather(gathered, torch.ones(1))  # the group is a real one
    assert gathered[0].item() == 1.0
    assert init_process_group("cpu") == torch.device("cpu")  # a second call changes nothing


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is outside WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"WORLD_SIZE=2 but MASTER_ADDR and MASTER_PORT unset; .*torchrun"),
        ({"RANK": "zero"}, "RANK='zero' is not an integer"),
    ],
)
def test_a_broken_environment_is_explained(env: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        init_process_group("cpu")


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'avg'"):
        all_reduce(torch.ones(1), "avg")


SCRIPT = """
import torch
from verl.utils.distributed import *
init_process_group("cpu", timeout_s=60)
rank = get_rank()
total = all_reduce(torch.tensor([float(rank + 1)])).item()
largest, = all_reduce_numbers([rank + 0.5], "max")
barrier()
print(rank, get_world_size(), total, largest, is_rank_zero())
destroy_process_group()
"""


@pytest.mark.dist
def test_two_processes_reduce_over_gloo(tmp_path: Path) -> None:
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    lines = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert lines == ["0 2 3.0 1.5 True", "1 2 3.0 1.5 False"]

"""Processes that share the sequences of a batch, for the check of sequence parallelism."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.errors import ConfigError, VerlError
from verl.selftest.certificate.engines import FSDPTrainer, Setup
from verl.selftest.certificate.outcome import TEMPERATURE
from verl.selftest.certificate.subject import Subject
from verl.utils.distributed import destroy_process_group, free_port, init_process_group
from verl.workers.engine.base import MicroBatching

_TIMEOUT_S = 180.0


_POLL_S = 0.5


@dataclass(frozen=True)
class Work:
    """What the ranks compute.

    Attributes:
        subject: the model.
        setup: engine and device.
        batch: rows.
        planted: faults to plant in the ranks too.
    """

    subject: Subject
    setup: Setup
    batch: TensorDict
    planted: tuple[str, ...] = ()


class Ranks:
    """Processes that share sequences. They start with the first work and serve until the end of the context.

    Args:
        world: number of processes.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def compute(self, work: Work, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """Outputs, loss and gradients of the rows; or under ``refused`` or ``error`` why there are none."""
        if not self._processes:
            self._start(work.setup.device)
        for inbox in self._inboxes:
            inbox.put(work)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                found: dict[str, Any] = self._outbox.get(timeout=_POLL_S)
                return found
            except queue.Empty:
                if gone := [process for process in self._processes if not process.is_alive()]:
                    self.close()
                    return {"error": f"a rank ended with exit code {gone[0].exitcode}"}
        self.close()
        return {"error": f"the ranks gave no answer within {timeout_s:.0f} s"}

    def _start(self, device: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # A server that has imported everything once makes each rank a cheap copy; it ends with this process.
        context.set_forkserver_preload([__name__])
        self._inboxes = [context.Queue() for _ in range(self.world)]
        self._outbox = context.Queue()
        port = free_port("127.0.0.1")
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, self.world, port, device, list(sys.path), inbox, self._outbox),
                daemon=True,
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()

    def close(self) -> None:
        """End the processes."""
        processes, self._processes = self._processes, []
        if not processes:
            return
        for inbox in self._inboxes:
            inbox.put(None)
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, world: int, port: int, device: str, path: list[str], inbox: Any, outbox: Any) -> None:
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    logging.getLogger("verl").setLevel(logging.ERROR)
    init_process_group(device, timeout_s=_TIMEOUT_S)
    try:
        while (work := inbox.get()) is not None:
            found = _answer(work, world)
            if rank == 0:
                outbox.put(found)
    finally:
        destroy_process_group()


def _answer(work: Work, world: int) -> dict[str, Any]:
    from verl.selftest.certificate import faults

    try:
        with ExitStack() as stack:
            for name in work.planted:
                stack.enter_context(faults.plant(name))
            return _compute(work, world)
    except ConfigError as error:  # on every rank alike
        return {"refused": str(error)}
    except VerlError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _compute(work: Work, world: int) -> dict[str, Any]:
    trainer = FSDPTrainer(work.subject, replace(work.setup, ranks=0), sequence=world)
    if work.setup.lora:
        trainer.update(work.batch, TEMPERATURE)
    outputs = trainer.forward(work.batch, MicroBatching(), TEMPERATURE)
    done = trainer.training_pass(work.batch, MicroBatching(), TEMPERATURE)
    whole = {}
    for name, shard in done.gradients.items():  # cut along the first dimension
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, shard)
        whole[name] = torch.cat(parts).numpy()
    return {
        "outputs": {name: value.numpy() for name, value in outputs.items()},
        "loss": done.loss,
        "gradients": whole,
    }

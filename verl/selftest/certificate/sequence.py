"""Sequence parallelism: processes that share the tokens of a row give the numbers of one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.errors import VerlError
from verl.selftest.certificate.bench import TEMPERATURE, TRANSFORMERS, Bench
from verl.selftest.certificate.engines import FSDPTrainer, Setup
from verl.selftest.certificate.outcome import Measure
from verl.selftest.certificate.subject import Subject
from verl.selftest.compare import Deviation
from verl.utils.distributed import destroy_process_group, free_port, init_process_group
from verl.workers.engine.base import MicroBatching

SEQUENCE = "sequence parallel"
_TIMEOUT_S = 120.0


def sequence_parallel(bench: Bench) -> Iterator[Measure]:
    """Log-probs, loss and gradients of rows that two processes share are those of plain Transformers."""
    world = bench.setup.ranks
    reason = not_shared(bench, world)
    if reason is not None:
        yield Measure(SEQUENCE, "", reason=reason)
        return
    directory = bench.scratch / "ranks"
    directory.mkdir(exist_ok=True)
    adapters = None
    if bench.setup.lora:
        _ = bench.trainer
    torch.save((bench.subject, bench.setup, bench.rows.batch, planted_now()), directory / "work.pt")
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(
        _rank, (world, free_port("127.0.0.1"), str(directory), list(sys.path)), nprocs=world, start_method="forkserver"
    )
    found = torch.load(directory / "found.pt", weights_only=False)
    case = f"{world} ranks"
    if "error" in found:
        yield Measure(SEQUENCE, case, error=found["error"])
        return
    del adapters
    yield from bench.compare_outputs(SEQUENCE, case, found["outputs"], bench.reference)
    loss, gradients = bench.reference_gradients
    allowed = bench.tolerances.log_probs
    yield Measure(SEQUENCE, case, TRANSFORMERS, Deviation("loss", abs(found["loss"] - loss), allowed))
    if found["gradients"]:
        yield bench.compare_gradients(SEQUENCE, case, found["gradients"], gradients)


def not_shared(bench: Bench, world: int) -> str | None:
    """Why sequences are not shared; None if they can be."""
    config = bench.subject.text_config
    if world < 2:
        return "switched off (--ranks 0)"
    if bench.setup.engine != "fsdp":
        return f"the {bench.setup.engine} engine has context parallelism instead, which needs GPUs here"
    if bench.setup.device != "cpu" and torch.cuda.device_count() < world:
        return f"there are {torch.cuda.device_count()} GPUs"
    if not bench.trainer.packs:
        return "rows of this model cannot be packed"
    heads = int(config.num_attention_heads)
    if heads % world:
        return f"{heads} attention heads cannot be divided by {world}"
    return None


def planted_now() -> tuple[str, ...]:
    """Faults that are planted in this process, for the ranks to plant them too."""
    from verl.selftest.certificate import faults

    return tuple(faults.ACTIVE)


def _rank(rank: int, world: int, port: int, directory: str, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    logging.getLogger("verl").setLevel(logging.ERROR)
    subject, setup, batch, planted = torch.load(Path(directory) / "work.pt", weights_only=False)
    init_process_group(setup.device, timeout_s=_TIMEOUT_S)
    try:
        from verl.selftest.certificate import faults

        with ExitStack() as stack:
            for name in planted:
                stack.enter_context(faults.plant(name))
            found = _compute(subject, setup, batch, world)
        if rank == 0:
            torch.save(found, Path(directory) / "found.pt")
    finally:
        destroy_process_group()


def _compute(subject: Subject, setup: Setup, batch: torch.Tensor, world: int) -> dict[str, object]:
    try:
        trainer = FSDPTrainer(subject, replace(setup, ranks=0), sequence=world)
    except VerlError as error:  # on every rank alike
        return {"error": f"{type(error).__name__}: {error}"}
    if setup.lora:
        trainer.update(batch, TEMPERATURE)
    outputs = trainer.forward(batch, MicroBatching(), TEMPERATURE)
    done = trainer.training_pass(batch, MicroBatching(), TEMPERATURE)
    whole = {}
    for name, shard in done.gradients.items():  # cut along the first dimension
        parts: list[torch.Tensor | None] = [None] * world
        dist.all_gather_object(parts, shard)
        whole[name] = torch.cat([part for part in parts if part is not None])
    return {"outputs": outputs, "loss": done.loss, "gradients": whole}

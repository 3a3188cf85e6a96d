"""The same checks on several data-parallel ranks: processes are started once and run every entry."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.selftest.backends import EngineBackend
from verl.selftest.batches import Fields
from verl.selftest.checks import FIRST_STEP, Finding, attempt
from verl.selftest.compare import Deviation, tolerance_of, worst
from verl.selftest.entries import Entry, Outcome, run
from verl.selftest.model import ModelDirs
from verl.selftest.planted_bugs import plant
from verl.selftest.splits import Cut, rank_cuts, ranks_check
from verl.utils.distributed import destroy_process_group, free_port, init_process_group
from verl.utils.dynamic_import import load_module

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Work:
    """What every rank runs.

    Attributes:
        models: directories.
        cases: entries with their batches and reference outcomes, computed by one process.
        device: of the models.
        full: all cuts rather than one.
        plugins: modules that register names.
        bugs: planted bugs.
    """

    models: ModelDirs
    cases: list[tuple[Entry, Fields, Outcome]]
    device: str
    full: bool
    plugins: tuple[str, ...] = ()
    bugs: tuple[str, ...] = ()


def check_on_ranks(work: Work, world: int, directory: Path) -> list[Finding]:
    """Compare ``world`` data-parallel ranks with the references.

    Args:
        work: what to run.
        world: number of processes.
        directory: for the files that pass between this process and the ranks.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(work, directory / "work.pt")
    # A server that has imported everything once makes each rank a cheap copy; it ends with this process.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    arguments = world, free_port("127.0.0.1"), str(directory), list(sys.path)
    mp.start_processes(_rank_main, arguments, nprocs=world, start_method="forkserver")
    findings: list[Finding] = torch.load(directory / "findings.pt", weights_only=False)
    return findings


def _rank_main(rank: int, world: int, port: int, directory: str, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    logging.getLogger("verl").setLevel(logging.ERROR)
    work: Work = torch.load(Path(directory) / "work.pt", weights_only=False)
    for plugin in work.plugins:
        load_module(plugin)
    init_process_group(work.device, timeout_s=_TIMEOUT_S)
    try:
        with ExitStack() as stack:
            for bug in work.bugs:
                stack.enter_context(plant(bug))
            findings = _check(work, world)
        if rank == 0:
            torch.save(findings, Path(directory) / "findings.pt")
    finally:
        destroy_process_group()


def _check(work: Work, world: int) -> list[Finding]:
    backend = EngineBackend(work.models, work.device)
    findings: list[Finding | None] = []
    cuts = rank_cuts(world, work.full)
    for entry, batch, reference in work.cases:
        for cut in cuts:
            outcomes: list[Outcome] = []

            def compare(cut: Cut = cut, out: list[Outcome] = outcomes) -> Deviation | None:
                out.append(run(entry, backend, batch, cut))  # noqa: B023 - called at once
                return worst(entry, cut.check, reference, out[0])  # noqa: B023

            findings.append(attempt(entry, ranks_check(world), cut.label, compare))
            if outcomes and entry.kind == "estimator":
                ratio = outcomes[0].log_ratio or 0.0
                allowed = tolerance_of(entry, FIRST_STEP, "log ratio")
                label = f"{world} ranks, {cut.label}"
                findings.append(Finding(entry.row, FIRST_STEP, label, Deviation("log ratio", ratio, allowed)))
    mine = [finding for finding in findings if finding is not None]
    everyone: Sequence[Any] = [None] * world
    dist.all_gather_object(everyone, mine)  # type: ignore[arg-type]
    # Rank 0 speaks for all but for what only another rank saw.
    return mine + [f for other in everyone[1:] for f in other if not f.ok]

"""The self-test as a function."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from verl.selftest.backends import EngineBackend, PlainBackend
from verl.selftest.batches import make_batch
from verl.selftest.checks import Finding, check_entry
from verl.selftest.entries import complete_base, enumerate_entries
from verl.selftest.model import save_tiny_models
from verl.selftest.planted_bugs import plant
from verl.selftest.ranks import Work, check_on_ranks
from verl.selftest.report import Report
from verl.selftest.splits import single_process_cuts
from verl.utils.device import resolve_device
from verl.utils.dynamic_import import load_module
from verl.utils.owned_dirs import owned_scratch

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run_selftest(
    *,
    full: bool = False,
    ranks: Sequence[int] | None = None,
    device: str = "auto",
    plugins: Iterable[str] = (),
    only: Iterable[str] = (),
    bugs: Iterable[str] = (),
    seed: int = 0,
) -> Report:
    """Check that every registered estimator and loss gives the same numbers however the work is cut.

    Args:
        full: all cuts, aggregations and aliases; otherwise one or two cuts for each check.
        ranks: numbers of data-parallel ranks to compare with one process; default: 2, and with ``full`` 2 and 4.
        device: ``auto``, ``cpu`` or ``cuda``.
        plugins: modules or files that register estimators and losses.
        only: patterns of rows to check, such as ``"loss *"``; none checks all.
        bugs: planted bugs, see :mod:`verl.selftest.planted_bugs`.
        seed: of the batch and the models.

    Raises:
        ConfigError: a plug-in cannot be imported, or a bug or device is unknown.
    """
    started = time.monotonic()
    kind = resolve_device(device)
    plugins, bugs = tuple(plugins), tuple(bugs)
    for plugin in plugins:
        load_module(plugin)
    worlds = tuple(ranks) if ranks is not None else ((2, 4) if full else (2,))
    findings: list[Finding] = []
    notes: list[str] = []
    with ExitStack() as stack:
        directory = stack.enter_context(owned_scratch("selftest"))
        stack.enter_context(alone())
        for bug in bugs:
            stack.enter_context(plant(bug))
        models = save_tiny_models(directory / "models", seed)
        engine, plain = EngineBackend(models, kind), PlainBackend(models, kind)
        base = complete_base(plain, make_batch(seed))
        cuts = single_process_cuts(full)
        cases = []
        for entry in enumerate_entries(full, only):
            found, case = check_entry(entry, base, engine, plain, cuts)
            findings += found
            if case is not None and entry.kind != "kl-reward":  # which runs on the controller, before any rank
                cases.append((entry, *case))
        for world in worlds if cases else ():
            if kind == "cuda" and torch.cuda.device_count() < world:
                notes.append(f"{world} ranks were not checked: there are {torch.cuda.device_count()} GPUs")
                continue
            work = Work(models, cases, kind, full, plugins, bugs)
            findings += check_on_ranks(work, world, directory / f"ranks-{world}")
    return Report(findings, notes, time.monotonic() - started)


@contextmanager
def alone(*, one_thread: bool = True) -> Iterator[None]:
    """One process, by default with one thread: a launcher's variables and thread count come back afterwards."""
    saved = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    threads = torch.get_num_threads()
    if one_thread:
        torch.set_num_threads(1)  # the models are tiny
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.update(saved)

"""Sequence parallelism: processes that share the tokens of a row give the numbers of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch

from verl.selftest.certificate.bench import Bench
from verl.selftest.certificate.outcome import TRANSFORMERS, Measure
from verl.selftest.certificate.rank_pool import Ranks, Work
from verl.selftest.compare import Deviation

SEQUENCE = "sequence parallel"


def sequence_parallel(bench: Bench) -> Iterator[Measure]:
    """Log-probs, loss and gradients of rows that two processes share are those of plain Transformers."""
    world = bench.setup.ranks
    reason = not_shared(bench, world)
    if reason is not None:
        yield Measure(SEQUENCE, "", reason=reason)
        return
    from verl.selftest.certificate import faults

    work = Work(bench.subject, bench.setup, bench.rows.batch, tuple(faults.ACTIVE))
    with ExitStack() as stack:
        ranks = bench.ranks if bench.ranks is not None else stack.enter_context(Ranks(world))
        found = ranks.compute(work)
    case = f"{world} ranks"
    if "refused" in found:  # by name, which is no wrong number
        yield Measure(SEQUENCE, case, reason=found["refused"])
        return
    if "error" in found:
        yield Measure(SEQUENCE, case, error=found["error"])
        return
    outputs, got = (
        {name: torch.from_numpy(value) for name, value in found[part].items()} for part in ("outputs", "gradients")
    )
    yield from bench.compare_outputs(SEQUENCE, case, outputs, bench.reference)
    loss, gradients = bench.reference_gradients
    allowed = bench.tolerances.log_probs
    yield Measure(SEQUENCE, case, TRANSFORMERS, Deviation("loss", abs(found["loss"] - loss), allowed))
    yield bench.compare_gradients(SEQUENCE, case, got, gradients)


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

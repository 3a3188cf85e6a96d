"""Checks of the trainer: log-probs, gradients, the pad token, noise, routing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl.selftest.certificate.bench import Bench
from verl.selftest.certificate.outcome import TEMPERATURE, TRANSFORMERS, Measure
from verl.selftest.certificate.routes import Choices, compare_choices
from verl.selftest.compare import Deviation
from verl.workers.engine.base import MicroBatching

LOG_PROBS, GRADIENTS, PAD, NOISE, ROUTING = "log-probs", "gradients", "pad token", "noise", "routing"


def log_probs(bench: Bench) -> Iterator[Measure]:
    """Log-probs and entropies of the rows are those of plain Transformers, packed, padded and in micro-batches."""
    for layout, packed in bench.layouts.items():
        for name, micro in bench.micros.items():
            with bench.trainer.packed(packed):
                got = bench.trainer.forward(bench.rows.batch, micro, TEMPERATURE)
            yield from bench.compare_outputs(LOG_PROBS, f"{layout}, {name}", got, bench.reference)


def gradients(bench: Bench) -> Iterator[Measure]:
    """Loss and gradient of every parameter are those of plain Transformers, packed, padded and in micro-batches."""
    loss, want = bench.reference_gradients
    for layout, packed in bench.layouts.items():
        for name, micro in bench.micros.items():
            with bench.trainer.packed(packed):
                got = bench.trainer.training_pass(bench.rows.batch, micro, TEMPERATURE)
            case = f"{layout}, {name}"
            allowed = bench.tolerances.log_probs
            where = f"{got.loss:.7g} against {loss:.7g}"
            yield Measure(GRADIENTS, case, TRANSFORMERS, Deviation("loss", abs(got.loss - loss), allowed), where)
            yield bench.compare_gradients(GRADIENTS, case, got.gradients, want)


def pad_token(bench: Bench) -> Iterator[Measure]:
    """A pad token inside a row gives its embedding a gradient like any other token."""
    _, want = bench.reference_gradients
    name = bench.embedding_name
    if name not in want:
        yield Measure(PAD, "", reason="the embedding is not trained")
        return
    pad, against = bench.rows.pad, f"{TRANSFORMERS} without padding_idx"
    got = bench.trainer.training_pass(bench.rows.batch, MicroBatching(), TEMPERATURE).gradients
    if name not in got:
        yield Measure(PAD, "", against, error=f"the trainer gives no gradient of {name}")
        return
    row, expected = got[name][pad], want[name][pad]
    scale = float(expected.double().norm()) or 1.0
    figure = float((row.double() - expected.double()).norm()) / scale
    where = f"token {pad}: norm {float(row.norm()):.6g} against {float(expected.norm()):.6g}"
    yield Measure(PAD, f"{name}[{pad}]", against, Deviation("gradient", figure, bench.tolerances.gradients), where)


def noise(bench: Bench) -> Iterator[Measure]:
    """Two training passes give the same bits, and the numbers of evaluation."""
    micro = MicroBatching()
    first, second = (bench.trainer.training_pass(bench.rows.batch, micro, TEMPERATURE) for _ in range(2))
    mask = bench.rows.batch["response_mask"]
    yield from bench.compare_outputs(
        NOISE,
        "two passes",
        second.outputs,
        first.outputs,
        against="the same pass again",
        mask=mask,
        tolerance=bench.tolerances.exact,
    )
    evaluated = bench.trainer.forward(bench.rows.batch, micro, TEMPERATURE)
    yield from bench.compare_outputs(NOISE, "training pass", first.outputs, evaluated, against="evaluation", mask=mask)


def routing(bench: Bench) -> Iterator[Measure]:
    """Experts of a token, and keys that sparse attention selects, are those that plain Transformers chooses."""
    model = getattr(getattr(bench.trainer.engine, "module", None), "model", None)
    plain = Choices()
    with torch.no_grad(), plain.recording():
        for row in bench.rows.probe.rows:
            bench.plain.model(input_ids=torch.tensor([row.token_ids], device=bench.device), use_cache=False)
    if not plain.calls:
        yield Measure(ROUTING, "", reason="no layer chooses experts or keys")
        return
    if model is None:
        yield Measure(ROUTING, "", reason=f"not read from the {bench.setup.engine} engine")
        return
    for layout, packed in bench.layouts.items():
        seen = Choices()
        with bench.trainer.packed(packed), bench.trainer.unshared(), seen.recording():
            bench.trainer.forward(bench.rows.batch, MicroBatching(size=1), TEMPERATURE)
        for kind, share, where in compare_choices(seen, plain):
            deviation = Deviation(f"share of tokens with other {kind}", share, bench.tolerances.routing)
            yield Measure(ROUTING, layout, TRANSFORMERS, deviation, where)

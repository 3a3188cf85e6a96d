"""Running the checks of one process, and collecting what they find."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.errors import VerlError
from verl.selftest.backends import Backend, EngineBackend, PlainBackend
from verl.selftest.batches import GROUPS, Fields
from verl.selftest.compare import Deviation, scalar_deviation, tolerance_of, worst
from verl.selftest.entries import LOSS_SCALE, Entry, Outcome, prepare, run, tensors_of
from verl.selftest.invariances import check_estimator, laws_of_loss
from verl.selftest.splits import MICRO, PADDED, PLAIN, Cut
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import GlobalBatchInfo, MicroBatching

logger = logging.getLogger(__name__)

#: columns of the report that are not made of cuts
REFERENCE, FIRST_STEP, LAWS = "plain model", "first step", "laws"
_FIRST_STEP_CUTS = (
    PLAIN,
    Cut(MICRO, "3 rows", MicroBatching(size=3)),
    Cut(PADDED, "whole batch, padded", packed=False),
)


@dataclass(frozen=True)
class Finding:
    """The result of one comparison.

    Attributes:
        row, check: its place in the report.
        label: variant of the entry and of the cut.
        deviation: how far off; None if it raised.
        error: the exception's text, if it raised.
    """

    row: str
    check: str
    label: str
    deviation: Deviation | None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it passed."""
        return self.deviation is not None and self.deviation.ok


def attempt(entry: Entry, check: str, label: str, compute: Callable[[], Deviation | None]) -> Finding | None:
    """The finding of ``compute``, an exception included; None if there was nothing to compare."""
    full_label = ", ".join(filter(None, (entry.variant, label)))
    try:
        deviation = compute()
    except Exception as error:
        expected = isinstance(error, VerlError)
        logger.debug("%s, %s: %s", entry.row, check, label, exc_info=not expected)
        return Finding(entry.row, check, full_label, None, f"{type(error).__name__}: {error}")
    return None if deviation is None else Finding(entry.row, check, full_label, deviation)


def check_entry(
    entry: Entry, base: Fields, engine: EngineBackend, plain: PlainBackend, cuts: Iterable[Cut]
) -> tuple[list[Finding], tuple[Fields, Outcome] | None]:
    """All checks of one entry in this process.

    Returns:
        The findings, and the entry's batch with its reference outcome (None if it cannot even run).
    """
    made: dict[str, Any] = {}

    def reference() -> Deviation | None:
        made["batch"] = prepare(entry, base)
        made["outcome"] = run(entry, engine, made["batch"])
        return None

    findings = [attempt(entry, REFERENCE, "", reference)]
    if "outcome" not in made:
        return [f for f in findings if f is not None], None
    batch, outcome = made["batch"], made["outcome"]
    findings.append(attempt(entry, REFERENCE, "", lambda: worst(entry, REFERENCE, outcome, run(entry, plain, batch))))
    for cut in cuts:
        findings.append(
            attempt(
                entry,
                cut.check,
                cut.label,
                lambda cut=cut: worst(entry, cut.check, outcome, run(entry, engine, batch, cut)),  # type: ignore[misc]
            )
        )
    for cut in _FIRST_STEP_CUTS:
        findings.append(
            attempt(entry, FIRST_STEP, cut.label, lambda cut=cut: _first_step(entry, engine, batch, cut))  # type: ignore[misc]
        )
    findings.append(attempt(entry, LAWS, "", lambda: _laws(entry, engine, batch)))
    return [f for f in findings if f is not None], (batch, outcome)


def _first_step(entry: Entry, backend: Backend, batch: Mapping[str, Any], cut: Cut) -> Deviation | None:
    """Old log-probabilities from the same policy and cut: the ratio is exactly 1, and the loss what follows from it."""
    if entry.kind not in ("loss", "estimator") or entry.weights:
        return None
    outcome = run(replace(entry, on_policy=entry.kind == "loss"), backend, batch, cut)
    ratio = _deviation(entry, FIRST_STEP, "log ratio", 0.0 if outcome.log_ratio is None else outcome.log_ratio)
    # estimators train with the clipped loss
    held = entry.kind == "estimator" or (entry.main and "minus-mean-advantage" in laws_of_loss(entry.name))
    if not ratio.ok or not held:
        return ratio
    expected = -_aggregated(outcome.fields["advantages"], batch["response_mask"], entry.agg)
    loss = _deviation(entry, FIRST_STEP, "loss", scalar_deviation(expected, outcome.scalars["loss"]))
    return max((ratio, loss), key=lambda d: (d.excess, d.value))


def _deviation(entry: Entry, check: str, quantity: str, value: float) -> Deviation:
    return Deviation(quantity, value, tolerance_of(entry, check, quantity))


def _aggregated(values: Tensor, mask: Tensor, mode: str) -> float:
    """The four aggregations once more, in the plainest form."""
    rows = [row[keep].double() for row, keep in zip(values, mask != 0, strict=True) if bool(keep.any())]
    if mode == "token-mean":
        return float(torch.cat(rows).mean())
    if mode == "seq-mean-token-mean":
        return float(torch.stack([row.mean() for row in rows]).mean())
    total = float(torch.stack([row.sum() for row in rows]).mean())
    return total / LOSS_SCALE if mode == "seq-mean-token-sum-norm" else total


def _laws(entry: Entry, engine: EngineBackend, batch: Mapping[str, Any]) -> Deviation | None:
    if not entry.main:
        return None
    if entry.kind == "estimator":
        found = [_deviation(entry, LAWS, law, value) for law, value in check_estimator(entry.name, batch)]
        return max(found, key=lambda d: (d.excess, d.value))
    if entry.kind != "loss" or "policy-gradient" not in laws_of_loss(entry.name):
        return None
    level = torch.tensor([[0.4 * (-1) ** row * (1 + row)] for row in range(len(GROUPS))])
    mask = batch["response_mask"] != 0
    constant = {**batch, "advantages": torch.where(mask, level, 0.0)}
    mine = run(replace(entry, on_policy=True), engine, constant)
    step = engine.update("lm", tensors_of(constant), _PolicyGradient(entry.agg), PLAIN)
    law = worst(entry, LAWS, Outcome(gradient=step.gradient), Outcome(gradient=mine.gradient))
    return replace(law, quantity=f"policy-gradient: {law.quantity}")


class _PolicyGradient:
    """``-mean(A log p)`` in the plainest form, for one micro-batch of one process."""

    want = frozenset({"log_probs"})

    def __init__(self, agg: str) -> None:
        self.agg = agg

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo
    ) -> tuple[Tensor, MetricSet]:
        mask = rows["response_mask"] != 0
        per_token = -outputs["log_probs"] * rows["advantages"]
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)
        weight = {
            "token-mean": 1 / mask.sum(),
            "seq-mean-token-mean": 1 / lengths / info.global_batch_size,
            "seq-mean-token-sum": torch.tensor(1 / info.global_batch_size),
            "seq-mean-token-sum-norm": torch.tensor(1 / info.global_batch_size / LOSS_SCALE),
        }[self.agg]
        return torch.where(mask, per_token * weight, 0.0).sum(), MetricSet()

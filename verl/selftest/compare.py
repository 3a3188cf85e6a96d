"""How far two outcomes are apart, and how far they may be."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.selftest.entries import Entry, Outcome

#: relative, in float32
TOLERANCE = 1e-5
#: Numbers below this are compared absolutely (to FLOOR * TOLERANCE = 1e-6): a log-probability of float32 carries about
#: 5e-7 of rounding whatever the size of the mean that it enters.
FLOOR = 0.1
#: The same for a parameter's gradient, as a part of the norm of the whole gradient. Some are zero in exact arithmetic
#: (the bias of attention keys cancels in the softmax) and consist of rounding alone.
GRADIENT_FLOOR = 0.01


@dataclass(frozen=True)
class Allowance:
    """An exception from :data:`TOLERANCE`.

    Attributes:
        row, check, quantity: patterns.
        tolerance: what is allowed there; infinity leaves the quantity out.
        why: the reason, which a reader must be able to judge.
    """

    row: str
    check: str
    quantity: str
    tolerance: float
    why: str


ALLOWANCES: tuple[Allowance, ...] = ()


@dataclass(frozen=True)
class Deviation:
    """Distance of one quantity from its reference."""

    quantity: str
    value: float
    tolerance: float

    @property
    def excess(self) -> float:
        """The distance in units of what is allowed; nan counts as infinite."""
        if math.isnan(self.value):
            return math.inf
        return self.value / self.tolerance if self.tolerance else (math.inf if self.value else 0.0)

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance."""
        return self.excess <= 1.0


def tolerance_of(entry: Entry, check: str, quantity: str) -> float:
    """What is allowed for a quantity of an entry in a check."""
    for a in ALLOWANCES:
        if all(map(fnmatch.fnmatchcase, (entry.row, check, quantity), (a.row, a.check, a.quantity))):
            return a.tolerance
    return TOLERANCE


def worst(entry: Entry, check: str, expected: Outcome, actual: Outcome) -> Deviation:
    """The quantity that is furthest from the reference, measured in what is allowed for it."""
    found = [Deviation(name, value, tolerance_of(entry, check, name)) for name, value in _deviations(expected, actual)]
    return max(found, key=lambda d: (d.excess, d.value))


def _deviations(expected: Outcome, actual: Outcome) -> Iterator[tuple[str, float]]:
    for name in sorted(expected.scalars.keys() | actual.scalars.keys()):
        pair = expected.scalars.get(name, math.nan), actual.scalars.get(name, math.nan)
        yield name, scalar_deviation(*pair)
    for name in sorted(expected.fields.keys() | actual.fields.keys()):
        yield name, field_deviation(expected.fields.get(name), actual.fields.get(name))
    if expected.gradient or actual.gradient:
        yield from _gradient_deviations(expected.gradient, actual.gradient)


def scalar_deviation(expected: float, actual: float) -> float:
    """Relative distance, absolute in units of :data:`FLOOR` below it; nan if only one of both is finite."""
    if expected == actual:
        return 0.0
    return abs(actual - expected) / max(abs(expected), FLOOR) if math.isfinite(expected) else math.nan


def field_deviation(expected: Tensor | None, actual: Tensor | None) -> float:
    """Largest element-wise distance; nan if a shape or the place of a number that is not finite differs."""
    if expected is None or actual is None or expected.shape != actual.shape or not torch.isfinite(expected).all():
        return math.nan
    if not expected.numel():
        return 0.0
    expected, actual = expected.double(), actual.double()
    return float(((actual - expected).abs() / expected.abs().clamp(min=FLOOR)).max())


def _gradient_deviations(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    if expected.keys() != actual.keys():
        # the engine takes no step on a gradient that is not finite, so that there is none to compare
        yield "gradient", math.nan
        return
    total = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    largest, where = 0.0, ""
    for name, grad in expected.items():
        distance = float((actual[name].double() - grad.double()).norm())
        scale = max(float(grad.double().norm()), GRADIENT_FLOOR * total)
        value = distance / scale if scale else (0.0 if distance == 0 else math.nan)
        if not value <= largest:
            largest, where = value, name
    yield f"gradient of {where}" if where else "gradient", largest

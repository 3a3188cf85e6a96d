"""Metrics that know how they combine, so that a number is the same for any split of the batch.

A step's numbers are computed piecewise: over micro-batches, over ranks. Averaging the pieces' averages is
wrong as soon as pieces differ in size. A :class:`Metric` therefore carries a total and a weight together
with its reduction, and :class:`MetricSet` merges pieces exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, SupportsFloat

Reduction = Literal["sum", "mean", "min", "max"]


@dataclass(frozen=True)
class Metric:
    """One piece of a metric.

    Attributes:
        reduction: how pieces combine.
        total: the value, or for ``mean`` the weighted sum of the values.
        weight: for ``mean`` the sum of the weights; unused otherwise.
    """

    reduction: Reduction
    total: float
    weight: float = 1.0

    def combine(self, other: Metric) -> Metric:
        """Merge two pieces of the same metric."""
        if self.reduction != other.reduction:
            raise ValueError(f"cannot combine a {self.reduction!r} metric with a {other.reduction!r} metric")
        if self.reduction == "min":
            return Metric("min", min(self.total, other.total))
        if self.reduction == "max":
            return Metric("max", max(self.total, other.total))
        weight = self.weight + other.weight if self.reduction == "mean" else 1.0
        return Metric(self.reduction, self.total + other.total, weight)

    @property
    def value(self) -> float:
        """The metric's number; a mean over nothing is 0."""
        if self.reduction != "mean":
            return self.total
        return self.total / self.weight if self.weight else 0.0


def msum(value: SupportsFloat) -> Metric:
    """A metric whose pieces add up, such as a loss that is already divided by a global count."""
    return Metric("sum", float(value))


def mmean(total: SupportsFloat, weight: SupportsFloat) -> Metric:
    """A mean given by its numerator and denominator over this piece."""
    return Metric("mean", float(total), float(weight))


def mmin(value: SupportsFloat) -> Metric:
    """The smallest value of all pieces."""
    return Metric("min", float(value))


def mmax(value: SupportsFloat) -> Metric:
    """The largest value of all pieces."""
    return Metric("max", float(value))


class MetricSet(dict[str, Metric]):
    """Metrics by name; :meth:`merge` combines name by name."""

    def merge(self, other: Mapping[str, Metric]) -> MetricSet:
        """Add another piece in place and return self."""
        for name, metric in other.items():
            self[name] = self[name].combine(metric) if name in self else metric
        return self

    @classmethod
    def merged(cls, pieces: Iterable[Mapping[str, Metric]]) -> MetricSet:
        """Combine pieces in the given order (floating-point sums are taken in that order)."""
        out = cls()
        for piece in pieces:
            out.merge(piece)
        return out

    def values_by_name(self) -> dict[str, float]:
        """The final numbers."""
        return {name: metric.value for name, metric in self.items()}

    def non_finite(self) -> list[str]:
        """Names of the metrics that are NaN or infinite."""
        return [name for name, metric in self.items() if not math.isfinite(metric.value)]

"""Well-known bugs to switch on, so that anyone can see the self-test fail (``verl selftest --plant metric-mean``).

Each is a patch of the library for the length of a ``with`` block, in this process.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algorithms import aggregate
from verl.errors import ConfigError
from verl.models import sequence_group
from verl.utils.metrics import Metric, MetricSet
from verl.workers import losses
from verl.workers.engine.base import GlobalBatchInfo
from verl.workers.engine.batching import BatchPlan
from verl.workers.engine.fsdp import engine as fsdp_engine
from verl.workers.engine.fsdp.engine import FSDPEngine


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Run the block with a bug in the library.

    Raises:
        ConfigError: no such bug.
    """
    if name not in BUGS:
        raise ConfigError(f"unknown bug {name!r}; the bugs are {', '.join(BUGS)}")
    with ExitStack() as stack:
        BUGS[name](stack)
        yield


def _patch_everywhere(stack: ExitStack, original: Any, replacement: Any) -> None:
    """Replace a function in every module of the library that holds it under its own name."""
    name = original.__name__
    for module_name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", {}).get(name)
        if module_name.startswith("verl.") and "selftest" not in module_name and held is original:
            stack.enter_context(mock.patch.object(module, name, replacement))


def _counts_of(rows: TensorDict, dp_size: int) -> GlobalBatchInfo:
    mask = rows["response_mask"] != 0
    return GlobalBatchInfo(dp_size, int(mask.sum()), int(mask.any(-1).sum()))


def _local_denominators(stack: ExitStack) -> None:
    """Each micro-batch divides by its own tokens and rows."""
    real = FSDPEngine._backward

    def backward(
        self: FSDPEngine, rows: TensorDict, loss: Any, want: frozenset[str], temperature: float, info: GlobalBatchInfo
    ) -> MetricSet:
        return real(self, rows, loss, want, temperature, _counts_of(rows, info.dp_size))

    stack.enter_context(mock.patch.object(FSDPEngine, "_backward", backward))


def _rank_denominators(stack: ExitStack) -> None:
    """Each rank divides by its own tokens and rows, and ranks are averaged: right on one rank only."""
    real: Callable[..., BatchPlan] = fsdp_engine.plan_batch

    def plan(batch: TensorDict, *args: Any, **kwargs: Any) -> BatchPlan:
        return dataclasses.replace(real(batch, *args, **kwargs), info=_counts_of(batch, 1))

    stack.enter_context(mock.patch.object(fsdp_engine, "plan_batch", plan))


def _micro_batch_mean(stack: ExitStack) -> None:
    """The mean of the micro-batches' means: each counts the same, however few tokens it has."""
    real_plan, real_backward = FSDPEngine._plan, FSDPEngine._backward
    parts = [1]

    def plan(self: FSDPEngine, *args: Any) -> BatchPlan:
        made = real_plan(self, *args)
        parts[0] = len(made.parts)
        return made

    def backward(
        self: FSDPEngine, rows: TensorDict, loss: Any, want: frozenset[str], temperature: float, info: GlobalBatchInfo
    ) -> MetricSet:
        def mean(outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
            value, metrics = loss(outputs, rows, info)
            return value / parts[0], metrics

        return real_backward(self, rows, mean, want, temperature, _counts_of(rows, info.dp_size))

    stack.enter_context(mock.patch.object(FSDPEngine, "_plan", plan))
    stack.enter_context(mock.patch.object(FSDPEngine, "_backward", backward))


def _metric_mean(stack: ExitStack) -> None:
    """Metrics are averaged over micro-batches without weights; the gradient is right."""
    real = losses._metric_set

    def unweighted(*args: Any, **kwargs: Any) -> MetricSet:
        made = real(*args, **kwargs)
        for name, metric in made.items():
            if metric.reduction == "mean":
                made[name] = Metric("mean", metric.value, 1.0)
        return made

    stack.enter_context(mock.patch.object(losses, "_metric_set", unweighted))


def _unmasked_sum(stack: ExitStack) -> None:
    """Sums run over padding and tool output too."""

    def everything(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
        return torch.broadcast_tensors(values, mask)[0]

    _patch_everywhere(stack, aggregate.keep_masked, everything)


def _mask_product(stack: ExitStack) -> None:
    """Values are multiplied by the mask: right for numbers, not for nan, which a product does not remove."""

    def product(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
        return values * mask.bool() + fill * ~mask.bool() if fill else values * mask.bool()

    _patch_everywhere(stack, aggregate.keep_masked, product)


def _no_temperature(stack: ExitStack, *methods: str) -> None:
    for method in methods:
        real = getattr(FSDPEngine, method)

        def without(self: FSDPEngine, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            if "temperature" in kwargs:
                kwargs["temperature"] = 1.0
            return real(self, *args, **kwargs)

        stack.enter_context(mock.patch.object(FSDPEngine, method, without))


def _training_temperature(stack: ExitStack) -> None:
    """The update ignores the sampling temperature; the old log-probabilities have it."""
    _no_temperature(stack, "train_batch")


def _no_temperature_at_all(stack: ExitStack) -> None:
    """The temperature is ignored everywhere: consistent, and of another distribution than was sampled from."""
    _no_temperature(stack, "train_batch", "forward")


def _row_order(stack: ExitStack) -> None:
    """Results of regrouped micro-batches come back in the order in which they were computed."""

    def join(pieces: list[dict[str, Tensor]], parts: list[list[int]], rows: int) -> dict[str, Tensor]:
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    stack.enter_context(mock.patch.object(fsdp_engine, "join_rows", join))


def _sequence_gradient(stack: ExitStack) -> None:
    """Ranks that share sequences are averaged as if each had computed the whole gradient."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, *rest = real(ctx, grad)
        return part / ctx.group.size, *rest

    real = sequence_group.JoinResults.backward
    stack.enter_context(mock.patch.object(sequence_group.JoinResults, "backward", staticmethod(backward)))


#: name -> what installs it on an ExitStack; the docstrings say what is wrong
BUGS: dict[str, Callable[[ExitStack], None]] = {
    "local-denominators": _local_denominators,
    "rank-denominators": _rank_denominators,
    "micro-batch-mean": _micro_batch_mean,
    "metric-mean": _metric_mean,
    "unmasked-sum": _unmasked_sum,
    "mask-product": _mask_product,
    "training-temperature": _training_temperature,
    "no-temperature": _no_temperature_at_all,
    "row-order": _row_order,
    "sequence-gradient": _sequence_gradient,
}

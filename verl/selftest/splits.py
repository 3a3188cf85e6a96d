"""The ways in which one batch can be cut, padded, ordered and soiled without changing what it says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.selftest.batches import PROMPT_WIDTH, RESPONSE_WIDTH, ROWS, Fields
from verl.workers.engine.base import MicroBatching

_NOWHERE = 10**6  # a token id and a position that no model has


@dataclass(frozen=True)
class Cut:
    """One way to run a batch.

    Attributes:
        check: the column of the report that it belongs to.
        label: what is special about it.
        micro: micro-batching.
        packed: without padding, or rows as they are.
        left, right: extra padding columns of prompts and responses.
        order: ``order[i]`` is the row that stands in place i; empty = as it is.
        garbage: stands wherever a mask is 0, in every float field; None = what the stages leave there.
        spread: rows of each data-parallel rank; empty = one process.
        sequence: ranks that share the tokens of each sequence.
    """

    check: str
    label: str
    micro: MicroBatching = field(default_factory=MicroBatching)
    packed: bool = True
    left: int = 0
    right: int = 0
    order: tuple[int, ...] = ()
    garbage: float | None = None
    spread: tuple[int, ...] = ()
    sequence: int = 1


PLAIN = Cut("", "whole batch, packed")
#: columns of the report that cuts fill, in order
MICRO, DYNAMIC, PADDED, COLUMNS, ORDER, OUTSIDE = (
    "micro-batch",
    "dynamic",
    "padded",
    "columns",
    "order",
    "outside mask",
)
_SHUFFLES = ((3, 0, 7, 5, 1, 6, 2, 4), (7, 6, 5, 4, 3, 2, 1, 0), (6, 2, 4, 0, 5, 7, 3, 1))
_NAN, _INF = float("nan"), float("inf")


def single_process_cuts(full: bool) -> list[Cut]:
    """Cuts of one process; without ``full`` one or two for each check."""
    sizes = range(1, ROWS + 1) if full else (1, 3)
    budgets = (12, 16, 24, 40) if full else (24,)
    cuts = [Cut(MICRO, f"{size} rows", MicroBatching(size=size)) for size in sizes]
    cuts += [Cut(DYNAMIC, f"{budget} tokens", MicroBatching(max_tokens=budget)) for budget in budgets]
    cuts += [Cut(PADDED, "whole batch", packed=False)]
    cuts += [Cut(COLUMNS, "left and right, padded", packed=False, left=3, right=2)]
    cuts += [Cut(ORDER, "shuffled, 3 rows", MicroBatching(size=3), order=_SHUFFLES[0])]
    cuts += [Cut(OUTSIDE, "nan", garbage=_NAN)]
    if full:
        cuts += [Cut(PADDED, f"{size} rows", MicroBatching(size=size), packed=False) for size in (1, 3)]
        cuts += [Cut(PADDED, "20 tokens", MicroBatching(max_tokens=20), packed=False)]
        cuts += [
            Cut(COLUMNS, f"{name}, {'packed' if packed else 'padded'}", packed=packed, left=left, right=right)
            for (name, left, right), packed in itertools.product(
                (("left", 4, 0), ("right", 0, 5), ("both", 1, 1)), (True, False)
            )
        ]
        cuts += [Cut(ORDER, f"shuffle {i}", packed=i != 2, order=order) for i, order in enumerate(_SHUFFLES)]
        cuts += [Cut(ORDER, "shuffled, 20 tokens", MicroBatching(max_tokens=20), order=_SHUFFLES[1])]
        cuts += [Cut(OUTSIDE, f"{value}", garbage=value) for value in (_INF, -_INF, 1e30, -1.0)]
        cuts += [
            Cut(
                OUTSIDE,
                "nan, everything at once",
                MicroBatching(size=3),
                packed=False,
                left=2,
                right=3,
                order=_SHUFFLES[2],
                garbage=_NAN,
            )
        ]
    return cuts


def rank_cuts(world: int, full: bool) -> list[Cut]:
    """Cuts over ``world`` ranks: even and uneven shares, a rank with a single row; sequences shared by ranks."""
    even = (ROWS // world,) * world
    uneven = (ROWS - world + 1, *(1,) * (world - 1))
    check = ranks_check(world)
    cuts = [Cut(check, "uneven, 2 rows, shuffled", MicroBatching(size=2), order=_SHUFFLES[0], spread=uneven)]
    cuts += [
        Cut(check, "sequences shared, 3 rows, shuffled", MicroBatching(size=3), order=_SHUFFLES[1], **shared)
        for shared in _sequence_shares(world)
    ]
    if full:
        cuts += [Cut(check, "sequences shared, nan", garbage=_NAN, **shared) for shared in _sequence_shares(world)]
        cuts += [
            Cut(check, "even", spread=even),
            Cut(check, "even, 1 row, nan", MicroBatching(size=1), garbage=_NAN, spread=even),
            Cut(check, "even, padded", packed=False, right=2, spread=even),
            Cut(check, "uneven, 20 tokens", MicroBatching(max_tokens=20), spread=uneven[::-1]),
            # the empty response, alone on the last rank: a rank without any token
            Cut(check, "a rank without tokens", order=(0, 1, 2, 3, 4, 5, 7, 6), spread=uneven),
        ]
    return cuts


def _sequence_shares(world: int) -> list[dict[str, Any]]:
    """All ranks share every sequence; with four also two data-parallel groups of two, uneven and with a tail."""
    shares: list[dict[str, Any]] = [{"sequence": world, "spread": (ROWS,)}]
    if world > 2:
        shares.append({"sequence": world // 2, "spread": (ROWS - 1, 1)})
    return shares


def ranks_check(world: int) -> str:
    """The column of the report for ``world`` ranks."""
    return f"{world} ranks"


def apply_cut(batch: Mapping[str, Any], cut: Cut) -> Fields:
    """The batch as ``cut`` presents it; ``batch`` itself is left alone."""
    fields = dict(batch)
    if cut.garbage is not None:
        fields = soil(fields, cut.garbage)
    if cut.left or cut.right:
        fields = {name: _widen(value, cut) for name, value in fields.items()}
        if cut.garbage is not None:
            fields = soil(fields, cut.garbage)
    if cut.order:
        fields = {name: value[_index(value, cut.order)] for name, value in fields.items()}
    return fields


def soil(batch: Mapping[str, Any], garbage: float) -> Fields:
    """Put ``garbage`` where a mask is 0: numbers in float fields, impossible tokens and positions in padding."""
    mask, present = batch["response_mask"] != 0, batch["attention_mask"] != 0
    width = mask.shape[1]
    out: Fields = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or name.endswith("mask"):
            continue
        if value.is_floating_point() and value.shape[:2] == mask.shape:
            keep = mask.reshape(*mask.shape, *(1,) * (value.dim() - 2))
            out[name] = torch.where(keep, value, garbage)
        elif value.shape == present.shape:
            out[name] = torch.where(present, value, _NOWHERE)
        elif name == "prompts":
            out[name] = torch.where(present[:, :-width], value, _NOWHERE)
        elif name == "responses":
            out[name] = torch.where(present[:, -width:], value, _NOWHERE)
    return out


def undo(value: Tensor, cut: Cut) -> Tensor:
    """A ``(B, R)`` result under ``cut`` with the rows and columns of the batch itself."""
    value = value[:, : value.shape[1] - cut.right]
    if not cut.order:
        return value
    restored = torch.empty_like(value)
    restored[torch.tensor(cut.order)] = value
    return restored


def _widen(value: Any, cut: Cut) -> Any:
    # The three widths differ, so a field's width tells what it is.
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    left = cut.left if value.shape[1] in (PROMPT_WIDTH, PROMPT_WIDTH + RESPONSE_WIDTH) else 0
    right = cut.right if value.shape[1] in (RESPONSE_WIDTH, PROMPT_WIDTH + RESPONSE_WIDTH) else 0
    return torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), left, right))


def _index(value: Any, order: tuple[int, ...]) -> Any:
    return torch.tensor(order) if isinstance(value, Tensor) else np.array(order)

"""Cutting a batch into micro-batches and joining what comes out; the same for every engine.

The one rule: no choice here changes a number beyond rounding. Losses divide by counts over the whole mini-batch
(:class:`~verl.workers.engine.base.GlobalBatchInfo`), results return in the order of the rows, metrics combine by
their own rule in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.data.images import IMAGE_FIELD
from verl.errors import ConfigError, DataError, SchemaError
from verl.models.packing import prompt_leaders, sharing_pays
from verl.utils.metrics import MetricSet
from verl.utils.seqlen_balancing import plan_micro_batches
from verl.workers.engine.base import GlobalBatchInfo, MicroBatching
from verl.workers.engine.images import NUMBER, has_images, with_images

#: ``meta_info`` of an update: rows of a mini-batch over all ranks, where trajectories have a varying number of rows
MINI_BATCH_ROWS = "mini_batch_rows"

REQUIRED_FIELDS = ("input_ids", "attention_mask", "position_ids", "response_mask")


@dataclass(frozen=True)
class BatchPlan:
    """Micro-batches of one rank.

    Attributes:
        parts: row numbers of each micro-batch. All ranks have the same number of parts; a part may be empty.
        info: counts over all ranks.
    """

    parts: list[list[int]]
    info: GlobalBatchInfo


def as_tensordict(batch: TensorDict | Mapping[str, Tensor], *, reads_images: bool = False) -> TensorDict:
    """The batch as a TensorDict, without copying.

    Args:
        batch: as engines get it. A mapping may hold ``multi_modal_inputs``, a list with each row's images, or None.
        reads_images: whether this engine can take images.

    Raises:
        SchemaError: a field that every engine reads is missing.
        ConfigError: there are images, and the engine takes none.
    """
    present = set(batch.keys())
    missing = [name for name in REQUIRED_FIELDS if name not in present]
    if missing:
        raise SchemaError(f"the batch lacks {missing}; it has {sorted(present)}")
    if not isinstance(batch, TensorDict):
        fields: dict[str, Any] = dict(batch)
        images = fields.pop(IMAGE_FIELD, None)
        batch = TensorDict(fields, batch_size=[fields["input_ids"].shape[0]])
        batch = batch if images is None else with_images(batch, images)
    if has_images(batch) and not reads_images:
        raise ConfigError("the batch has images, and this training engine reads text alone; set actor.strategy=fsdp2")
    return batch


def plan_batch(
    batch: TensorDict,
    micro: MicroBatching,
    *,
    share_prompts: bool = False,
    dp_size: int = 1,
    group: dist.ProcessGroup | None = None,
) -> BatchPlan:
    """Decide the micro-batches and count the mini-batch, in one collective.

    Args:
        batch: this rank's rows.
        micro: the rule.
        share_prompts: rows with equal prompts will share its tokens: keep them in one micro-batch if it holds them,
            and count the prompt once.
        dp_size: number of data-parallel ranks.
        group: their process group; not used when ``dp_size`` is 1.

    Raises:
        DataError: a row has more tokens than ``micro.max_tokens``. Raised on every rank, so that none waits.
        SchemaError: the rows are no whole number of units.
    """
    response_mask = batch["response_mask"] != 0
    rows = int(response_mask.shape[0])
    if rows % micro.unit:
        raise SchemaError(f"{rows} rows are no whole number of units of {micro.unit} rows")
    tokens = int(response_mask.sum())
    active = int(response_mask.any(-1).sum()) if rows else 0
    parts: list[list[int]] = []
    problem = ""
    if micro.max_tokens is not None:
        lengths = (batch["attention_mask"] != 0).sum(-1).tolist()
        try:
            if micro.unit > 1:
                parts = _plan_units(lengths, micro.max_tokens, micro.unit)
            else:
                parts = _plan_tokens(batch, lengths, micro.max_tokens, share_prompts)
        except ValueError as error:
            problem = str(error)
    else:
        size = micro.size or max(rows, 1)
        parts = [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]
    count = len(parts)
    if dp_size > 1:
        mine = torch.tensor([tokens, active, count, int(bool(problem))], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(dp_size)]
        dist.all_gather(everyone, mine, group=group)
        numbers = torch.stack(everyone).tolist()
        tokens, active = sum(n[0] for n in numbers), sum(n[1] for n in numbers)
        wanted = max(n[2] for n in numbers)
        if any(n[3] for n in numbers) and not problem:
            problem = "another rank has a row with more tokens than one micro-batch may hold; see its error"
        # micro-batches that only other ranks need stay empty: cutting differently could break this rank's budget
        parts += [[] for _ in range(wanted - count)]
    if problem:
        raise DataError(problem)
    info = GlobalBatchInfo(dp_size=dp_size, batch_num_tokens=tokens, global_batch_size=active)
    return BatchPlan(parts or [[]], info)


def _plan_tokens(batch: TensorDict, lengths: list[int], max_tokens: int, share_prompts: bool) -> list[list[int]]:
    """Micro-batches of at most ``max_tokens`` tokens, near-equal in size."""
    if not share_prompts or len(lengths) < 2:
        return plan_micro_batches(lengths, max_tokens)
    prompt_width = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    ids, valid, positions = (
        batch[name][:, :prompt_width].cpu().numpy() for name in ("input_ids", "attention_mask", "position_ids")
    )
    valid = valid != 0
    images = batch[NUMBER].cpu().numpy() if has_images(batch) else None
    prompt_lengths = valid.sum(1).tolist()
    units: list[list[int]] = []
    costs: list[int] = []
    open_unit: dict[int, int] = {}  # first row of a prompt -> its unit that still takes rows
    for row, first in enumerate(prompt_leaders(ids, valid, positions, images).tolist()):
        unit = open_unit.get(first)
        extra = lengths[row] - prompt_lengths[row]
        if unit is not None and costs[unit] + extra <= max_tokens:
            units[unit].append(row)
            costs[unit] += extra
        else:
            open_unit[first] = len(units)
            units.append([row])
            costs.append(lengths[row])
    unit_lengths = [sum(lengths[row] for row in unit) for unit in units]
    plan = plan_micro_batches(costs, max_tokens)
    for part in plan:
        whole = sum(unit_lengths[unit] for unit in part)
        if whole > max_tokens and not sharing_pays(whole - sum(costs[unit] for unit in part), whole):
            return plan_micro_batches(lengths, max_tokens)  # this part would run unshared and burst the budget
    return [sorted(row for unit in part for row in units[unit]) for part in plan]


def _plan_units(lengths: list[int], max_tokens: int, unit: int) -> list[list[int]]:
    """The same for rows of which ``unit`` neighbours stay together; prompts that they share are not discounted."""
    costs = [sum(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
    return [[n * unit + k for n in part for k in range(unit)] for part in plan_micro_batches(costs, max_tokens)]


def take_rows(batch: TensorDict, part: list[int], rows: int) -> TensorDict:
    """The rows of one micro-batch; a view where they are consecutive."""
    if len(part) == rows and part == list(range(rows)):
        return batch
    if part and part[-1] - part[0] + 1 == len(part) and all(b - a == 1 for a, b in itertools.pairwise(part)):
        return batch[part[0] : part[-1] + 1]
    return batch[torch.tensor(part, dtype=torch.long)]


def join_rows(pieces: list[dict[str, Tensor]], parts: list[list[int]], rows: int) -> dict[str, Tensor]:
    """Put the results of micro-batches together in the order of the rows."""
    order = [row for part in parts for row in part]
    names = list(pieces[0])
    if len(pieces) == 1 and order == list(range(rows)):
        return pieces[0]
    joined: dict[str, Tensor] = {}
    for name in names:
        column = torch.cat([piece[name] for piece in pieces])
        if order != list(range(rows)):
            restored = torch.empty_like(column)
            restored[torch.tensor(order, device=column.device)] = column
            column = restored
        joined[name] = column
    return joined


def reduce_metrics(
    pieces: Iterable[MetricSet], *, dp_size: int = 1, group: dist.ProcessGroup | None = None
) -> MetricSet:
    """Combine micro-batches, then ranks in rank order; every rank returns the same numbers."""
    mine = MetricSet.merged(pieces)
    if dp_size == 1:
        return mine
    everyone: list[Any] = [None] * dp_size
    dist.all_gather_object(everyone, mine, group=group)
    return MetricSet.merged(everyone)

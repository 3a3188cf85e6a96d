"""Trajectories of several training rows.

Where a template or an agent rewrites the history of a conversation, what the model was shown is no longer one line of
tokens: the trajectory is *forked into rows*, each a prefix that the model has seen and what it wrote next. Up to the
scores a batch has one row for each trajectory, the last one, and a column with the earlier ones. Then
:func:`lay_out_rows` gives every row its own line in the batch:

* every sampled token is trained on once, in the row in which it was sampled (mask 1), wherever it is shown again;
* a trajectory is one member of its group with one score: advantages are computed on the trajectory, all rows joined in
  the order of time, and each row gets its part (:func:`compute_row_advantages`);
* a mini-batch has the rows of as many trajectories as without forks. Mini-batches are filled up to the same number of
  rows, which the data-parallel ranks share, with rows that have no token in the mask (:func:`arrange_rows`). They
  count nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.advantage import compute_advantage
from verl.trainer.ppo.fields import tensors_of
from verl.trajectories import Segment, collate, turn_ends
from verl.trajectories.batch import EARLIER_ROWS
from verl.utils.seqlen_balancing import arrange_mini_batches
from verl.workers.engine.batching import MINI_BATCH_ROWS

#: ``trajectory`` of rows that fill a mini-batch up
PADDING = -1


def has_rows(batch: DataProto) -> bool:
    """Whether trajectories of the batch have been laid out in rows."""
    return "trajectory" in tensors_of(batch)


def lay_out_rows(batch: DataProto) -> DataProto:
    """Give every row of every trajectory its own line.

    Args:
        batch: a scored batch with the column ``earlier_rows``; without it the batch is returned as it is.

    Returns:
        The rows of each trajectory next to each other in the order of time, with ``trajectory`` (M,) int64, the
        ``sample_index`` of its trajectory, and ``last_row`` (M,) bool. ``sample_index`` numbers the rows. Earlier rows
        have the columns of their trajectory, and of the scores those of their own turns.
    """
    if EARLIER_ROWS not in batch.non_tensor_batch:
        return batch
    earlier = batch.non_tensor_batch[EARLIER_ROWS]
    # a trajectory without a score, or that was given up, has nothing to train on
    trained = batch.batch["response_mask"].any(-1).tolist()
    owners: list[int] = []
    rows: list[Mapping[str, Any] | None] = []
    for owner in torch.argsort(batch.batch["sample_index"]).tolist():
        more = (earlier[owner] or ()) if trained[owner] else ()
        owners += [owner] * (len(more) + 1)
        rows += [*more, None]
    columns = [name for name in batch.non_tensor_batch if name != EARLIER_ROWS]
    out = batch.select(non_tensor_batch_keys=columns).select_idxs(owners)
    tensors = out.batch
    tensors["trajectory"] = tensors["sample_index"].clone()
    tensors["sample_index"] = torch.arange(len(out))
    tensors["last_row"] = torch.tensor([row is None for row in rows])
    held = torch.zeros(len(batch))  # scores of earlier turns, which wait on the last row
    places = [place for place, row in enumerate(rows) if row is not None]
    if places:
        _write_rows(tensors, places, [row for row in rows if row is not None])
    for place in places:
        held[owners[place]] += sum((rows[place] or {})["turn_scores"] or ())
    for place, (owner, row) in enumerate(zip(owners, rows, strict=True)):
        if row is None and held[owner]:
            column = turn_ends(tensors["response_mask"][place].tolist())[0]
            for name in _SCORES:
                if name in tensors:
                    tensors[name][place, column] -= held[owner]
    return out


#: tensors with scores of turns
_SCORES = ("token_level_scores", "turn_scores")


def _write_rows(tensors: Any, places: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the tokens of earlier rows, and the scores of their turns, into lines of the batch."""
    width = tensors["responses"].shape[1]
    segments = [
        Segment(
            row["prompt_ids"],
            row["response_ids"],
            row["response_mask"],
            row["response_logprobs"],
            row["token_versions"],
        )
        for row in rows
    ]
    values = collate(
        segments, prompt_length=tensors["input_ids"].shape[1] - width, response_length=width, pad_token_id=0
    )
    for name in ("policy_version", "overlong"):  # of the trajectory
        del values[name]
    scores = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        if row["turn_scores"]:
            scores[number, turn_ends(row["response_mask"])] = torch.tensor(row["turn_scores"])
    values |= dict.fromkeys(_SCORES, scores) | {"rm_scores": torch.zeros(len(rows), width)}
    lines = torch.tensor(places)
    for name, value in values.items():
        if name in tensors:
            tensors[name][lines] = value.to(tensors[name].dtype)


# ---- mini-batches ------------------------------------------------------------------------------------------------


def without_padding(batch: DataProto) -> DataProto:
    """The batch less the rows that fill mini-batches up."""
    if not has_rows(batch):
        return batch
    real = tensors_of(batch)["trajectory"] != PADDING
    return batch if real.all() else batch.select_idxs(real)


def arrange_rows(
    batch: DataProto,
    trajectories: int,
    dp_size: int,
    *,
    balance: bool = True,
    generator: torch.Generator | None = None,
) -> DataProto:
    """Order rows so that each global mini-batch has all rows of the same trajectories, whatever the number of ranks.

    Args:
        batch: rows, arranged before or not.
        trajectories: in a mini-batch.
        dp_size: data-parallel ranks.
        balance: even out the ranks' tokens.
        generator: draws which trajectories come together; None: in their own order.

    Returns:
        Mini-batches of the same number of rows, ``meta_info["mini_batch_rows"]``, a multiple of ``dp_size``.
    """
    batch = without_padding(batch)
    batch = batch.select_idxs(torch.argsort(batch.batch["sample_index"]))
    owners = batch.batch["trajectory"]
    members = list(dict.fromkeys(owners.tolist()))
    if generator is not None:
        members = [members[n] for n in torch.randperm(len(members), generator=generator).tolist()]
    lines: dict[int, list[int]] = {}
    for line, owner in enumerate(owners.tolist()):
        lines.setdefault(owner, []).append(line)
    groups = [
        [line for owner in members[begin : begin + trajectories] for line in lines[owner]]
        for begin in range(0, len(members), trajectories)
    ]
    size = -(-max(map(len, groups)) // dp_size) * dp_size
    lengths = batch.batch["attention_mask"].sum(-1)
    order: list[int] = []
    for group in groups:
        shortest = min(group, key=lambda line: int(lengths[line]))
        order += group + [shortest] * (size - len(group))
    places = torch.tensor(order)
    filled = batch.select_idxs(places)
    padding = torch.tensor([n % size >= len(groups[n // size]) for n in range(len(order))])
    _empty(filled, padding, len(batch))
    arranged = arrange_mini_batches(lengths[places].tolist(), size, dp_size, balance=balance)
    out = filled.select_idxs(torch.tensor(arranged))
    out.meta_info[MINI_BATCH_ROWS] = size
    return out


def _empty(batch: DataProto, padding: Tensor, rows: int) -> None:
    """Make lines rows that count nowhere, in place."""
    tensors = batch.batch
    count = int(padding.sum())
    tensors["trajectory"] = torch.where(padding, PADDING, tensors["trajectory"])
    tensors["last_row"] = tensors["last_row"] & ~padding
    tensors["response_mask"] = torch.where(padding[:, None], 0, tensors["response_mask"])
    tensors["sample_index"][padding] = torch.arange(rows, rows + count)
    if "uid" in batch.non_tensor_batch:
        for number, line in enumerate(padding.nonzero().flatten().tolist()):
            batch.non_tensor_batch["uid"][line] = f"padding-{number}"


# ---- advantages --------------------------------------------------------------------------------------------------


def compute_row_advantages(data: DataProto, config: Any = None, **kwargs: Any) -> DataProto:
    """:func:`~verl.trainer.ppo.advantage.compute_advantage` of whole trajectories; every row gets its part.

    The estimator sees one row for each trajectory: the responses of its rows joined in the order of time, with its
    group, its columns, and its score on the tokens that earned it. A row of padding gets zeros.

    Args:
        data: rows, arranged or not.
        config, kwargs: as for ``compute_advantage``.
    """
    tensors = tensors_of(data)
    sources, finals = _joined_places(data)
    joined = _join(data, sources, finals)
    result = tensors_of(compute_advantage(joined, config, **kwargs))
    inside = sources >= 0
    for name in ("advantages", "returns"):
        flat = torch.zeros(tensors["response_mask"].numel())
        flat[sources[inside]] = result[name][inside]
        tensors[name] = flat.reshape(tensors["response_mask"].shape)
    return data


def _joined_places(data: DataProto) -> tuple[Tensor, list[int]]:
    """Where each column of the trajectories' joined responses comes from, and the last row of each trajectory.

    Returns:
        ``(T, L)`` places in a flattened ``(M, R)`` tensor, -1 for none: behind a row's tokens is a gap, so that
        turns in different rows do not touch.
    """
    tensors = tensors_of(data)
    width = tensors["response_mask"].shape[1]
    lengths = tensors["attention_mask"][:, -width:].sum(-1).tolist()
    owners = tensors["trajectory"].tolist()
    lines: dict[int, list[int]] = {}
    for line in torch.argsort(tensors["sample_index"]).tolist():
        if owners[line] != PADDING:
            lines.setdefault(owners[line], []).append(line)
    total = max(sum(lengths[line] + 1 for line in own) for own in lines.values())
    sources = np.full((len(lines), total), -1, dtype=np.int64)
    for number, own in enumerate(lines.values()):
        begin = 0
        for line in own:
            end = begin + lengths[line]
            sources[number, begin:end] = np.arange(line * width, line * width + lengths[line])
            begin = end + 1
    return torch.from_numpy(sources), [own[-1] for own in lines.values()]


def _join(data: DataProto, sources: Tensor, finals: list[int]) -> DataProto:
    """One row for each trajectory; tensors that are neither of tokens of the response nor of rows are left out."""
    tensors = tensors_of(data)
    shape = tensors["response_mask"].shape
    inside = sources >= 0
    places = sources.clamp(min=0)
    joined: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if values.shape == shape:
            taken = values.reshape(-1)[places]
            joined[name] = torch.where(inside, taken, torch.zeros((), dtype=values.dtype))
        elif values.ndim == 1:
            joined[name] = values[torch.tensor(finals)]
    columns = {name: values[finals] for name, values in data.non_tensor_batch.items()}
    return DataProto.from_dict(joined, columns)

"""Trajectories that give several training rows: one for each player of an episode, for instance."""

from __future__ import annotations

import torch

from verl.agent_loop.batch import EARLIER_ROWS, MORE, PAD, Trajectory, batch_from_trajectories
from verl.data.collate import object_array
from verl.protocol import DataProto

#: column with the player whose row it is; the samples of a prompt are then compared player by player
PLAYER = "player"


def expand_rows(batch: DataProto) -> tuple[DataProto, list[tuple[int, int]] | None]:
    """Append the further rows of trajectories to a batch.

    A further row without tokens counts nowhere, like an aborted one, and is no failure.

    Args:
        batch: what :func:`~verl.agent_loop.batch.batch_from_trajectories` has made of all rows.

    Returns:
        The batch, and for each of its rows the number of the row that it comes from and its place among those of the
        trajectory (None: there are no further rows).
    """
    if MORE not in batch.non_tensor_batch:
        return batch, None
    further = list(batch.non_tensor_batch.pop(MORE))
    pad = batch.meta_info.pop(PAD)
    if not any(further):
        return batch, None
    outputs = [output for outputs in further for output in outputs]
    added = batch_from_trajectories(
        [Trajectory(output, aborted=None if output.response_ids else "silent") for output in outputs],
        prompt_length=batch.batch["prompts"].shape[1],
        response_length=batch.batch["responses"].shape[1],
        pad_token_id=pad,
        forks=EARLIER_ROWS in batch.non_tensor_batch,
    )
    added.non_tensor_batch.pop(MORE)
    added.meta_info = dict(batch.meta_info)
    origin = [(row, 0) for row in range(len(batch))]
    origin += [(row, place) for row, outputs in enumerate(further) for place in range(1, len(outputs) + 1)]
    return DataProto.concat([batch, added]), origin


def in_groups(rows: DataProto, responses: DataProto, origin: list[tuple[int, int]]) -> DataProto:
    """Join expanded responses to the rows that they come from.

    The samples of a prompt are compared player by player: the ``uid`` gets the player's name, and rows with the same
    one are put next to each other. Rows without a player are told apart by their place in the trajectory.

    Args:
        rows: one for each trajectory, with ``uid`` and ``sample_index``.
        responses: of :func:`expand_rows`.
        origin: of :func:`expand_rows`.
    """
    whole = rows.select_idxs(torch.tensor([row for row, _ in origin])).union(responses)
    players = whole.non_tensor_batch.get(PLAYER, [None] * len(whole))
    uids = [
        f"{uid}/{player}" if player is not None else f"{uid}/{place}" if place else uid
        for uid, player, (_, place) in zip(whole.non_tensor_batch["uid"], players, origin, strict=True)
    ]
    whole.non_tensor_batch["uid"] = object_array(uids)
    first: dict[str, int] = {}  # uid -> the row of its prompt's first sample
    for uid, (row, _) in zip(uids, origin, strict=True):
        first.setdefault(uid, row)
    order = sorted(range(len(uids)), key=lambda number: (first[uids[number]], uids[number], origin[number]))
    whole = whole.select_idxs(torch.tensor(order))
    whole.batch["sample_index"] = int(rows.batch["sample_index"].min()) + torch.arange(len(whole))
    return whole

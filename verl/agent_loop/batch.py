"""What agent loops are asked to do: from a batch of the controller to the rows that they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from verl.agent_loop.partial_rollouts import RecordedCompletion
from verl.protocol import DataProto
from verl.trajectories.batch import ROW_FIELDS
from verl.workers.rollout.batch import requests_from_batch

if TYPE_CHECKING:
    from verl.config import RolloutConfig

#: column of a batch whose generation may be cut off. On the way to the loops: what a row's trajectory has said in
#: earlier steps (plain recorded completions), or ENDED, or None. On the way back: the same of those that were stopped.
CARRIED = "carried"
ENDED = "ended"
#: meta_info key with the arguments of a cut-off: ``groups`` in the batch, ``keep`` of them, ``group_size`` in rows
CUT_OFF = "cut_off"


@dataclass(frozen=True)
class Row:
    """What an agent loop is asked to do.

    Attributes:
        session: name of the trajectory, unique in the step.
        sampling_params: how tokens are chosen.
        fields: keyword arguments of the loop.
        recorded: what the model has said in earlier steps.
        ended: an earlier step has the result already, nothing is to be done.
    """

    session: str
    sampling_params: dict[str, Any]
    fields: dict[str, Any]
    recorded: tuple[RecordedCompletion, ...] = ()
    ended: bool = False


def rows_from_batch(batch: DataProto, config: RolloutConfig, *, seed: int, step: int, validate: bool) -> list[Row]:
    """One row for each sample; seeds are those of generation without agent loops."""
    requests = requests_from_batch(batch, config, seed=seed, step=step, validate=validate)
    columns = {name: batch.non_tensor_batch[name] for name in ROW_FIELDS if name in batch.non_tensor_batch}
    indices = batch.batch["sample_index"].tolist() if "sample_index" in batch.batch else range(len(requests))
    carried = batch.non_tensor_batch.get(CARRIED, [None] * len(requests))
    rows = []
    for number, (request, index) in enumerate(zip(requests, indices, strict=True)):
        fields = {name: values[number] for name, values in columns.items()}
        fields |= {"raw_prompt_ids": request.prompt_ids, "sample_index": index, "images": request.images}
        kept = carried[number]
        ended = isinstance(kept, str) and kept == ENDED
        recorded = () if ended or kept is None else tuple(map(RecordedCompletion.from_plain, kept))
        rows.append(Row(request.request_id, asdict(request.sampling), fields, recorded, ended))
    return rows

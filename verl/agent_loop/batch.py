"""Between a batch of the controller and the trajectories of agent loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.partial_rollouts import RecordedCompletion
from verl.data.collate import object_array
from verl.data.images import IMAGE_FIELD
from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.rewards.manager import OUTCOME_FIELD
from verl.rewards.outcome import RewardOutcome
from verl.schema import AGENT_EXTRA, AGENT_MORE, FIELDS, MORE_IMAGES, reserved_for
from verl.workers.rollout.batch import position_ids_from_mask, requests_from_batch

if TYPE_CHECKING:
    from verl.config import RolloutConfig

#: batch columns passed to the agent loop, if present
ROW_FIELDS = (
    "raw_prompt",
    "agent_name",
    "tools_kwargs",
    "interaction_kwargs",
    "extra_info",
    "reward_model",
    "data_source",
    "index",
    "uid",
)


#: columns that agent loops fill with extra fields
_FROM_LOOPS = frozenset({MORE_IMAGES, *(name for name, field in FIELDS.items() if field.made_by == "agent loop")})
_LIMIT = "agent_max_failed_fraction"
#: column with the further rows of trajectories, and the entry with the token that pads them
MORE, PAD = AGENT_MORE, "agent_pad_token_id"

#: column of a batch with the earlier rows of each trajectory, as plain values; None where there are none
EARLIER_ROWS = "earlier_rows"
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


@dataclass(frozen=True)
class Trajectory:
    """How a row ended.

    Attributes:
        output: the training row; empty for an aborted one.
        info: numbers for metrics, see :meth:`verl.agent_loop.trace.Trace.summary`.
        aborted: why there is no result; None if there is one.
        more: its further training rows.
        unfinished: of one that was stopped, what the model has said so far; else None.
    """

    output: AgentLoopOutput
    info: dict[str, Any] = field(default_factory=dict)
    aborted: str | None = None
    more: Sequence[AgentLoopOutput] = ()
    unfinished: Sequence[RecordedCompletion] | None = None


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


def batch_from_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    max_failed_fraction: float = 1.0,
    cut_off: bool = False,
    forks: bool = False,
) -> DataProto:
    """The rollout's fields of the schema, and what agent loops add.

    Args:
        trajectories: in the order of the rows.
        prompt_length: P; prompts are padded on the left.
        response_length: R; responses are padded on the right.
        pad_token_id: fills both.
        max_failed_fraction: part of the whole batch that may be aborted, for :func:`expand_extra`.
        cut_off: some may have been stopped: adds ``unfinished`` (B,) bool and the column :data:`CARRIED`.
        forks: trajectories may have several rows: the last one is the trajectory's in the batch, and the column
            :data:`EARLIER_ROWS` has the others.

    Returns:
        Besides the fields of :func:`verl.workers.rollout.batch.batch_from_completions`: ``aborted`` (B,) bool,
        ``token_versions`` (B,R) int32 and the columns ``__num_turns__``, ``tool_call_counts``, ``agent_info`` and
        ``agent_extra``, which :func:`expand_extra` turns into fields of the whole batch. Further rows of trajectories
        wait in a column for :func:`~verl.agent_loop.rows.expand_rows`.

    Raises:
        DataError: a row does not fit.
    """
    outputs = [trajectory.output for trajectory in trajectories]
    size = len(outputs)
    prompts = _padded([output.prompt_ids for output in outputs], prompt_length, pad_token_id, "prompt", left=True)
    responses = _padded([output.response_ids for output in outputs], response_length, pad_token_id, "response")
    masks = _padded([output.response_mask for output in outputs], response_length, 0, "response")
    log_probs = np.zeros((size, response_length), np.float32)
    versions = np.full((size, response_length), -1, np.int32)
    attention = np.zeros((size, prompt_length + response_length), np.int64)
    for row, output in enumerate(outputs):
        given = output.response_logprobs
        log_probs[row, : len(output.response_ids)] = 0.0 if given is None else given
        oldest = -1 if output.policy_versions is None else output.policy_versions[0]
        versions[row, : len(output.response_ids)] = oldest if output.token_versions is None else output.token_versions
        attention[row, prompt_length - len(output.prompt_ids) : prompt_length + len(output.response_ids)] = 1
    sampled = torch.from_numpy(masks)
    attention_mask = torch.from_numpy(attention)
    tensors = {
        "prompts": torch.from_numpy(prompts),
        "responses": torch.from_numpy(responses),
        "input_ids": torch.from_numpy(np.concatenate([prompts, responses], axis=1)),
        "attention_mask": attention_mask,
        "position_ids": position_ids_from_mask(attention_mask),
        "response_mask": sampled,
        "rollout_log_probs": torch.where(sampled.bool(), torch.from_numpy(log_probs), 0.0),
        "policy_version": torch.tensor([_version_range(output) for output in outputs], dtype=torch.int32).reshape(
            size, 2
        ),
        "token_versions": torch.where(sampled.bool(), torch.from_numpy(versions), -1),
        "overlong": torch.tensor([_is_overlong(output, response_length) for output in outputs], dtype=torch.bool),
        "aborted": torch.tensor([trajectory.aborted is not None for trajectory in trajectories], dtype=torch.bool),
    }
    arrays: dict[str, np.ndarray] = {
        "__num_turns__": object_array([output.num_turns for output in outputs]),
        "tool_call_counts": object_array([_calls(trajectory.info) for trajectory in trajectories]),
        "agent_info": object_array([trajectory.info for trajectory in trajectories]),
        AGENT_EXTRA: object_array([(output.reward_score, _extra(output)) for output in outputs]),
        MORE: object_array([list(trajectory.more) for trajectory in trajectories]),
    }
    if forks:
        arrays[EARLIER_ROWS] = object_array([_earlier(output, prompt_length, response_length) for output in outputs])
    if cut_off:
        stopped = [trajectory.unfinished for trajectory in trajectories]
        tensors["unfinished"] = torch.tensor([recorded is not None for recorded in stopped], dtype=torch.bool)
        plain = [None if recorded is None else [done.to_plain() for done in recorded] for recorded in stopped]
        arrays[CARRIED] = object_array(plain)
    return DataProto.from_dict(
        tensors=tensors, non_tensors=arrays, meta_info={_LIMIT: max_failed_fraction, PAD: pad_token_id}
    )


def _extra(output: AgentLoopOutput) -> dict[str, Any]:
    """The extra fields, with the images that came behind the prompt's."""
    images = output.images
    if images is None:
        return output.extra_fields
    assert images.starts is not None
    count = sum(at < len(output.prompt_ids) for at in images.starts)
    if count == len(images.keys):
        return output.extra_fields
    more = images.behind(count)
    shown = {"pixel_values": more.pixel_values, "image_grid_thw": more.grid_thw, "image_starts": list(images.starts)}
    return {**output.extra_fields, MORE_IMAGES: shown}


def with_more_images(batch: DataProto) -> DataProto:
    """Add the images that trajectories were shown behind their prompts to ``multi_modal_inputs``, in place.

    The patches of a prompt stay the tensor that all its samples share.
    """
    if MORE_IMAGES not in batch.non_tensor_batch:
        return batch
    further = list(batch.non_tensor_batch.pop(MORE_IMAGES))
    column = list(batch.non_tensor_batch.get(IMAGE_FIELD, [None] * len(further)))
    for row, more in enumerate(further):
        if more is not None:
            before = [] if column[row] is None else [column[row]]
            column[row] = {
                "pixel_values": [one["pixel_values"] for one in (*before, more)],
                "image_grid_thw": torch.cat([one["image_grid_thw"] for one in (*before, more)]),
                "image_starts": more["image_starts"],
            }
    batch.non_tensor_batch[IMAGE_FIELD] = object_array(column)
    return batch


def _is_overlong(output: AgentLoopOutput, response_length: int) -> bool:
    return len(output.response_ids) >= response_length if output.overlong is None else output.overlong


def _version_range(output: AgentLoopOutput) -> tuple[int, int]:
    """Oldest and newest weights that sampled a trajectory, with all its rows."""
    ranges = [row.policy_versions for row in (*output.earlier, output) if row.policy_versions is not None]
    known = [version for pair in ranges for version in pair if version >= 0]
    return (min(known), max(known)) if known else (-1, -1)


def empty_last_row(output: AgentLoopOutput) -> str | None:
    """What is wrong with a trajectory whose last row has no token of the model; None where there is one, or one row."""
    if not output.earlier or any(output.response_mask):
        return None
    return (
        f"an agent loop returned {len(output.earlier)} earlier rows and a last row in which the model says nothing (no "
        "1 in response_mask), so there is no place for the score; leave such a row out, as "
        "AgentLoopOutput.from_token_trajectory does"
    )


def _earlier(output: AgentLoopOutput, prompt_length: int, length: int) -> list[dict[str, Any]] | None:
    """The rows of a trajectory before its last one, with the scores of their turns.

    Raises:
        DataError: one is longer than ``prompt_length`` and ``length`` allow, or the model says nothing in the last row.
    """
    if problem := empty_last_row(output):
        raise DataError(problem)
    scores = output.extra_fields.get("turn_scores")
    rows = []
    begin = 0
    for row in output.earlier:
        for what, ids, width in (("prompt", row.prompt_ids, prompt_length), ("response", row.response_ids, length)):
            if len(ids) > width:
                raise DataError(_too_long(what, len(ids), width))
        end = begin + len(turn_ends(row.response_mask))
        rows.append(
            {
                "prompt_ids": row.prompt_ids,
                "response_ids": row.response_ids,
                "response_mask": row.response_mask,
                "response_logprobs": row.response_logprobs,
                "token_versions": row.token_versions,
                "turn_scores": None if scores is None else [float(score) for score in scores[begin:end]],
            }
        )
        begin = end
    return rows or None


def turn_ends(mask: Sequence[int]) -> list[int]:
    """The columns in which the model's turns end (runs of 1 in a response mask)."""
    return [column for column, (a, b) in enumerate(pairwise([*mask, 0])) if a and not b]


def expand_extra(batch: DataProto) -> DataProto:
    """Give what the agent loops of a whole batch returned its place among the fields, in place.

    Adds ``turn_scores`` (B,R) float32 where loops give them; where every finished row has a score of its own,
    ``rm_scores`` (B,R) float32, else the column ``score_outcome`` with the scores that there are; and a column for each
    extra field, None in rows that lack it. Which fields there are depends on all rows, so parts of a batch are joined
    first.

    Raises:
        RolloutError: every trajectory was aborted, or more than ``rollout.agent.max_failed_fraction``.
        DataError: an extra field has the name of another one, or a row has not one score for each turn.
    """
    if AGENT_EXTRA not in batch.non_tensor_batch:
        return batch
    rows = list(batch.non_tensor_batch.pop(AGENT_EXTRA))
    scores, extras = [score for score, _ in rows], [extra for _, extra in rows]
    stop_if_too_many_failed(list(batch.non_tensor_batch["agent_info"]), batch.meta_info.pop(_LIMIT, 1.0))
    aborted, mask = batch.batch["aborted"].tolist(), batch.batch["response_mask"]
    if any("turn_scores" in extra for extra in extras):
        batch.batch["turn_scores"] = _turn_scores(extras, mask, batch.non_tensor_batch.get(EARLIER_ROWS))
    finished = [score for score, gone in zip(scores, aborted, strict=True) if not gone]
    if finished and None not in finished:
        batch.batch["rm_scores"] = _on_last_token(scores, mask)
    else:
        outcomes = [_outcome(score, gone) for score, gone in zip(scores, aborted, strict=True)]
        batch.non_tensor_batch[OUTCOME_FIELD] = object_array(outcomes)
    names = dict.fromkeys(name for extra in extras for name in extra if name != "turn_scores")
    for name in names:
        taken = name in batch.non_tensor_batch or name in batch.batch or name in ROW_FIELDS
        if taken or (name not in _FROM_LOOPS and reserved_for(name)):
            raise DataError(
                f"an agent loop returns the extra field {name!r}, which the batch has already or will have; rename it"
            )
        batch.non_tensor_batch[name] = object_array([extra.get(name) for extra in extras])
    return batch


def stop_if_too_many_failed(infos: Sequence[Mapping[str, Any]], limit: float) -> None:
    """Raise :class:`RolloutError` when nothing is left of a batch, or more than ``limit`` of it was aborted."""
    infos = [info for info in infos if info]  # further rows of a trajectory have none
    failed = [info for info in infos if info["aborted"] is not None]
    if not failed or (len(failed) < len(infos) and len(failed) <= limit * len(infos)):
        return
    reasons = Counter(info["aborted"] for info in failed)
    raise RolloutError(
        f"{len(failed)} of {len(infos)} trajectories were aborted "
        f"({', '.join(f'{reason}: {count}' for reason, count in reasons.items())}); "
        f"rollout.agent.max_failed_fraction={limit:g}. The first one:\n{failed[0].get('error', '').rstrip()}"
    )


def _turn_scores(
    extras: Sequence[Mapping[str, Any]], mask: torch.Tensor, earlier: Sequence[Any] | np.ndarray | None
) -> torch.Tensor:
    """(B,R): the score of each turn of the model on its last token.

    Scores of turns in earlier rows are held on the end of the first turn of the row that is in the batch, until the
    trajectory is laid out in all its rows.
    """
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    for row, (extra, written) in enumerate(zip(extras, mask.tolist(), strict=True)):
        scores = extra.get("turn_scores")
        if scores is None:
            continue
        ends = turn_ends(written)
        rows_before = (None if earlier is None else earlier[row]) or ()
        turns_before = sum(len(turn_ends(one["response_mask"])) for one in rows_before)
        if len(scores) != len(ends) + turns_before:
            raise DataError(
                f"an agent loop gave {len(scores)} turn_scores for {len(ends) + turns_before} turns of the model (runs "
                "of 1 in response_mask)"
            )
        before = [score for one in rows_before for score in one["turn_scores"]]
        placed[row, ends] = torch.tensor(list(map(float, scores[len(before) :])))
        if before:
            placed[row, ends[0]] += sum(before)
    return placed


def _on_last_token(scores: Sequence[float | None], mask: torch.Tensor) -> torch.Tensor:
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    for row, (score, written) in enumerate(zip(scores, mask, strict=True)):
        places = written.nonzero()
        if score is not None and len(places):
            placed[row, places[-1]] = float(score)
    return placed


def _outcome(score: float | None, aborted: bool) -> RewardOutcome | None:
    """A score that is there already; an aborted row, which counts nowhere, needs no verdict of the reward function."""
    if aborted:
        return RewardOutcome.scored(0.0)
    return None if score is None else RewardOutcome.scored(float(score))


def _calls(info: Mapping[str, Any]) -> int:
    return sum(len(seconds) for seconds in info.get("tool_seconds", {}).values())


def _padded(lists: Sequence[Sequence[int]], width: int, fill: int, what: str, *, left: bool = False) -> np.ndarray:
    out = np.full((len(lists), width), fill, np.int64)
    for row, values in enumerate(lists):
        count = len(values)
        if count > width:
            raise DataError(_too_long(what, count, width))
        if count:
            out[row, width - count if left else 0 : width if left else count] = values
    return out


def _too_long(what: str, count: int, width: int) -> str:
    return f"an agent loop returned a {what} of {count} tokens, more than data.max_{what}_length={width}"

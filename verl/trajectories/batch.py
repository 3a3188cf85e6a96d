"""From the samples of a step to the batch of the controller, and the form in which samples travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.schema import FIELDS, IMAGE_FIELD, SAMPLES, SCORE_OUTCOME, reserved_for
from verl.trajectories.collate import check_lengths, collate
from verl.trajectories.types import Sample, Segment, Trajectory, turn_ends
from verl.utils.arrays import object_array

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
#: column with the player whose row it is; the samples of a prompt are then compared player by player
PLAYER = "player"
#: column of a batch with the earlier segments of each trajectory, as plain values; None where there are none
EARLIER_ROWS = "earlier_rows"

#: columns that agent loops fill
_FROM_LOOPS = frozenset(name for name, field in FIELDS.items() if field.made_by == "agent loop")
_LAYOUT = "layout"


@dataclass(frozen=True)
class Layout:
    """How samples become rows of a batch.

    Attributes:
        prompt_length: P; prompts are padded on the left.
        response_length: R; responses are padded on the right.
        pad_token_id: fills both.
        max_failed_fraction: part of the batch that may be aborted.
        forks: trajectories may have several segments: the last one is the trajectory's row in the batch, and the column
            :data:`EARLIER_ROWS` has the others.
    """

    prompt_length: int
    response_length: int
    pad_token_id: int
    max_failed_fraction: float = 1.0
    forks: bool = False


def to_envelope(samples: Sequence[Sample], layout: Layout) -> DataProto:
    """Samples on their way to the controller, one for each row of the request."""
    column = object_array([sample.to_plain() for sample in samples])
    return DataProto.from_dict(non_tensors={SAMPLES: column}, meta_info={_LAYOUT: layout})


def from_envelope(answers: DataProto) -> tuple[list[Sample], Layout]:
    """The samples of :func:`to_envelope`, from all workers."""
    return [Sample.from_plain(one) for one in answers.non_tensor_batch[SAMPLES]], answers.meta_info[_LAYOUT]


def has_samples(answers: DataProto) -> bool:
    """Whether workers sent samples, and not the padded fields of completions."""
    return SAMPLES in answers.non_tensor_batch


def join_samples(rows: DataProto, samples: Sequence[Sample], layout: Layout) -> DataProto:
    """The batch of a step: the rows of the request with what has become of them.

    Besides the fields of :func:`~verl.trajectories.collate.collate` it has ``aborted`` (B,) bool and the columns
    ``__num_turns__``, ``tool_call_counts``, ``agent_info`` and one for each extra field of the trajectories, None where
    one lacks it; ``turn_scores`` (B,R) float32 where there are any; and the scores of the trajectories: ``rm_scores``
    (B,R) float32 where every finished one has a score of its own, else the column ``score_outcome`` with those that
    there are.

    Samples of several players give a row for each, with the columns of the sample's row. The samples of a prompt are
    compared player by player: ``uid`` gets the player's name, and rows with the same one are neighbours. Rows without a
    player are told apart by their place in the sample.

    Args:
        rows: one for each sample, with ``uid`` and ``sample_index``.
        samples: in the order of the rows.
        layout: of the batch.

    Raises:
        RolloutError: every sample was aborted, or more than ``rollout.agent.max_failed_fraction``.
        DataError: a segment is too long, a column has the name of another one, or a trajectory has not one score for
            each turn.
    """
    stop_if_too_many_failed([sample.info for sample in samples], layout.max_failed_fraction)
    origin = [(number, 0) for number in range(len(samples))]
    origin += [(number, place) for number, sample in enumerate(samples) for place in range(1, len(sample.trajectories))]
    made = _fields_of([samples[number] for number, _ in origin], [place for _, place in origin], layout)
    trajectories = [samples[number].trajectories[place] for number, place in origin]
    several = len(origin) > len(samples)
    whole = (rows.select_idxs(torch.tensor([number for number, _ in origin])) if several else rows).union(made)
    _add_images(whole, trajectories)
    return _in_groups(whole, origin, int(rows.batch["sample_index"].min())) if several else whole


def _fields_of(samples: Sequence[Sample], places: Sequence[int], layout: Layout) -> DataProto:
    """What trajectories give, row by row: the ``places[i]``-th of ``samples[i]``."""
    trajectories = [sample.trajectories[place] for sample, place in zip(samples, places, strict=True)]
    # a further trajectory without tokens counts nowhere, like an aborted one, and is no failure
    aborted = [
        not one.last.response_ids if place else sample.aborted is not None
        for sample, place, one in zip(samples, places, trajectories, strict=True)
    ]
    infos = [{} if place else sample.info for sample, place in zip(samples, places, strict=True)]
    tensors = collate(
        [one.last for one in trajectories],
        prompt_length=layout.prompt_length,
        response_length=layout.response_length,
        pad_token_id=layout.pad_token_id,
    )
    ranges = [one.version_range() for one in trajectories]
    tensors["policy_version"] = torch.tensor(ranges, dtype=torch.int32).reshape(len(trajectories), 2)
    tensors["aborted"] = torch.tensor(aborted, dtype=torch.bool)
    columns = {
        "__num_turns__": object_array([one.num_turns for one in trajectories]),
        "tool_call_counts": object_array([_calls(info) for info in infos]),
        "agent_info": object_array(infos),
    }
    if layout.forks:
        columns[EARLIER_ROWS] = object_array([_earlier(one, layout) for one in trajectories])
    mask = tensors["response_mask"]
    if any(one.turn_scores is not None for one in trajectories):
        tensors["turn_scores"] = _turn_scores(trajectories, mask)
    scores = [one.score for one in trajectories]
    finished = [score for score, gone in zip(scores, aborted, strict=True) if not gone]
    if finished and None not in finished:
        tensors["rm_scores"] = _on_last_token(scores, mask)
    else:  # an aborted row counts nowhere and needs no verdict of the reward function
        columns[SCORE_OUTCOME] = object_array(
            [0.0 if gone else score for score, gone in zip(scores, aborted, strict=True)]
        )
    for name in dict.fromkeys(name for one in trajectories for name in one.columns):
        taken = name in columns or name in tensors or name in ROW_FIELDS
        if taken or (name not in _FROM_LOOPS and reserved_for(name)):
            raise DataError(
                f"an agent loop returns the extra field {name!r}, which the batch has already or will have; rename it"
            )
        columns[name] = object_array([one.columns.get(name) for one in trajectories])
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def _add_images(batch: DataProto, trajectories: Sequence[Trajectory]) -> None:
    """Add the images that trajectories were shown behind their prompts to ``multi_modal_inputs``, in place.

    The patches of a prompt stay the tensor that all its samples share.
    """
    if all(one.images is None for one in trajectories):
        return
    column = list(batch.non_tensor_batch.get(IMAGE_FIELD, [None] * len(trajectories)))
    for row, one in enumerate(trajectories):
        if one.images is not None:
            parts = [one.images] if column[row] is None else [column[row], one.images]
            column[row] = {
                "pixel_values": [part["pixel_values"] for part in parts],
                "image_grid_thw": torch.cat([part["image_grid_thw"] for part in parts]),
                "image_starts": one.images["image_starts"],
            }
    batch.non_tensor_batch[IMAGE_FIELD] = object_array(column)


def _in_groups(whole: DataProto, origin: Sequence[tuple[int, int]], first_index: int) -> DataProto:
    """Rows of several players: the samples of a prompt next to each other, player by player."""
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
    whole.batch["sample_index"] = first_index + torch.arange(len(whole))
    return whole


def stop_if_too_many_failed(infos: Sequence[Mapping[str, Any]], limit: float) -> None:
    """Raise :class:`RolloutError` when nothing is left of a batch, or more than ``limit`` of it was aborted."""
    infos = [info for info in infos if info]  # samples that have their result in another step have none
    failed = [info for info in infos if info["aborted"] is not None]
    if not failed or (len(failed) < len(infos) and len(failed) <= limit * len(infos)):
        return
    reasons = Counter(info["aborted"] for info in failed)
    raise RolloutError(
        f"{len(failed)} of {len(infos)} trajectories were aborted "
        f"({', '.join(f'{reason}: {count}' for reason, count in reasons.items())}); "
        f"rollout.agent.max_failed_fraction={limit:g}. The first one:\n{failed[0].get('error', '').rstrip()}"
    )


def empty_last_segment(segments: Sequence[Segment]) -> str | None:
    """What is wrong with a trajectory whose last segment has no token of the model; None if nothing is."""
    if len(segments) == 1 or any(segments[-1].sampled):
        return None
    return (
        f"an agent loop returned {len(segments) - 1} earlier rows and a last row in which the model says nothing (no "
        "1 in response_mask), so there is no place for the score; leave such a row out, as "
        "AgentLoopOutput.from_token_trajectory does"
    )


def _earlier(trajectory: Trajectory, layout: Layout) -> list[dict[str, Any]] | None:
    """The segments of a trajectory before its last one, in plain form with the scores of their turns.

    Raises:
        DataError: one is too long, or the model says nothing in the last one.
    """
    if problem := empty_last_segment(trajectory.segments):
        raise DataError(problem)
    earlier = trajectory.segments[:-1]
    check_lengths(earlier, layout.prompt_length, layout.response_length)
    rows = []
    begin = 0
    for one in earlier:
        end = begin + len(turn_ends(one.sampled))
        scores = trajectory.turn_scores
        rows.append(
            {
                "prompt_ids": list(one.prompt_ids),
                "response_ids": list(one.response_ids),
                "response_mask": list(one.sampled),
                "response_logprobs": one.log_probs,
                "token_versions": one.token_versions,
                "turn_scores": None if scores is None else [float(score) for score in scores[begin:end]],
            }
        )
        begin = end
    return rows or None


def _turn_scores(trajectories: Sequence[Trajectory], mask: torch.Tensor) -> torch.Tensor:
    """(B,R): the score of each turn of the model on its last token.

    Scores of turns in earlier segments are held on the end of the first turn of the row that is in the batch, until the
    trajectory is laid out in all its rows.
    """
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    for row, (one, written) in enumerate(zip(trajectories, mask.tolist(), strict=True)):
        if one.turn_scores is None:
            continue
        ends = turn_ends(written)
        before = sum(len(turn_ends(segment.sampled)) for segment in one.segments[:-1])
        if len(one.turn_scores) != len(ends) + before:
            raise DataError(
                f"an agent loop gave {len(one.turn_scores)} turn_scores for {len(ends) + before} turns of the model "
                "(runs of 1 in response_mask)"
            )
        scores = [float(score) for score in one.turn_scores]
        placed[row, ends] = torch.tensor(scores[before:])
        if before:
            placed[row, ends[0]] += sum(scores[:before])
    return placed


def _on_last_token(scores: Sequence[float | None], mask: torch.Tensor) -> torch.Tensor:
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    for row, (score, written) in enumerate(zip(scores, mask, strict=True)):
        places = written.nonzero()
        if score is not None and len(places):
            placed[row, places[-1]] = float(score)
    return placed


def _calls(info: Mapping[str, Any]) -> int:
    return sum(len(seconds) for seconds in info.get("tool_seconds", {}).values())

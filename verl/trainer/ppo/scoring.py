"""Scores of a batch: from the reward function to fields of the batch and rows that people can read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.data.collate import object_array
from verl.errors import RewardError, ScoreError
from verl.protocol import DataProto
from verl.rewards.outcome import as_number
from verl.schema import REPORTED_PREFIX
from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo.fields import stage_batch
from verl.trajectories import uncollate
from verl.utils.fs import atomic_write_text
from verl.utils.json_text import dumps_json
from verl.utils.telling import BOUNDARY

#: ``(batch, return_dict=True)`` -> what a reward manager returns
RewardFunction = Callable[..., Any]
Sample = dict[str, Any]

#: columns of the batch with what a reward function reports besides the score: ``reward_<name>``
PREFIX = REPORTED_PREFIX
#: columns with that prefix that come from the data or the source
_NOT_REPORTED = frozenset({"reward_model", "reward_baselines"})
_RESERVED = frozenset(name.removeprefix(PREFIX) for name in _NOT_REPORTED)
#: what a described sample says itself
_COLUMNS = frozenset({"uid", "input", "output", "gts", "score", "step"})


@dataclass(frozen=True)
class Scored:
    """What a reward function says of a batch.

    Attributes:
        scores: (B,R) float32, on the last sampled token.
        has_score: (B,) bool; False where the reward function abstained, so that the row must not count.
        extra: further values by name, (B,) object arrays.
        metrics: numbers to log.
    """

    scores: torch.Tensor
    has_score: torch.Tensor
    extra: dict[str, np.ndarray]
    metrics: dict[str, float]

    def sums(self) -> list[float]:
        """The score of each row; NaN where there is none."""
        return torch.where(self.has_score, self.scores.sum(-1), torch.nan).tolist()


class Scorer:
    """Judges responses: by the reward model if there is one, then by the reward function.

    Args:
        reward_fn: scores a batch.
        reward_model: worker group with ``compute_rm_score``.
    """

    def __init__(self, reward_fn: RewardFunction, reward_model: WorkerGroup | None = None) -> None:
        self.reward_fn = reward_fn
        self.reward_model = reward_model

    def judge(self, batch: DataProto) -> Scored:
        """Score every row once; of the batch only ``rm_scores`` is added.

        Scores of single turns, which agent loops give, are added. Aborted trajectories have no score.

        Raises:
            ScoreError: a score is no finite number, whoever made it.
        """
        if self.reward_model is not None:
            batch.union(self.reward_model.compute_rm_score(stage_batch(batch, "rm_score")))
            check_scores(batch, batch.batch["rm_scores"], "the reward model")
        scored = score_batch(self.reward_fn, batch)
        if "aborted" in batch.batch:
            scored = replace(scored, has_score=scored.has_score & ~batch.batch["aborted"])
        source = "the agent loop" if self.reward_model is None and "rm_scores" in batch.batch else _name(self.reward_fn)
        scored = replace(scored, scores=check_scores(batch, scored.scores, source, scored.has_score))
        if "turn_scores" in batch.batch:
            turns = check_scores(batch, batch.batch["turn_scores"], "the agent loop, in turn_scores,", scored.has_score)
            scored = replace(scored, scores=scored.scores + turns)
        return scored

    def __call__(self, batch: DataProto) -> dict[str, float]:
        """Score a training batch and add the result in place.

        Adds ``token_level_scores`` (B,R), ``has_score`` (B,) and ``reward_<name>`` for what else was reported. Rows
        without a score are taken out of losses and groups.

        Returns:
            Numbers to log.
        """
        result = self.judge(batch)
        batch.batch["token_level_scores"] = result.scores
        batch.batch["has_score"] = result.has_score
        taken = {name.removeprefix(PREFIX) for name in batch.non_tensor_batch if name.startswith(PREFIX)}
        for name, values in apart(result.extra, taken | _RESERVED).items():
            batch.non_tensor_batch[PREFIX + name] = values
        leave_out(batch, result.has_score)
        return result.metrics


def score_batch(reward_fn: RewardFunction, batch: DataProto) -> Scored:
    """Call the reward function; managers of users may return only the tensor."""
    result = reward_fn(batch, return_dict=True)
    if isinstance(result, torch.Tensor):
        result = {"reward_tensor": result}
    scores = result["reward_tensor"].float()
    extra = {}
    for name, values in result.get("reward_extra_info", {}).items():
        if len(values) == len(batch):
            extra[str(name)] = object_array(list(values))
        else:
            BOUNDARY.lose(
                "reported",
                f"the reward manager reports {len(values)} values of {str(name)!r} for {len(batch)} responses; "
                "they are left out",
                kind=str(name),
            )
    return Scored(
        scores=scores,
        has_score=result.get("sample_mask", torch.ones(len(batch), dtype=torch.bool)),
        extra=extra,
        metrics=dict(result.get("reward_metrics", {})),
    )


def apart(extra: Mapping[str, Any], taken: Set[str]) -> dict[str, Any]:
    """Reported values under names that are not taken: ``score`` becomes ``reported_score``, which is reported once."""
    names: dict[str, Any] = {}
    for name, values in extra.items():
        found = name
        while found in taken or (found != name and found in extra):
            found = f"reported_{found}"
        if found != name:
            BOUNDARY.lose(
                "reported",
                f"the reward function reports {name!r}, which has another meaning here; it is recorded as {found!r}",
                kind=name,
                count=0,
            )
        names[found] = values
    return names


def check_scores(
    batch: DataProto, scores: torch.Tensor, source: str, has_score: torch.Tensor | None = None
) -> torch.Tensor:
    """The last check of scores on their way into a batch, whatever made them.

    Args:
        batch: names the samples.
        scores: (B,R).
        source: what made them, for the message.
        has_score: (B,) bool, False for rows that do not count; not given = all count.

    Returns:
        The scores, with 0 for numbers that are not finite where nothing reads them: in rows that do not count and on
        tokens that the policy did not sample.

    Raises:
        ScoreError: a score that counts is no finite number.
    """
    finite = torch.isfinite(scores)
    if bool(finite.all()):
        return scores
    counts = batch.batch["response_mask"].bool() if "response_mask" in batch.batch else torch.ones_like(finite)
    if has_score is not None:
        counts = counts & has_score[:, None]
    wrong = torch.nonzero((counts & ~finite).any(-1)).flatten().tolist()
    if wrong:
        row = wrong[0]
        origin = batch.non_tensor_batch.get("data_source")
        value = scores[row][counts[row] & ~finite[row]][0].item()
        raise ScoreError(
            f"{source} gave the score {value} to {len(wrong)} of {len(scores)} samples; the first is sample {row}"
            + (f" with data_source={origin[row]!r}" if origin is not None else "")
            + ". A score must be a finite number: look at what makes it"
        )
    return torch.where(finite, scores, torch.zeros_like(scores))


def _name(reward_fn: RewardFunction) -> str:
    function = getattr(reward_fn, "compute_score", None)
    if function is not None:
        return f"the reward function {function!r}"
    return f"the reward manager {getattr(reward_fn, '__name__', type(reward_fn).__name__)}"


def leave_out(batch: DataProto, has_score: torch.Tensor) -> None:
    """Take rows without a score out of losses and group statistics, in place.

    Their tokens leave the response mask, and they leave their prompt's group: as a member they would count with
    score 0, a verdict that nobody gave.
    """
    for row in torch.nonzero(~has_score).flatten().tolist():
        batch.batch["response_mask"][row] = 0
        if "state_hashes" in batch.non_tensor_batch:  # one for each turn in the mask
            batch.non_tensor_batch["state_hashes"][row] = []
        batch.non_tensor_batch["uid"][row] += f"-without-score-{row}"


def reported(batch: DataProto) -> dict[str, np.ndarray]:
    """What the reward function reported of a scored batch, by name."""
    return {
        name.removeprefix(PREFIX): values
        for name, values in batch.non_tensor_batch.items()
        if name.startswith(PREFIX) and name not in _NOT_REPORTED
    }


def outcomes(batch: DataProto, metric: str | None = None) -> torch.Tensor:
    """The verdict on each response of a scored batch, before any shaping; NaN where there is none.

    Args:
        batch: a batch with scores.
        metric: a value that the reward function reports; ``seq_reward`` is the whole score. Default: ``acc``, the score
            before penalties, where it is reported, else the score.

    Returns:
        (B,) float64.

    Raises:
        RewardError: the reward function does not report the metric, or not as a number.
    """
    known = reported(batch)
    sums = batch.batch["token_level_scores"].double().sum(-1)
    has_score = batch.batch["has_score"]
    if metric is None and "acc" in known:
        # of several data sources some may report no acc: their score is the verdict
        given = [as_number(value) for value in known["acc"]]
        missing = [value is None or math.isnan(value) for value in given]
        values = torch.tensor([0.0 if value is None else value for value in given], dtype=torch.float64)
        values = torch.where(torch.tensor(missing), sums, values)
    elif metric in (None, "seq_reward"):
        values = sums
    elif metric in known:
        try:
            values = torch.tensor([float(value) for value in known[metric]], dtype=torch.float64)
        except (TypeError, ValueError):
            raise RewardError(
                f"the reward function reports {metric!r} as {known[metric][0]!r}; a number is needed here"
            ) from None
    else:
        raise RewardError(
            f"the reward function does not report {metric!r}; it reports {', '.join(sorted(known)) or 'nothing'}, "
            "and seq_reward is the whole score"
        )
    return torch.where(has_score, values, torch.nan)


def describe_samples(
    tokenizer: Any, batch: DataProto, scores: list[float], extra: Mapping[str, np.ndarray]
) -> list[Sample]:
    """Rows as readable dicts: input, output, ground truth, score and the reward function's extra values."""
    segments = uncollate(batch.batch)
    truths = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    # the score itself, which reward managers report among the extra values, is no second value
    extra = {name: values for name, values in extra.items() if name != "score" or not _same(values, scores)}
    extra = apart(extra, _COLUMNS)
    rows = []
    for i, score in enumerate(scores):
        truth = truths[i]
        row: Sample = {
            "uid": batch.non_tensor_batch["uid"][i],
            "input": tokenizer.decode(segments[i].prompt_ids),
            "output": tokenizer.decode(segments[i].response_ids),
            "gts": truth.get("ground_truth") if isinstance(truth, dict) else truth,
            "score": score,
        }
        row.update({name: values[i] for name, values in extra.items()})
        rows.append(row)
    return rows


def _same(values: Any, scores: list[float]) -> bool:
    """Whether reported values are the scores, in float32 as these are."""
    try:
        return bool(np.allclose(np.asarray(values, np.float32), np.asarray(scores, np.float32), equal_nan=True))
    except (TypeError, ValueError):
        return False


def dump_samples(directory: Path, step: int, samples: Iterable[Sample]) -> None:
    """Write samples as ``<directory>/<step>.jsonl``, one JSON object a line, all or nothing.

    Raises:
        OSError: the directory takes no file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(dumps_json({**sample, "step": step}, lost=_lost) + "\n" for sample in samples)
    atomic_write_text(directory / f"{step}.jsonl", lines)


def _lost(sentence: str) -> None:
    place, _, what = sentence.partition(": ")
    BOUNDARY.lose("samples", f"column {place!r} of the samples: {what}", kind=place)

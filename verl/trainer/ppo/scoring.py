"""Scores of a batch: from the reward function to fields of the batch and rows that people can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.fs import atomic_write_text

#: ``(batch, return_dict=True)`` -> what a reward manager returns
RewardFunction = Callable[..., Any]
Sample = dict[str, Any]


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
        sums = self.scores.sum(-1)
        return torch.where(self.has_score, sums, torch.nan).tolist()


def score_batch(reward_fn: RewardFunction, batch: DataProto) -> Scored:
    """Call the reward function; managers of users may return only the tensor."""
    result = reward_fn(batch, return_dict=True)
    if isinstance(result, torch.Tensor):
        result = {"reward_tensor": result}
    scores = result["reward_tensor"].float()
    extra = {}
    for name, values in result.get("reward_extra_info", {}).items():
        if len(values) == len(batch):
            extra[name] = np.empty(len(batch), dtype=object)
            extra[name][:] = list(values)
    return Scored(
        scores=scores,
        has_score=result.get("sample_mask", torch.ones(len(batch), dtype=torch.bool)),
        extra=extra,
        metrics=dict(result.get("reward_metrics", {})),
    )


def leave_out(batch: DataProto, has_score: torch.Tensor) -> None:
    """Take rows without a score out of losses and group statistics, in place.

    Their tokens leave the response mask, and they leave their prompt's group: as a member they would count with
    score 0, a verdict that nobody gave.
    """
    for row in torch.nonzero(~has_score).flatten().tolist():
        batch.batch["response_mask"][row] = 0
        batch.non_tensor_batch["uid"][row] += f"-without-score-{row}"


def describe_samples(tokenizer: Any, batch: DataProto, result: Scored) -> list[Sample]:
    """Rows as readable dicts: input, output, ground truth, score and the reward function's extra values."""
    responses = batch.batch["responses"]
    prompts = batch.batch["prompts"]
    prompt_mask = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    response_mask = batch.batch["attention_mask"][:, prompts.shape[1] :].bool()
    truths = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    rows = []
    for i, score in enumerate(result.sums()):
        truth = truths[i]
        row: Sample = {
            "uid": batch.non_tensor_batch["uid"][i],
            "input": tokenizer.decode(prompts[i][prompt_mask[i]].tolist()),
            "output": tokenizer.decode(responses[i][response_mask[i]].tolist()),
            "gts": truth.get("ground_truth") if isinstance(truth, dict) else truth,
            "score": score,
        }
        row.update({name: values[i] for name, values in result.extra.items() if name not in row})
        rows.append(row)
    return rows


def dump_samples(directory: Path | None, step: int, samples: list[Sample]) -> None:
    """Write samples as ``<directory>/<step>.jsonl``, one JSON object a line, all or nothing."""
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**sample, "step": step}, ensure_ascii=False, default=str) for sample in samples]
    atomic_write_text(directory / f"{step}.jsonl", "\n".join(lines) + "\n")

"""Where training batches come from.

A source owns the execution mode: when prompts are drawn, when responses are generated and when they are judged. The
trainer asks for the next scored batch and never learns how it was made. A source may wrap another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from verl.errors import CheckpointError, DataError
from verl.protocol import DataProto
from verl.trainer.ppo.placement import Rollout
from verl.trajectories.batch import from_envelope, has_samples, join_samples
from verl.utils.timing import StepTimer
from verl.workers.rollout.batch import pop_metrics

logger = logging.getLogger(__name__)

#: scores a batch in place and returns numbers to log
Score = Callable[[DataProto], dict[str, float]]


class Source(Protocol):
    """What the trainer needs of a source."""

    @property
    def epoch(self) -> int:
        """Epoch that the last batch came from, counted from 0."""

    #: fields of its batches besides those of generation and scoring
    fields: frozenset[str]

    def next_batch(self, step: int, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """A batch of prompts with scored responses for ``step`` (counted from 1), and numbers to log.

        Generation is timed as ``gen`` and scoring as ``reward``.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that decides which batches are still to come."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""


def with_samples(prompts: DataProto, n: int, uid_prefix: str) -> DataProto:
    """Repeat every prompt ``n`` times, the samples of a prompt next to each other.

    Adds ``uid``, the same for a prompt's samples, and ``sample_index``, the row's place in the whole batch:
    the seed of a sample derives from it, so a sample does not depend on which worker makes it.
    """
    prompts.non_tensor_batch["uid"] = np.array([f"{uid_prefix}-{i}" for i in range(len(prompts))], dtype=object)
    batch = prompts.repeat(n, interleave=True)
    batch.batch["sample_index"] = torch.arange(len(batch))
    return batch


def generate(
    rollout: Rollout,
    batch: DataProto,
    *,
    step: int,
    validate: bool,
    row_fields: Sequence[str] = (),
    metrics: dict[str, float] | None = None,
) -> DataProto:
    """Let the rollout workers answer every row and join the answers to the rows.

    Rows with ``greedy`` (B,) get the most probable tokens instead of samples.

    Where an agent loop gives several rows for one, the result has them all: each with the columns of its row and the
    ``uid`` of its player, the rows of a player next to each other.

    Args:
        row_fields: columns that the workers are given, as far as the batch has them; agent loops read some.
        metrics: gets what the rollout counted.
    """
    fields = [name for name in ("input_ids", "attention_mask", "sample_index", "greedy") if name in batch.batch]
    columns = [name for name in row_fields if name in batch.non_tensor_batch]
    request = batch.select(batch_keys=fields, non_tensor_batch_keys=columns, meta_info_keys=[])
    request.meta_info.update(step=step, validate=validate)
    answers = rollout.generate_sequences(request)
    counted = pop_metrics(answers)
    if metrics is not None:
        metrics.update(counted)
    rows = batch.select(batch_keys=["sample_index"])  # the prompt-only forms are superseded by the whole sequences
    return join_samples(rows, *from_envelope(answers)) if has_samples(answers) else rows.union(answers)


class SyncSource:
    """Generate and score when asked: every batch is sampled from the newest weights.

    It may be asked several times in a step; each time it draws further prompts and other random numbers.

    Args:
        dataloader: yields dicts of prompts and remembers its position.
        rollout: has ``generate_sequences``.
        n: samples per prompt.
        score: scores a batch in place.
        greedy_baselines: answer every prompt once more with the most probable tokens, in the same generation phase, and
            add that answer's score to the prompt's samples as ``reward_baselines`` (B,).
        row_fields: columns that the rollout reads.
    """

    def __init__(
        self,
        dataloader: Any,
        rollout: Rollout,
        n: int,
        score: Score,
        *,
        greedy_baselines: bool = False,
        row_fields: Sequence[str] = (),
    ) -> None:
        self.dataloader = dataloader
        self.rollout = rollout
        self.n = n
        self.score = score
        self.greedy_baselines = greedy_baselines
        self.row_fields = row_fields
        self.fields = frozenset({"reward_baselines"} if greedy_baselines else ())
        self.epoch = 0
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._step = 0
        self._calls = 0  # batches of the current step so far

    def next_batch(self, step: int, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """Draw prompts, starting the next epoch when this one is used up; generate and score their responses."""
        prefix = self._count_call(step)
        with timer("gen"):
            self.epoch = self.dataloader.epoch
            prompts = DataProto.from_single_dict(self._next_rows())
            batch = with_samples(prompts, self.n, uid_prefix=prefix)
            samples = len(batch)
            if self.greedy_baselines:
                batch = _with_greedy(batch, prompts)
            batch.batch["sample_index"] += self._calls * samples
            counted: dict[str, float] = {}
            batch = generate(
                self.rollout, batch, step=step, validate=False, row_fields=self.row_fields, metrics=counted
            )
        with timer("reward"):
            metrics = counted | self.score(batch)
            if self.greedy_baselines:
                batch = _with_baselines(batch, samples, self.n)
        return batch, metrics

    def _count_call(self, step: int) -> str:
        """Count a batch of the step; returns what the names of its groups begin with."""
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        return f"{step}.{self._calls}" if self._calls else f"{step}"

    def _next_rows(self) -> dict[str, Any]:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.dataloader)
            if (rows := next(self._iterator, None)) is not None:
                return rows
            self._iterator = None
        raise DataError("the training data gives no batch")

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position in it."""
        return dict(self.dataloader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved epoch and position.

        Raises:
            CheckpointError: dynamic sampling or over-sampling had kept samples for later, which this source cannot use.
        """
        self.dataloader.load_state_dict(_without_carried(without_surplus(state)))
        self._iterator = None


def without_surplus(state: dict[str, Any]) -> dict[str, Any]:
    """The state of what dynamic sampling filtered, for a run that does not filter.

    Raises:
        CheckpointError: there are groups that wait for the next step.
    """
    if "surplus" not in state:
        return state
    if state["surplus"] is not None:
        raise CheckpointError(
            f"the checkpoint keeps {_count(state['surplus'])} samples for the next step, as dynamic sampling does, and "
            "this run has algorithm.filter_groups.enable=False. Either resume with "
            "algorithm.filter_groups.enable=True, as it was, or start a new run (trainer.resume_mode=disable) from the "
            "checkpoint's weights, which `verl merge` turns into a model for model.path"
        )
    return dict(state["source"])


def _without_carried(state: dict[str, Any]) -> dict[str, Any]:
    """The place in the data, from the state of a source with over-sampling too if it carries no samples."""
    if "loader" not in state:
        return state
    if state["rows"] is not None:
        raise CheckpointError(
            f"the checkpoint carries {_count(state['rows'])} unfinished samples to the next step, as "
            "actor_rollout_ref.rollout.partial_rollout=True does, and this run has "
            "actor_rollout_ref.rollout.over_sample_rate=0. Either resume with over_sample_rate and partial_rollout as "
            "they were, or use the samples up first: resume for one step that is saved, with over_sample_rate as it "
            "was and partial_rollout=False; its checkpoint carries none and goes on with either setting"
        )
    if state["prompts"] is not None:
        count = _count(state["prompts"])
        logger.warning("%d prompts that over-sampling had drawn and not begun are left out in this epoch", count)
    return dict(state["loader"])


def _count(plain: dict[str, Any]) -> int:
    """Rows of a batch that was saved in plain form."""
    return len(next(iter(plain["tensors"].values())))


def _with_greedy(batch: DataProto, prompts: DataProto) -> DataProto:
    """Append every prompt once more, to be answered greedily."""
    batch.batch["greedy"] = torch.zeros(len(batch), dtype=torch.bool)
    prompts.batch["greedy"] = torch.ones(len(prompts), dtype=torch.bool)
    prompts.batch["sample_index"] = torch.arange(len(batch), len(batch) + len(prompts))
    return DataProto.concat([batch, prompts])


def _with_baselines(batch: DataProto, samples: int, n: int) -> DataProto:
    """Give the samples the score of their prompt's greedy answer, the rows from ``samples`` on.

    A greedy answer without a score is no baseline; its prompt's samples are then left out.
    """
    kept, greedy = batch.slice(0, samples), batch.slice(samples)
    scores = greedy.batch["token_level_scores"].sum(-1)
    kept.batch["reward_baselines"] = scores.repeat_interleave(n).float()
    has_baseline = greedy.batch["has_score"].repeat_interleave(n)
    kept.batch["has_score"] = kept.batch["has_score"] & has_baseline
    kept.batch["response_mask"] = torch.where(has_baseline[:, None], kept.batch["response_mask"], 0)
    return kept


class NoSource:
    """The source of a run that only validates: it has no batches and nothing to remember."""

    epoch = 0
    fields: frozenset[str] = frozenset()

    def next_batch(self, step: int, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """Refuse: there is no training data."""
        raise DataError("this run only validates (trainer.val_only=True) and has no training data")

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The place in the training data, which a validation does not need."""


def steps_in_run(batches_per_epoch: int, total_epochs: int, total_training_steps: int | None) -> int:
    """Number of steps of a run: the given total, otherwise whole epochs."""
    return total_training_steps or batches_per_epoch * total_epochs

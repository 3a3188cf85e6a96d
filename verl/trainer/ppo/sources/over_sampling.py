"""More prompts than a step needs, so that no step waits for the longest answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.agent_loop.batch import CARRIED, CUT_OFF, ENDED
from verl.errors import CheckpointError, RolloutError
from verl.protocol import DataProto
from verl.trainer.ppo.placement import Rollout
from verl.trainer.ppo.sources.base import Score, SyncSource, with_samples, without_surplus
from verl.trainer.ppo.sources.kept_batches import from_plain, join, plain_value, to_plain
from verl.trajectories import Sample
from verl.trajectories.batch import Layout, from_envelope, join_samples
from verl.utils.arrays import object_array
from verl.utils.timing import StepTimer
from verl.workers.rollout.batch import pop_metrics

_KEPT = "the trajectories carried to the next step"
_INSTEAD = "set actor_rollout_ref.rollout.partial_rollout=False"


class OverSamplingSource(SyncSource):
    """Has more groups in progress than a step takes, and ends generation when enough of them are complete.

    A group is all samples of one prompt. What the others have by then is dropped, or *carried*: in the next step they
    go on where they are, with the weights that there are then (partial rollouts, as in Kimi k1.5, arXiv:2501.12599).
    A sample's tokens, log-probabilities and the versions of the weights that gave them stay as they are, and its random
    numbers are those of the step that began it. Groups that have been carried ``max_staleness`` times are waited for.

    The oldest complete groups are taken first. Dropping favours short answers; carrying delays long ones.

    Args:
        dataloader, rollout, n, score, row_fields: as for :class:`SyncSource`; ``rollout`` runs agent loops.
        groups: groups per batch.
        in_progress: groups at the beginning of a generation phase, those that were carried included.
        carry: keep what is unfinished; False drops it.
        max_staleness: how often a group may be carried.
        parts: processes that share the groups; carried ones are spread over them.
    """

    def __init__(
        self,
        dataloader: Any,
        rollout: Rollout,
        n: int,
        score: Score,
        *,
        groups: int,
        in_progress: int,
        carry: bool = False,
        max_staleness: int = 1,
        parts: int = 1,
        row_fields: Sequence[str] = (),
    ) -> None:
        super().__init__(dataloader, rollout, n, score, row_fields=row_fields)
        self.groups = groups
        self.in_progress = in_progress
        self.carry = carry
        self.max_staleness = max_staleness
        self.parts = parts
        self._prompts: DataProto | None = None  # drawn, but not begun
        self._rows: DataProto | None = None  # what the samples in progress were asked, the oldest first
        self._samples: list[Sample] = []  # how far they are, row by row
        self._begun = 0  # samples begun in the current step

    def next_batch(self, step: int, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """Begin new groups, go on with the carried ones, and score the ``groups`` that are complete first.

        Returns:
            The batch and, besides the numbers of scoring, ``over_sampling/started`` groups, and of the groups that are
            not in the batch ``over_sampling/stopped`` samples that were cut off, ``over_sampling/dropped`` and
            ``over_sampling/carried`` samples, and ``over_sampling/carried_tokens`` sampled so far.
        """
        self._begun = self._begun if step == self._step else 0
        prefix = self._count_call(step)
        with timer("gen"):
            started = self._begin(step, prefix)
            rows, samples, layout, counted = self._generate(step)
            batch, numbers = self._take(step, rows, samples, layout)
        with timer("reward"):
            metrics = self.score(batch)
        return batch, metrics | counted | {"over_sampling/started": float(started)} | numbers

    def _begin(self, step: int, prefix: str) -> int:
        """Add groups until there are ``in_progress``; returns how many are new."""
        missing = self.in_progress - (0 if self._rows is None else len(self._rows) // self.n)
        if missing <= 0:
            return 0
        drawn = [] if self._prompts is None else [self._prompts]
        while sum(map(len, drawn)) < missing:
            self.epoch = self.dataloader.epoch
            drawn.append(DataProto.from_single_dict(self._next_rows()))
        prompts = join(drawn)
        rest = prompts.slice(missing)
        self._prompts = rest if len(rest) else None
        rows = with_samples(prompts.slice(0, missing), self.n, uid_prefix=prefix)
        rows.batch["sample_index"] += self._begun
        rows.batch["born_step"] = torch.full((len(rows),), step)
        self._begun += len(rows)
        self._rows = rows if self._rows is None else join([self._rows, rows])
        return missing

    def _generate(self, step: int) -> tuple[DataProto, list[Sample], Layout, dict[str, float]]:
        """Let all groups go on until enough are complete.

        Returns:
            The rows, how far they are, how they become a batch, and what was counted.
        """
        rows = self._rows
        assert rows is not None
        held = self._samples
        carried: list[Any] = [ENDED if sample.unfinished is None else sample.unfinished for sample in held]
        carried += [None] * (len(rows) - len(held))
        tensors = ("input_ids", "attention_mask", "sample_index", "born_step")
        columns = [name for name in self.row_fields if name in rows.non_tensor_batch]
        request = rows.select(batch_keys=tensors, non_tensor_batch_keys=columns, meta_info_keys=[])
        request.non_tensor_batch[CARRIED] = object_array(carried)
        request.batch["must_finish"] = step - rows.batch["born_step"] >= self.max_staleness
        count = len(rows) // self.n
        # carried groups come first and have less to do: every process gets its share of them
        order = self._rows_of([group for part in range(self.parts) for group in range(part, count, self.parts)])
        request = request.select_idxs(order)
        cut_off = {"groups": count, "keep": self.groups, "group_size": self.n}
        request.meta_info.update({"step": step, "validate": False, CUT_OFF: cut_off})
        answers = self.rollout.generate_sequences(request)
        counted = pop_metrics(answers)
        made, layout = from_envelope(answers)
        samples = [made[place] for place in np.argsort(order)]
        samples[: len(held)] = [old if old.unfinished is None else new for old, new in zip(held, samples, strict=False)]
        return rows, samples, layout, counted

    def _take(
        self, step: int, rows: DataProto, samples: list[Sample], layout: Layout
    ) -> tuple[DataProto, dict[str, float]]:
        """The batch of this step; what is left is carried or dropped."""
        stopped = [sample.unfinished is not None for sample in samples]
        count = len(samples) // self.n
        complete = [group for group in range(count) if not any(stopped[group * self.n : (group + 1) * self.n])]
        if len(complete) < self.groups:
            raise RolloutError(
                f"step {step}: generation ended with {len(complete)} complete groups, {self.groups} are needed"
            )
        chosen = complete[: self.groups]
        left = sorted(set(range(count)) - set(chosen))
        kept = self._rows_of(left)
        numbers = {
            "over_sampling/stopped": float(sum(stopped)),
            "over_sampling/dropped": 0.0 if self.carry else float(len(kept)),
            "over_sampling/carried": float(len(kept)) if self.carry else 0.0,
        }
        self._rows, self._samples = None, []
        if self.carry:
            waiting = [samples[row] for row in kept]
            numbers["over_sampling/carried_tokens"] = float(sum(map(_sampled_tokens, waiting)))
            if waiting:
                self._rows, self._samples = rows.select_idxs(kept), waiting
        taken = self._rows_of(chosen)
        chosen_rows = rows.select_idxs(taken).select(batch_keys=["sample_index"])
        # places in this batch; those in the step that began a sample have served as its seed
        chosen_rows.batch["sample_index"] = torch.arange(len(chosen_rows))
        return join_samples(chosen_rows, [samples[row] for row in taken], layout), numbers

    def _rows_of(self, groups: Sequence[int]) -> np.ndarray:
        """Row numbers of the samples of groups."""
        return np.array([group * self.n + sample for group in groups for sample in range(self.n)], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Place in the data, prompts that were drawn and not begun, and the trajectories that are carried."""
        kept = {"prompts": self._prompts, "rows": self._rows}
        plain = {
            name: None if batch is None else to_plain(batch, what=_KEPT, instead=_INSTEAD)
            for name, batch in kept.items()
        }
        samples = [plain_value(sample.to_plain(), what=_KEPT, instead=_INSTEAD) for sample in self._samples]
        return {"loader": super().state_dict(), **plain, "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, or with nothing carried from a source without over-sampling."""
        self._prompts, self._rows, self._samples = None, None, []
        state = without_surplus(state)
        super().load_state_dict(state.get("loader", state))
        if "loader" not in state:
            return
        if state.get("results") is not None:
            raise CheckpointError(
                "the checkpoint carries unfinished samples in the form of an earlier version. Resume it with that "
                "version for one step that is saved, with actor_rollout_ref.rollout.partial_rollout=False; its "
                "checkpoint carries none and goes on here"
            )
        self._prompts, rows = (None if state[name] is None else from_plain(state[name]) for name in ("prompts", "rows"))
        self._samples = [Sample.from_plain(one) for one in state.get("samples", ())]
        if rows is not None and (len(rows) % self.n or len(rows) > self.in_progress * self.n):
            raise CheckpointError(
                f"the checkpoint carries {len(rows)} samples to the next step, which are not at most "
                f"{self.in_progress} groups of {self.n}; resume with the same actor_rollout_ref.rollout.n, "
                "over_sample_rate and data.train_batch_size"
            )
        self._rows = rows


def _sampled_tokens(sample: Sample) -> int:
    """Tokens that the model has sampled so far."""
    return sum(sample.trajectory.last.sampled) + sum(len(one["token_ids"]) for one in sample.unfinished or ())

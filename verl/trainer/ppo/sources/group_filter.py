"""Dynamic sampling: train on prompts whose samples differ in outcome, and on nothing else."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl.errors import CheckpointError, DataError
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import outcomes
from verl.trainer.ppo.sources.base import Source
from verl.trainer.ppo.sources.kept_batches import from_plain, join, to_plain
from verl.utils.stopping import look
from verl.utils.timing import StepTimer

logger = logging.getLogger(__name__)


class GroupFilter:
    """Asks a source for batches until there are enough groups that carry a signal (DAPO, arXiv:2503.14476).

    A group is all samples of one prompt. Where all are right or all are wrong, group-relative advantages are 0 and the
    group only dilutes the loss. Such groups are dropped. Groups beyond those that a step needs wait for the next step:
    their samples are then a step older than the weights (``policy_version`` says so).

    Args:
        source: gives scored batches of whole groups, the samples of a group next to each other.
        groups: groups per training batch.
        n: samples per group.
        metric: what must differ within a group, see :func:`~verl.trainer.ppo.scoring.outcomes`.
        max_batches: batches to ask for in one step; 0 = until there are enough.
        fill: with ``max_batches`` used up, complete the batch with the latest groups without a signal; False raises.
    """

    def __init__(
        self,
        source: Source,
        *,
        groups: int,
        n: int,
        metric: str | None = None,
        max_batches: int = 0,
        fill: bool = False,
    ) -> None:
        self.source = source
        self.groups = groups
        self.n = n
        self.metric = metric
        self.max_batches = max_batches
        self.fill = fill
        self.fields = source.fields
        self._surplus: DataProto | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the wrapped source."""
        return self.source.epoch

    def next_batch(self, step: int, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """Exactly ``groups`` groups, the oldest first.

        Returns:
            The batch and, besides the summed numbers of the source, ``filter_groups/num_gen_batches``,
            ``filter_groups/informative_fraction`` of this step's groups, ``filter_groups/surplus`` groups kept and
            ``filter_groups/filled`` groups without a signal that were needed to fill the batch.

        Raises:
            DataError: too few groups after ``max_batches`` batches.
        """
        kept = [] if self._surplus is None else [self._surplus]
        count = sum(map(len, kept)) // self.n
        waiting, dull = count, []
        metrics: dict[str, float] = {}
        batches = seen = 0
        while count < self.groups and (not self.max_batches or batches < self.max_batches):
            batch, numbers = self.source.next_batch(step, timer)
            for name, value in numbers.items():
                metrics[name] = metrics.get(name, 0.0) + value
            rows = self._informative(batch).repeat_interleave(self.n)
            kept.append(batch.select_idxs(rows))
            dull.append(batch.select_idxs(~rows))
            batches += 1
            seen += len(batch) // self.n
            count += int(rows.sum()) // self.n
            if count < self.groups:
                limit = f" of at most {self.max_batches}" if self.max_batches else ""
                logger.info(
                    "step %d: %d of %d groups whose samples differ after generation batch %d%s (%d groups seen)",
                    step,
                    count,
                    self.groups,
                    batches,
                    limit,
                    seen,
                )
            look()
        missing = max(0, self.groups - count)
        if missing:
            if not self.fill:
                raise DataError(
                    f"step {step}: {batches} batches with {seen} groups gave {count - waiting} in which the samples "
                    f"differ, together with {waiting} left from before fewer than the {self.groups} of a training "
                    "batch. The task is too easy or too hard for the policy, or the reward is the same for every "
                    f"answer: raise algorithm.filter_groups.max_num_gen_batches={self.max_batches} (0 = no limit) or "
                    "actor_rollout_ref.rollout.n, or train on with algorithm.filter_groups.on_exhausted=fill"
                )
            kept.append(join(dull).slice(-missing * self.n))
        batch = join(kept)
        needed = self.groups * self.n
        rest = batch.slice(needed)
        self._surplus = rest if len(rest) else None
        batch = batch.select_idxs(range(needed))
        # places in this batch; the places in the batches they came from have served as seeds
        batch.batch["sample_index"] = torch.arange(needed)
        metrics |= {
            "filter_groups/num_gen_batches": batches,
            "filter_groups/surplus": len(rest) // self.n,
            "filter_groups/filled": missing,
        }
        if seen:
            metrics["filter_groups/informative_fraction"] = (count - waiting) / seen
        return batch, metrics

    def _informative(self, batch: DataProto) -> torch.Tensor:
        """(G,) bool: at least two samples of the group have different outcomes; those without one do not count."""
        values = outcomes(batch, self.metric).reshape(-1, self.n)
        known = ~values.isnan()
        high = torch.where(known, values, -torch.inf).amax(-1)
        low = torch.where(known, values, torch.inf).amin(-1)
        return high > low

    def state_dict(self) -> dict[str, Any]:
        """State of the source, and the waiting groups with all their fields."""
        instead = "set algorithm.filter_groups.enable=False"
        kept = self._surplus
        surplus = None if kept is None else to_plain(kept, what="the groups kept for the next step", instead=instead)
        return {"source": self.source.state_dict(), "surplus": surplus}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, or with no groups waiting from a source without a filter."""
        self._surplus = None
        if "surplus" not in state:
            self.source.load_state_dict(state)
            return
        self.source.load_state_dict(state["source"])
        if state["surplus"] is None:
            return
        surplus = from_plain(state["surplus"])
        if len(surplus) % self.n:
            raise CheckpointError(
                f"the checkpoint keeps {len(surplus)} samples for the next step, which are no whole groups of "
                f"{self.n}; resume with the same actor_rollout_ref.rollout.n"
            )
        self._surplus = surplus

"""Validation: sample the held-out prompts, score them, summarise and show them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.placement import Rollout
from verl.trainer.ppo.scoring import Sample, Scorer, apart, describe_samples, dump_samples
from verl.trainer.ppo.sources.base import generate, with_samples
from verl.trainer.ppo.validation_metrics import ValidationRecord
from verl.utils.seeding import derive_seed
from verl.utils.stopping import look
from verl.utils.telling import BOUNDARY

logger = logging.getLogger(__name__)


def sources_of(batch: DataProto, reward_fn_key: str = "data_source") -> list[str]:
    """What each row's metrics are filed under: its data source, and its player where an episode has several.

    Args:
        batch: of validation.
        reward_fn_key: column with the data source.
    """
    sources = batch.non_tensor_batch.get(reward_fn_key, ["unknown"] * len(batch))
    players = batch.non_tensor_batch.get("player", [None] * len(batch))
    return [source if player is None else f"{source}/{player}" for source, player in zip(sources, players, strict=True)]


class Validator:
    """Runs the validation set through the current policy.

    Args:
        dataloader: yields dicts of prompts; every pass gives the same rows in the same order.
        rollout: has ``generate_sequences``.
        scorer: judges responses.
        tokenizer: decodes prompts and responses for people.
        n: samples per prompt.
        seed: seed of the run.
        dump_dir: where ``<step>.jsonl`` goes, or None.
        show: how many samples go to the trackers.
        row_fields: columns that the rollout reads.
        reward_fn_key: column with the data source.
    """

    def __init__(
        self,
        *,
        dataloader: Any,
        rollout: Rollout,
        scorer: Scorer,
        tokenizer: Any,
        n: int,
        seed: int,
        dump_dir: str | None = None,
        show: int = 0,
        row_fields: Sequence[str] = (),
        reward_fn_key: str = "data_source",
    ) -> None:
        self.dataloader = dataloader
        self.rollout = rollout
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.n = n
        self.seed = seed
        self.dump_dir = Path(dump_dir) if dump_dir else None
        self.show = show
        self.row_fields = row_fields
        self.reward_fn_key = reward_fn_key

    def run(self, step: int) -> tuple[dict[str, float], list[Sample]]:
        """Validate the policy as it is after ``step``.

        Returns:
            The metrics ``val-core/...`` and ``val-aux/...``, and the samples chosen for the trackers.
        """
        record = ValidationRecord()
        samples: list[Sample] = []
        rows_seen = 0
        for rows in self.dataloader:
            batch = with_samples(DataProto.from_single_dict(rows), self.n, uid_prefix=f"val-{rows_seen}")
            # places in the whole validation set, so that its batch size does not change the samples
            batch.batch["sample_index"] += rows_seen
            rows_seen += len(batch)
            batch = generate(self.rollout, batch, step=0, validate=True, row_fields=self.row_fields)
            result = self.scorer.judge(batch)
            scores = result.sums()
            record.add(
                sources_of(batch, self.reward_fn_key),
                list(batch.non_tensor_batch["uid"]),
                {**{name: list(values) for name, values in apart(result.extra, {"reward"}).items()}, "reward": scores},
            )
            if self.dump_dir or self.show:
                with BOUNDARY.guard("samples", "describing the samples of the validation"):
                    samples += describe_samples(self.tokenizer, batch, scores, result.extra)
            logger.debug("validation: %d samples", rows_seen)
            look()
        metrics = record.metrics(seed=derive_seed(self.seed, "bootstrap"))
        if self.dump_dir:
            with BOUNDARY.guard("samples", f"writing samples to trainer.validation_data_dir={self.dump_dir}"):
                dump_samples(self.dump_dir, step, samples)
        return metrics, self._choose(samples)

    def _choose(self, samples: list[Sample]) -> list[Sample]:
        """The same prompts at every validation, so that their answers can be compared over time."""
        order = np.random.default_rng(derive_seed(self.seed, "val_samples")).permutation(len(samples))
        return [samples[i] for i in sorted(order[: self.show])]

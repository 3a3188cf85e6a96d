"""Training on pairs of answers: DPO, and reward models; the loop is that of supervised fine-tuning."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import Tensor

from verl.data.preference_dataset import PreferenceCollator, PreferenceDataset
from verl.trainer.sft_trainer import Batch, SFTTrainer, build_engine, build_parts, locked_directory, run
from verl.utils.distributed import get_world_size
from verl.utils.metrics import MetricSet, mmean
from verl.utils.seeding import deterministic
from verl.workers.engine.base import GlobalBatchInfo, MicroBatching, TrainEngine
from verl.workers.engine.batching import reduce_metrics
from verl.workers.losses import DPOLoss, PairwiseRewardLoss

if TYPE_CHECKING:
    from verl.config import PreferenceConfig

logger = logging.getLogger(__name__)

LOG_PROBS = frozenset({"log_probs"})


class PreferenceTrainer(SFTTrainer):
    """Trains on pairs of answers. The loss is the mean over the pairs of the whole batch, over all ranks.

    Args:
        config: the whole configuration; read-only.
        engine: a built engine: a policy for DPO, a classifier for a reward model.
        reference: the built engine of the reference policy; None for a reward model.
        rest: as :class:`SFTTrainer`.
    """

    config: PreferenceConfig
    program = "preference"

    @property
    def next_step(self) -> str:
        """Command for the trained model; ``{model}`` stands for its directory."""
        if self.reference is None:
            return "verl train reward_model.enable=True reward_model.model.path={model} data.train_files=PROMPTS"
        return "verl generate model.path={model} data.path=PROMPTS data.output_path=ANSWERS.jsonl"

    def __init__(
        self, *, config: PreferenceConfig, engine: TrainEngine, reference: TrainEngine | None, **rest: Any
    ) -> None:
        self.reference = reference
        super().__init__(config=config, engine=engine, **rest)
        size, tokens = config.data.micro_batch()
        self.micro = MicroBatching(None if size is None else 2 * size, tokens, unit=2)  # both answers of a pair
        self.loss = DPOLoss(config.loss) if reference is not None else PairwiseRewardLoss(config.loss)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; the same numbers on every rank."""
        return super().train_step(self._with_reference(batch))

    def validate(self) -> dict[str, float]:
        """Loss, accuracy and scores over the validation pairs of all ranks, as ``val/*``."""
        assert self.val_loader is not None
        pieces = []
        for batch in self.val_loader:
            self.look()
            rows = self._with_reference(batch)
            outputs = self.engine.forward(rows, self.loss.want, micro=self.micro)
            count = len(batch["input_ids"])
            if count:
                where = next(iter(outputs.values())).device
                tensors = {name: value for name, value in rows.items() if isinstance(value, Tensor)}
                fields = TensorDict(tensors, batch_size=[count]).to(where)
                _, metrics = self.loss(outputs, fields, GlobalBatchInfo(1, 0, count))
                # its weight is a share of this call's pairs; between batches the number of pairs counts
                metrics["train/loss"] = mmean(metrics["train/loss"].value * count / 2, count / 2)
                pieces.append(metrics)
        # over all ranks: those that share sequences count the same rows, which changes no mean
        joined: MetricSet = reduce_metrics(pieces, dp_size=get_world_size())
        return {name.replace("train/", "val/"): value for name, value in joined.values_by_name().items()}

    def _with_reference(self, batch: Batch) -> Batch:
        """Add ``ref_log_prob`` (2N,R) for DPO."""
        if self.reference is None:
            return batch
        out = self.reference.forward(batch, LOG_PROBS, micro=self.micro)
        return {**batch, "ref_log_prob": out["log_probs"].cpu()}


def build_trainer(config: PreferenceConfig) -> PreferenceTrainer:
    """Everything that a run needs, from its configuration; joins the process group that ``torchrun`` describes."""
    parts = build_parts(config, PreferenceDataset, PreferenceCollator)
    if config.objective == "dpo":
        reference = build_engine(config, parts, trained=False)
        engine = build_engine(config, parts)
    else:
        reference = None
        engine = build_engine(config, parts, head="classifier")
    logger.info("%d steps of %d pairs", parts.total_steps, config.data.train_batch_size)
    return PreferenceTrainer(config=config, engine=engine, reference=reference, **parts.run)


def run_preference(config: PreferenceConfig) -> dict[str, float] | None:
    """Build the trainer, train, close the trackers; returns what :func:`verl.trainer.sft_trainer.run_sft` does."""
    with deterministic(config.trainer.deterministic), locked_directory(config):
        return run(build_trainer(config))

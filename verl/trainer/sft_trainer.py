"""Supervised fine-tuning: the loop, on one process or on several under ``torchrun``."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import Dataset

from verl.checkpoint.failure import describe_state, require_final
from verl.checkpoint.final_model import EXPORT_DIR, is_exported, provenance
from verl.checkpoint.manager import CheckpointManager, step_of
from verl.checkpoint.nonfinite import NonfiniteUpdates
from verl.checkpoint.state import DATALOADER_STATE, load_trainer_state, restoring
from verl.data import has_images
from verl.data.loader import ResumableDataLoader, create_dataloader
from verl.data.sft_dataset import SFTCollator, SFTDataset, check_examples, create_examples
from verl.models.directory import check_model
from verl.trainer.closing import RunReport, print_lines, state_logged_on_failure
from verl.trainer.image_checks import engine_problems, model_problems, refuse
from verl.trainer.run_record import open_run, write_record
from verl.trainer.sft_saving import SFTSaver, on_rank_zero
from verl.utils.distributed import all_reduce_numbers, get_rank, get_world_size, init_process_group
from verl.utils.metrics import MetricSet
from verl.utils.run_lock import locked
from verl.utils.seeding import derive_seed, deterministic, set_seed
from verl.utils.stopping import StopRequested, StopWatch, account, require_saved
from verl.utils.timing import StepTimer
from verl.utils.tokenizer import load_processor, load_tokenizer
from verl.utils.tracking import Tracking
from verl.workers.engine.base import MicroBatching, TrainEngine
from verl.workers.engine.export import export_model
from verl.workers.losses import sft_loss

if TYPE_CHECKING:
    from verl.config import FineTuningConfig, SFTConfig
    from verl.config.sft import SFTModelConfig

logger = logging.getLogger(__name__)

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[list[Any]], Batch]


class SFTTrainer:
    """Trains on demonstrations; every rank runs the same loop on its share of each batch.

    The loss is the mean negative log-likelihood over the wanted tokens of the whole batch, over all ranks, so that it
    does not depend on how the batch is split.

    Args:
        config: the whole configuration; read-only.
        engine: a built engine.
        train_loader: this rank's share of the training batches.
        val_loader: this rank's share of the validation batches, or None.
        total_steps: optimizer steps of the run.
        tracker: takes the metrics; None on all ranks but the first.
        checkpoints: finds and writes step directories; None on all ranks but the first.
        watch: says when to save and end early.
    """

    #: word of the command ``verl``
    program: ClassVar[str] = "sft"

    @property
    def next_step(self) -> str:
        """Command for the trained model; ``{model}`` stands for its directory."""
        return "verl train actor_rollout_ref.model.path={model} data.train_files=PROMPTS"

    def closing_lines(self) -> list[str]:
        """What the program says at its end; of the first rank."""
        assert self.saver.manager is not None
        return self.report.lines(
            self.step,
            root=self.saver.manager.root,
            model=self.final_model,
            checkpoint=self.saver.complete(),
            stopped=self.stopped,
        )

    def __init__(
        self,
        *,
        config: FineTuningConfig,
        engine: TrainEngine,
        train_loader: ResumableDataLoader,
        val_loader: ResumableDataLoader | None,
        total_steps: int,
        tracker: Tracking | None,
        checkpoints: CheckpointManager | None,
        watch: StopWatch | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.total_steps = total_steps
        self.tracker = tracker
        self.micro = MicroBatching(*config.data.micro_batch())
        self.loss: Any = sft_loss()
        self.step = 0
        self.trained = False  # this process has taken a step
        self.stopped = False  # before the last step, to be started again
        self.final_model: Path | None = None  # written by this run, or by an earlier start of it
        self.validation_due = False  # that of the last step was given up
        self.watch = watch or StopWatch()
        self.saver = SFTSaver(config.trainer, engine, checkpoints)
        self.report = RunReport(config.trainer, total_steps, self.next_step, "optim.lr")
        self.nonfinite = NonfiniteUpdates(config.trainer.on_nonfinite, self.saver.newest, self.saver.restore)

    def fit(self) -> dict[str, float]:
        """Train to the last step, save, export, and return the last step's metrics."""
        self.load_checkpoint()
        if self.step >= self.total_steps:
            logger.warning("all %d steps are done already; raise trainer.total_epochs to go on", self.total_steps)
        metrics: dict[str, float] = {}
        if self.validation_due and self.val_loader is not None:
            metrics = self._validate()
            if self.tracker is not None and metrics:
                self.tracker.log(metrics, step=self.step)
        for batch in self._batches():
            self.step += 1
            self.trained = True
            timer = StepTimer()
            with timer("step"):
                metrics = self.train_step(batch)
                metrics |= self.nonfinite.check(metrics, self.step)
            if self.val_loader is not None and self._due(self.config.trainer.test_freq):
                with timer("testing"):
                    metrics |= self._validate()
            self.stopped = self.stopped or self._should_stop(sum(timer.seconds.values()))
            if self._due(self.config.trainer.save_freq):
                with timer("save_checkpoint"):
                    self.save_checkpoint(metrics)
            metrics |= {"training/global_step": float(self.step), "training/epoch": self.epoch, **timer.metrics()}
            metrics["perf/throughput"] = metrics["train/tokens"] / timer.seconds["step"]
            if self.saver.failed:
                metrics["checkpoint/failed_saves"] = float(self.saver.failed)
                self.saver.failed = 0
            if self.tracker is not None:
                self.tracker.log(metrics, step=self.step)
                self.report.note(metrics, self.step)
            self.saver.poll()  # after the record of the step: a run that is resumed from it has that record
            if self.stopped:
                break
        self.saver.finish()
        if not self.stopped:
            self.final_model = self.export()
        newest = self.saver.complete()
        require_final(None if newest is None else step_of(newest), self.step, self.config.trainer)
        return metrics

    def _validate(self) -> dict[str, float]:
        """:meth:`validate`, or nothing if a signal or a deadline ended it."""
        self.validation_due = False
        try:
            return self.validate()
        except StopRequested as error:
            if self.tracker is not None:
                logger.warning("ending in the validation after step %d: %s", self.step, error)
            self.stopped = self.validation_due = True
            return {}

    def look(self) -> None:
        """Raise :class:`StopRequested` on every rank if the run is to end now. Collective."""
        reason = None
        try:
            self.watch.look()
        except StopRequested as error:
            reason = str(error)
        if all_reduce_numbers([float(reason is not None)], "max")[0] > 0:
            raise StopRequested(reason or "another rank was asked to end")

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; the same numbers on every rank."""
        result: MetricSet = self.engine.train_batch(batch, self.loss, want=self.loss.want, micro=self.micro)
        metrics = {
            name if name.startswith("train/") else f"train/{name}": value
            for name, value in result.values_by_name().items()
        }
        tokens = all_reduce_numbers([float(batch["attention_mask"].sum())])[0]
        metrics["train/tokens"] = tokens / self.engine.layout.ranks_per_row  # which all count the same rows
        return metrics

    def validate(self) -> dict[str, float]:
        """``val/loss``, the mean negative log-likelihood of the wanted validation tokens, over all ranks."""
        assert self.val_loader is not None
        total = tokens = 0.0
        for batch in self.val_loader:
            self.look()
            log_probs = self.engine.forward(batch, frozenset({"log_probs"}), micro=self.micro)["log_probs"]
            mask = batch["response_mask"].to(log_probs.device) != 0
            total -= float(torch.where(mask, log_probs, 0.0).double().sum())
            tokens += float(mask.sum())
        total, tokens = all_reduce_numbers([total, tokens])
        return {"val/loss": total / tokens if tokens else 0.0}

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.step / len(self.train_loader)

    def _batches(self) -> Iterator[Batch]:
        while self.step < self.total_steps and not self.stopped:
            for batch in self.train_loader:
                yield batch
                if self.step >= self.total_steps:
                    return

    def _due(self, freq: int) -> bool:
        return freq > 0 and (self.step % freq == 0 or self.step == self.total_steps or self.stopped)

    def _should_stop(self, step_s: float) -> bool:
        """Whether this step is the last one for now, on every rank alike."""
        reason = self.watch.reason(step_s, self.saver.seconds)
        stops = all_reduce_numbers([float(reason is not None)], "max")[0] > 0 and self.step < self.total_steps
        if stops and reason and self.tracker is not None:
            logger.warning("ending after step %d: %s", self.step, reason)
        return stops

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, metrics: dict[str, float]) -> None:
        """Write ``global_step_N``: visible only when every rank has written its part."""
        state = {"step": self.step, "tracker": {} if self.tracker is None else self.tracker.state_dict()}
        if self.validation_due:
            state["validation_due"] = True
        self.saver.save(self.step, state, self.train_loader.state_dict(), metrics)

    def load_checkpoint(self) -> None:
        """Go on from the checkpoint that ``trainer.resume_mode`` chooses, if there is one."""
        found = self.saver.load()
        if found is None:
            return
        path, state, data_state = found
        with restoring(path / DATALOADER_STATE):
            self.train_loader.load_state_dict(data_state)
        self.step = state["step"]
        self.validation_due = bool(state.get("validation_due"))
        logger.info("resuming from %s", path)

    def export(self) -> Path | None:
        """Write the model as a Hugging Face directory, ``default_local_dir/huggingface``, replacing an older one.

        Nothing is written without ``trainer.save_final_model``, or when this run and step have written it before.
        """
        if not self.config.trainer.save_final_model:
            return None
        root = Path(self.config.trainer.default_local_dir)
        fingerprint = None if self.saver.manager is None else self.saver.manager.fingerprint
        origin = provenance(self.program, self.step, fingerprint)
        if on_rank_zero(lambda: not self.trained and is_exported(root, origin)):
            return root / EXPORT_DIR
        return export_model(self.engine, root, origin)


@dataclass(frozen=True)
class Parts:
    """What a trainer on a fixed data set is made of, whatever its rows and its loss."""

    device: torch.device
    train_loader: ResumableDataLoader
    val_loader: ResumableDataLoader | None
    total_steps: int
    tracker: Tracking | None
    checkpoints: CheckpointManager | None
    watch: StopWatch

    @property
    def run(self) -> dict[str, Any]:
        """The arguments that every trainer takes."""
        names = ("train_loader", "val_loader", "total_steps", "tracker", "checkpoints", "watch")
        return {name: getattr(self, name) for name in names}


def build_parts(config: FineTuningConfig, dataset: type[Dataset], collator: Callable[[int], Collate]) -> Parts:
    """Data, trackers and checkpoints of a run; joins the process group that ``torchrun`` describes.

    Args:
        config: the whole configuration.
        dataset: class of the rows, unless the user names one.
        collator: from the id of the padding token to the collate function.
    """
    config.check_files()
    device = init_process_group(config.trainer.device, timeout_s=config.trainer.nccl_timeout)
    rank, world = get_rank(), get_world_size()
    checkpoints = CheckpointManager.from_config(config.trainer) if rank == 0 else None
    set_seed(derive_seed(config.trainer.seed, "sft", rank))

    data = config.data
    model = config.model
    check_model(model, "model")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
    processor = load_processor(str(model.path), model.trust_remote_code)
    share, shares = model.row_share(rank, world)
    seed = derive_seed(config.trainer.seed, "data") if data.seed is None else data.seed

    def loader(files: list[str], limit: int, *, train: bool) -> ResumableDataLoader:
        examples = create_examples(dataset, files, tokenizer, data, limit, processor)
        if has_images(examples):
            refuse([*engine_problems("model", model), *model_problems({"model.path": model})])
        elif not data.custom_cls.path:
            check_examples(examples, rank, world)
        return create_dataloader(
            examples,
            data,
            batch_size=data.train_batch_size,
            shuffle=data.shuffle and train,
            seed=seed,
            drop_last=train,
            collate=collator(tokenizer.pad_token_id),
            rank=share,
            world_size=shares,
        )

    train_loader = loader(data.train_files, data.train_max_samples, train=True)
    val_loader = loader(data.val_files, data.val_max_samples, train=False) if data.val_files else None
    datasets = {"data.train_files": train_loader.dataset}
    if val_loader is not None:
        datasets["data.val_files"] = val_loader.dataset
    run_ids = on_rank_zero(lambda: _open(config, checkpoints, datasets))
    total_steps = config.trainer.total_training_steps or len(train_loader) * config.trainer.total_epochs
    return Parts(
        device=device,
        train_loader=train_loader,
        val_loader=val_loader,
        total_steps=total_steps,
        tracker=_tracker(config, total_steps, run_ids) if checkpoints is not None else None,
        checkpoints=checkpoints,
        watch=StopWatch(config.trainer.time_limit_s, config.trainer.esi_redundant_time),
    )


def build_engine(
    config: FineTuningConfig, parts: Parts, *, head: str = "lm", padded: bool = False, trained: bool = True
) -> TrainEngine:
    """A built engine for the run's model, with the optimizer unless it is only evaluated."""
    horizon = config.optim.total_training_steps or parts.total_steps
    kind, section = _engine_of(config.model)
    engine = kind(
        dataclasses.replace(config.model, use_remove_padding=config.model.use_remove_padding and not padded),
        section,
        dataclasses.replace(config.optim, total_training_steps=horizon) if trained else None,
        head=head,
        device=parts.device,
        checkpoint_config=config.trainer.checkpoint,
        seed=config.trainer.seed,
        renormalise=False,  # nothing is sampled, and learning from text makes tokens without text unlikely
    )
    started = time.perf_counter()
    engine.build()
    layout = engine.layout
    assert (layout.dp_rank, layout.dp_size) == config.model.row_share(layout.rank, layout.world_size)
    logger.info("model built in %.1f s", time.perf_counter() - started)
    return engine


def _engine_of(model: SFTModelConfig) -> tuple[Any, Any]:
    """The class of the chosen engine, and its section."""
    if model.strategy == "megatron":
        from verl.workers.engine.megatron.engine import MegatronEngine

        return MegatronEngine, model.megatron
    from verl.workers.engine.fsdp.engine import FSDPEngine

    return FSDPEngine, model.fsdp_config


def build_trainer(config: SFTConfig) -> SFTTrainer:
    """Everything that a run needs, from its configuration; joins the process group that ``torchrun`` describes."""
    padded = config.data.pad_mode == "right"
    length = config.data.max_length if padded else None
    parts = build_parts(config, SFTDataset, lambda pad: SFTCollator(pad, length))
    engine = build_engine(config, parts, padded=padded)
    logger.info("%d steps of %d examples", parts.total_steps, config.data.train_batch_size)
    return SFTTrainer(config=config, engine=engine, **parts.run)


def _open(
    config: FineTuningConfig, checkpoints: CheckpointManager | None, datasets: Mapping[str, Any]
) -> dict[str, str]:
    """Compare the run with the checkpoint that it resumes from; gives the trackers' run ids."""
    assert checkpoints is not None
    found = open_run(config, config.trainer, checkpoints, datasets)
    if found is None or found.parent != checkpoints.root:
        return {}
    return load_trainer_state(found).get("tracker", {})


def _tracker(config: FineTuningConfig, total_steps: int, run_ids: dict[str, str]) -> Tracking:
    from verl.config import to_dict

    trainer = config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        config=to_dict(config),
        default_local_dir=trainer.default_local_dir,
        total_steps=total_steps,
        run_ids=run_ids,
    )


def run_sft(config: SFTConfig) -> dict[str, float] | None:
    """Build the trainer, train, close the trackers.

    Returns:
        The last step's metrics; None if the run saved and ended before its last step.
    """
    with deterministic(config.trainer.deterministic), locked_directory(config):
        return run(build_trainer(config))


def locked_directory(config: FineTuningConfig) -> AbstractContextManager[None]:
    """The output directory, held by the first rank; refused before the ranks meet."""
    first = os.environ.get("RANK", "0") == "0"
    return locked({"trainer.default_local_dir": config.trainer.default_local_dir} if first else {})


def run(trainer: SFTTrainer) -> dict[str, float] | None:
    """:func:`run_sft` for a trainer that is built."""
    first = trainer.saver.manager is not None

    def state() -> str:
        return describe_state(trainer.step, trainer.saver.complete(), trainer.config.trainer)

    try:
        if trainer.saver.manager is not None:
            write_record(trainer.config, trainer.saver.manager)  # not before all that can be wrong is found
        with trainer.watch, account(state), state_logged_on_failure(state) if first else nullcontext():
            metrics = trainer.fit()
        if trainer.stopped:
            require_saved(trainer.config.trainer.save_freq, trainer.watch, trainer.report.trained)
    finally:
        if trainer.tracker is not None:
            trainer.tracker.finish()
    if first:
        print_lines(trainer.closing_lines())
    return None if trainer.stopped else metrics

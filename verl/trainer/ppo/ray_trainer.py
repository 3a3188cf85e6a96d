"""The PPO trainer: one process that drives worker groups through the five phases of a step.

Everything it works with is handed in, built; it reads as the algorithm. How batches are made is the source's
affair, where models live is the worker groups', what a number means is ``metrics``'s.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.correction import correct_rollout, mismatch_metrics
from verl.algorithms.kl import KLController
from verl.algorithms.registry import get_adv_estimator_fn, make_state
from verl.checkpoint.failure import require_final
from verl.checkpoint.final_model import EXPORT_DIR, is_exported, provenance
from verl.checkpoint.manager import CheckpointManager, step_of
from verl.checkpoint.nonfinite import NonfiniteUpdates
from verl.checkpoint.state import DATALOADER_STATE, TRAINER_STATE, restoring
from verl.config import PPOConfig
from verl.errors import CheckpointError, RewardError
from verl.protocol import DataProto
from verl.schema import check_batch
from verl.single_controller.base import StartedCall, WorkerGroup
from verl.trainer.closing import RunReport
from verl.trainer.ppo.advantage import (
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
    prepare_policy_loss,
)
from verl.trainer.ppo.checks import check_algorithm
from verl.trainer.ppo.fields import stage_batch
from verl.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_staleness_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.mismatch import MismatchMonitor
from verl.trainer.ppo.placement import Rollout
from verl.trainer.ppo.rows import arrange_rows, compute_row_advantages, has_rows, lay_out_rows, without_padding
from verl.trainer.ppo.saving import RunSaver
from verl.trainer.ppo.scoring import check_scores, describe_samples, dump_samples, outcomes, reported
from verl.trainer.ppo.sources.base import Source
from verl.trainer.ppo.validation import Validator
from verl.utils.device import resolve_device
from verl.utils.metrics import MetricSet
from verl.utils.seeding import derive_seed, plain_rng_state, set_plain_rng_state
from verl.utils.seqlen_balancing import arrange_mini_batches, seqlen_balance_metrics
from verl.utils.stopping import StopRequested, StopWatch
from verl.utils.telling import BOUNDARY
from verl.utils.timing import StepTimer
from verl.utils.tracking import Tracking
from verl.workers.losses import actor_loss
from verl.workers.memory_usage import predict, table

__all__ = ["RayPPOTrainer", "apply_kl_penalty", "compute_advantage", "compute_response_mask"]

logger = logging.getLogger(__name__)


class RayPPOTrainer:
    """Trains a policy with PPO-style updates.

    Args:
        config: the sealed configuration.
        actor_rollout: worker group that trains the policy.
        rollout: what samples from it and is given its weights.
        source: gives batches of prompts with scored responses.
        tracker: takes the metrics of every step.
        checkpoints: keeps the directories of saved steps.
        tokenizer: decodes samples for people.
        total_steps: number of steps of the whole run.
        kl_ctrl: coefficient of the KL penalty in the reward.
        critic: worker group with ``compute_values`` and ``update_critic``.
        ref: worker group with ``compute_ref_log_prob``.
        process_reward: worker group with ``compute_process_rewards`` and ``update_reward_model``.
        validator: runs the validation set; None validates never.
        watch: says when to save and end early.
    """

    def __init__(
        self,
        *,
        config: PPOConfig,
        actor_rollout: WorkerGroup,
        rollout: Rollout,
        source: Source,
        tracker: Tracking,
        checkpoints: CheckpointManager,
        tokenizer: Any,
        total_steps: int,
        kl_ctrl: KLController,
        critic: WorkerGroup | None = None,
        ref: WorkerGroup | None = None,
        process_reward: WorkerGroup | None = None,
        validator: Validator | None = None,
        watch: StopWatch | None = None,
    ) -> None:
        self.config = config
        self.actor_rollout = actor_rollout
        self.rollout = rollout
        self.source = source
        self.tracker = tracker
        self.tokenizer = tokenizer
        self.total_steps = total_steps
        self.kl_ctrl = kl_ctrl
        self.critic = critic
        self.ref = ref
        self.process_reward = process_reward
        self.validator = validator
        check_algorithm(config, source.fields)
        self.actor_loss = actor_loss(config.actor_rollout_ref.actor)
        self.step = 0
        self.rollout_version = 0  # of the weights that the rollout has
        self.trained = False  # this process has taken a step
        self.stopped = False  # before the last step, to be started again
        self.final_model: Path | None = None  # written by this run, or by an earlier start of it
        self.validation_due = False  # that of the last step was given up
        self.unsaved: tuple[dict[str, Any], dict[str, Any], dict[str, float]] | None = None  # see keep_state
        self.watch = watch or StopWatch()
        self.saver = RunSaver(config.trainer, checkpoints, self._saved_groups(), background=config.saves_in_background)
        self.nonfinite = NonfiniteUpdates(config.trainer.on_nonfinite, self.saver.newest, self.saver.restore)
        self.memory_reported = not logger.isEnabledFor(logging.INFO)
        self.report = RunReport(
            config.trainer,
            total_steps,
            "verl generate model.path={model} data.path=PROMPTS data.output_path=ANSWERS.jsonl",
            "actor_rollout_ref.actor.optim.lr",
            [path for path in (config.trainer.rollout_data_dir, config.trainer.validation_data_dir) if path],
        )
        self.mismatch = MismatchMonitor(config.algorithm.rollout_correction.report_threshold)
        self.estimator_state = make_state(get_adv_estimator_fn(config.algorithm.adv_estimator), config.algorithm)

    def fit(self) -> None:
        """Run the training: generate, score, estimate advantages, update, hand the new weights over."""
        self.load_checkpoint()
        if self.step >= self.total_steps:
            logger.warning("all %d steps are done already; raise trainer.total_epochs to go on", self.total_steps)
        self.sync_weights()
        if self.validation_due or (self.config.trainer.val_before_train and self.step == 0):
            self.record(self.validate())

        while self.step < self.total_steps and not self.stopped:
            self.step += 1
            self.trained = True
            timer = StepTimer()
            with timer("step"):
                try:
                    batch, metrics = self.sample(timer)
                except StopRequested:
                    self.give_up_step()
                    break
                if self.process_reward is not None:
                    with timer("process_reward"):
                        batch = self.add_process_rewards(batch, metrics)
                with timer("adv"):
                    batch = self.correct_rollout(batch, metrics)
                    batch = self.shape_rewards(batch, metrics)
                    batch = self.estimate_advantages(batch)

                metrics.update(self.run_updates(batch, timer))
                metrics.update(self.nonfinite.check(metrics, self.step))
                if self.step > self.config.trainer.critic_warmup:
                    with timer("update_weights"):
                        metrics.update(self.sync_weights())

                if self.due(self.config.trainer.test_freq):
                    with timer("testing"):
                        metrics.update(self.validate())
                self.stopped = self.stopped or self.should_stop(timer)
                if self.due(self.config.trainer.save_freq):
                    with timer("save_checkpoint"):
                        self.save_checkpoint(metrics)
            batch = without_padding(batch)
            metrics.update(compute_timing_metrics(batch, timer.seconds))
            metrics.update(compute_throughput_metrics(batch, timer.seconds, self.actor_rollout.world_size))
            metrics.update(self.saver.drain())
            if not self.memory_reported:
                self.report_memory()
            self.record(metrics)
            self.keep_state(metrics)
            self.saver.poll()  # after the record of the step: a run that is resumed from it has that record
        self.saver.finish()
        if not self.stopped:
            self.final_model = self.export()
        saved = self.saver.complete()
        require_final(None if saved is None else step_of(saved), self.step, self.config.trainer)

    def sample(self, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """The first part of a step, which changes no model: a scored batch with log-probabilities and values.

        Raises:
            StopRequested: a signal or a deadline ended it.
        """
        with self.watch.interruptible(self.saver.seconds):
            batch, metrics = self.source.next_batch(self.step, timer)  # generates and scores
            metrics.update(compute_staleness_metrics(batch, self.rollout_version))
            self.dump_samples(batch)
            batch = lay_out_rows(batch)
            batch = self.arrange(batch)
            return self.run_forward_passes(batch, timer), metrics

    def record(self, metrics: dict[str, float]) -> None:
        """Send the metrics of a step or of a validation to the trackers, and look for what goes wrong."""
        self.tracker.log(metrics, step=self.step)
        self.report.note(metrics, self.step)

    def validate(self) -> dict[str, float]:
        """Metrics of the validation set under the current policy; samples go to the trackers and the dump directory."""
        if self.validator is None:
            return {}
        self.validation_due = False
        try:
            with self.watch.interruptible(self.saver.seconds):
                metrics, samples = self.validator.run(self.step)
        except StopRequested as error:
            logger.warning("ending in the validation after step %d: %s", self.step, error)
            self.stopped = self.validation_due = True
            return {}
        if samples:
            self.tracker.log_samples(samples, step=self.step)
        return metrics

    def validate_only(self) -> None:
        """Validate the checkpoint or the initial model once, without training."""
        self.load_checkpoint()
        self.sync_weights()
        self.record(self.validate())

    # ---- the phases ----------------------------------------------------------------------------------------

    def sync_weights(self) -> dict[str, float]:
        """Hand the actor's weights to the rollout; the version is the step that made them."""
        self.rollout_version = self.step
        return _first(self.rollout.sync_weights(version=self.step))

    def dump_samples(self, batch: DataProto) -> None:
        """Write the batch's samples where ``trainer.rollout_data_dir`` says."""
        if directory := self.config.trainer.rollout_data_dir:
            with BOUNDARY.guard("samples", f"writing samples to trainer.rollout_data_dir={directory}"):
                scores = outcomes(batch, "seq_reward").tolist()
                samples = describe_samples(self.tokenizer, batch, scores, reported(batch))
                dump_samples(Path(directory), self.step, samples)

    def arrange(self, batch: DataProto) -> DataProto:
        """Order the rows so that each global mini-batch is the same whatever the number of ranks."""
        actor, dp_size = self.config.actor_rollout_ref.actor, self.actor_rollout.mesh("actor").dp_size
        return self._arranged(batch, actor.ppo_mini_batch_size, dp_size, shuffle=actor.shuffle)

    def run_forward_passes(self, batch: DataProto, timer: StepTimer) -> DataProto:
        """Add ``old_log_probs``, ``ref_log_prob`` and ``values`` (B,R), as far as the algorithm uses them.

        None needs another's numbers, so all are started before the first is waited for. The seconds of a phase are
        those that the step waited for it.
        """
        started: dict[str, StartedCall] = {}
        if self.config.algorithm.rollout_correction.bypass_mode:
            with timer("old_log_prob"):
                batch = batch.union(DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"]}))
        elif not self.config.actor_rollout_ref.actor.skip_old_log_prob:  # there the update gives them
            with timer("old_log_prob"):
                started["old_log_prob"] = self.actor_rollout.compute_log_prob.start(stage_batch(batch, "log_prob"))
        if self.ref is not None:
            with timer("ref"):
                started["ref"] = self.ref.compute_ref_log_prob.start(stage_batch(batch, "log_prob"))
        if self.critic is not None:
            with timer("values"):
                started["values"] = self.critic.compute_values.start(stage_batch(batch, "values"))
        for phase, call in started.items():
            with timer(phase):
                batch = batch.union(call.get())
        return batch

    def correct_rollout(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add ``rollout_is_weights`` and ``rollout_accepted`` (B,R) where configured."""
        config, tensors = self.config.algorithm.rollout_correction, batch.batch
        if config.bypass_mode or "old_log_probs" not in tensors:
            return batch
        correction = correct_rollout(
            tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], config
        )
        if correction.weights is not None:
            tensors["rollout_is_weights"] = correction.weights
        if correction.accepted is not None:
            tensors["rollout_accepted"] = correction.accepted
        metrics.update({f"rollout_corr/{name}": value for name, value in correction.metrics.items()})
        return batch

    def shape_rewards(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add ``token_level_rewards`` (B,R): the scores, less the KL penalty where it is part of the reward."""
        if self.config.algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl, self.config.algorithm.kl_penalty)
            metrics.update(kl_metrics)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        return batch

    def add_process_rewards(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add ``process_rewards`` (B,R) of a reward model that learns this batch's outcomes, before or after."""
        assert self.process_reward is not None
        config = self.config.reward_model
        batch = batch.union(self.process_reward.compute_rm_ref_log_prob(stage_batch(batch, "log_prob")))
        if config.update == "after":
            batch = batch.union(self.compute_process_rewards(batch))
        if config.update != "none":
            metrics.update(self.update_reward_model(batch))
        if config.update != "after":
            batch = batch.union(self.compute_process_rewards(batch))
        return batch

    def compute_process_rewards(self, batch: DataProto) -> DataProto:
        """``process_rewards`` (B,R) of the reward model as it is now."""
        assert self.process_reward is not None
        made = self.process_reward.compute_process_rewards(stage_batch(batch, "process_rewards"))
        check_scores(batch, made.batch["process_rewards"], "the implicit reward model")
        return made

    def update_reward_model(self, batch: DataProto) -> dict[str, float]:
        """One step of updates of the process reward model on the outcomes, which must lie in 0 to 1."""
        assert self.process_reward is not None
        verdicts = outcomes(batch).nan_to_num(0.0)  # rows without a verdict have no token in the mask
        if verdicts.min() < 0 or verdicts.max() > 1:
            raise RewardError(
                f"outcomes between {verdicts.min():g} and {verdicts.max():g}: an implicit process reward model learns "
                "probabilities of being right; let the reward function report acc in 0 to 1 beside its score"
            )
        batch.batch["outcomes"] = verdicts.float()
        mesh = self.process_reward.mesh("reward_model")
        batch = self._arranged(batch, self.config.reward_model.mini_batch_size, mesh.dp_size)
        return _metrics(self.process_reward.update_reward_model(stage_batch(batch, "update_reward_model")))

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Add ``advantages`` and ``returns`` (B,R)."""
        generator = torch.Generator().manual_seed(derive_seed(self.config.trainer.seed, "reweight", self.step))
        compute = compute_row_advantages if has_rows(batch) else compute_advantage
        return compute(batch, self.config.algorithm, state=self.estimator_state, generator=generator)

    def run_updates(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        """One step of updates of critic and actor, which do not wait for each other.

        The numbers that derive from the batch alone are worked out meanwhile.
        """
        started: dict[str, StartedCall] = {}
        if self.critic is not None:
            with timer("update_critic"):
                started["update_critic"] = self.start_critic_update(batch, self.critic)
        if self.step > self.config.trainer.critic_warmup:
            with timer("update_actor"):
                started["update_actor"] = self.start_actor_update(batch)
        metrics = self.describe(batch)
        for phase, call in started.items():
            with timer(phase):
                metrics.update(_metrics(call.get()))
        return metrics

    def start_critic_update(self, batch: DataProto, critic: WorkerGroup) -> StartedCall:
        """One step of value-function updates."""
        config, dp_size = self.config.critic, critic.mesh("critic").dp_size
        batch = self._without_overlong(batch)
        batch = self._arranged(batch, config.ppo_mini_batch_size, dp_size, shuffle=config.shuffle)
        return critic.update_critic.start(stage_batch(check_batch(batch, "update_critic"), "update_critic"))

    def start_actor_update(self, batch: DataProto) -> StartedCall:
        """One step of policy updates, on the tokens that were not rejected."""
        batch = self._without_overlong(batch)
        if "rollout_accepted" in batch.batch:
            mask = batch.batch["response_mask"] * batch.batch["rollout_accepted"]
            batch = _without(batch, "rollout_accepted")
            batch.batch["response_mask"] = mask
        batch = prepare_policy_loss(batch, self.config.actor_rollout_ref.actor)
        check_batch(batch, "update_actor", require=self.actor_loss.fields)
        more = self.actor_loss.fields | self.actor_loss.optional_fields
        return self.actor_rollout.update_actor.start(stage_batch(batch, "update_actor", more))

    def describe(self, batch: DataProto) -> dict[str, float]:
        """All numbers that derive from the batch."""
        progress = {"training/global_step": self.step, "training/epoch": self.source.epoch}
        if has_rows(batch):
            progress["training/padding_rows"] = len(batch)
            batch = without_padding(batch)
            progress["training/rows"] = len(batch)
            progress["training/padding_rows"] -= len(batch)
        lengths = batch.batch["attention_mask"].sum(-1)
        drawn = torch.argsort(batch.batch["sample_index"])
        # rows lie rank by rank; where each was drawn tells what a plain cut would have given the ranks
        places = torch.argsort(drawn).chunk(self.actor_rollout.mesh("actor").dp_size)
        balance = seqlen_balance_metrics(lengths[drawn].tolist(), [part.tolist() for part in places])
        if self.config.algorithm.rollout_correction.bypass_mode:  # nothing else to compare the rollout's with
            batch = _without(batch, "rollout_log_probs")
        mismatch = self.compare_rollout(batch)
        return progress | balance | mismatch | compute_data_metrics(batch, use_critic=self.critic is not None)

    def compare_rollout(self, batch: DataProto) -> dict[str, float]:
        """How far the rollout's log-probabilities are from the policy's; warns when it is too far."""
        tensors = batch.batch
        if "old_log_probs" not in tensors or "rollout_log_probs" not in tensors:
            return {}
        found = mismatch_metrics(tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"])
        self.mismatch.look(batch, found.get("log_prob_abs_diff", 0.0), step=self.step)
        return {f"rollout_corr/{name}": value for name, value in found.items()}

    def report_memory(self) -> None:
        """Log once what the models need of memory: predicted from the configuration, and measured in this step."""
        self.memory_reported = True
        reports = self.actor_rollout.memory_report()
        if self.critic is not None:
            reports = [ours | theirs for ours, theirs in zip(reports, self.critic.memory_report(), strict=True)]
        with BOUNDARY.guard("memory", "the memory report"):
            items = predict(self.config, resolve_device(self.config.trainer.device))
            logger.info("memory:\n%s", table(items, reports))

    # ---- saving and resuming -------------------------------------------------------------------------------

    def due(self, frequency: int) -> bool:
        """Whether something done every ``frequency`` steps, and at the end of the process, is to be done now."""
        return frequency > 0 and (self.step % frequency == 0 or self.step == self.total_steps or self.stopped)

    def should_stop(self, timer: StepTimer) -> bool:
        """Whether this step is the last one for now: the system asks for it, or the time is up."""
        reason = self.watch.reason(sum(timer.seconds.values()), self.saver.seconds)
        if reason and self.step < self.total_steps:
            saves = "" if self.config.trainer.save_freq > 0 else " without saving (trainer.save_freq=-1)"
            logger.warning("ending after step %d%s: %s", self.step, saves, reason)
        return reason is not None and self.step < self.total_steps

    def give_up_step(self) -> None:
        """End the run in the middle of a step: as it was after the last step that was finished."""
        self.step -= 1
        self.stopped = True
        logger.warning("ending in the middle of step %d: %s", self.step + 1, self.watch.why())
        if self.unsaved is not None:
            self.saver.save(self.step, *self.unsaved)

    def keep_state(self, metrics: dict[str, float]) -> None:
        """Keep what :meth:`save_checkpoint` would write now, for the case that the next step is given up."""
        saves = self.config.trainer.save_freq
        self.unsaved = None if saves < 1 or self.due(saves) else (*self.state(), dict(metrics))

    def save_checkpoint(self, metrics: dict[str, float]) -> None:
        """Write all that the rest of the run depends on; it appears under its name only when complete."""
        self.saver.save(self.step, *self.state(), metrics)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the rest of the run depends on besides the models: of this process, and of the source."""
        state: dict[str, Any] = {
            "step": self.step,
            "kl_ctrl": self.kl_ctrl.state_dict(),
            "rng": plain_rng_state(),
            "tracker": self.tracker.state_dict(),
        }
        if self.estimator_state is not None:
            state["estimator"] = self.estimator_state.state_dict()
        if self.validation_due:
            state["validation_due"] = True
        return copy.deepcopy(state), self.source.state_dict()

    def export(self) -> Path | None:
        """Write the policy as a Hugging Face directory, ``default_local_dir/huggingface``, replacing an older one.

        Nothing is written without ``trainer.save_final_model``, or when this run and step have written it before.
        """
        if not self.config.trainer.save_final_model:
            return None
        manager = self.saver.manager
        origin = provenance("train", self.step, manager.fingerprint)
        if not self.trained and is_exported(manager.root, origin):
            return manager.root / EXPORT_DIR
        return Path(_first(self.actor_rollout.export_model(str(manager.root), origin)))

    def closing_lines(self) -> list[str]:
        """What the program says at its end."""
        return self.report.lines(
            self.step,
            root=self.saver.manager.root,
            model=self.final_model,
            checkpoint=self.saver.complete(),
            stopped=self.stopped,
        )

    def load_checkpoint(self) -> None:
        """Continue from the checkpoint that ``trainer.resume_mode`` selects, if there is one."""
        directory = self.saver.find()
        if directory is None:
            return
        state, data_state = self.saver.load(directory)
        self.step = state["step"]
        self.validation_due = bool(state.get("validation_due"))
        with restoring(directory / TRAINER_STATE):
            self.restore_state(directory, state)
        with restoring(directory / DATALOADER_STATE):
            self.source.load_state_dict(data_state)
        if self.config.trainer.del_local_ckpt_after_load:
            self.saver.manager.delete(directory)

    def restore_state(self, directory: Path, state: dict[str, Any]) -> None:
        """Put back what :meth:`state` gave of this process."""
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        if self.estimator_state is not None:
            if "estimator" not in state:
                raise CheckpointError(
                    f"{directory} has no state of algorithm.adv_estimator={self.config.algorithm.adv_estimator}; "
                    "resume with the estimator that it was made with, or start anew with trainer.resume_mode=disable"
                )
            self.estimator_state.load_state_dict(state["estimator"])
        set_plain_rng_state(state["rng"])  # of this process, where reward functions may draw

    def _saved_groups(self) -> dict[str, WorkerGroup]:
        groups = {"actor": self.actor_rollout, "critic": self.critic, "reward_model": self.process_reward}
        return {name: group for name, group in groups.items() if group is not None}

    # ---- helpers -------------------------------------------------------------------------------------------

    def _without_overlong(self, batch: DataProto) -> DataProto:
        """The batch with responses that were cut off out of the mask, where the configuration leaves them out."""
        if not self.config.algorithm.filter_overlong_responses:
            return batch
        mask = torch.where(batch.batch["overlong"][:, None], 0, batch.batch["response_mask"])
        batch = _without(batch, "response_mask")
        batch.batch["response_mask"] = mask
        return batch

    def _arranged(self, batch: DataProto, mini_batch_size: int, dp_size: int, *, shuffle: bool = False) -> DataProto:
        rows = mini_batch_size * self.config.actor_rollout_ref.rollout.rows_per_prompt
        generator = torch.Generator().manual_seed(derive_seed(self.config.trainer.seed, "mini_batches", self.step))
        balance = self.config.trainer.balance_batch
        if has_rows(batch):
            return arrange_rows(batch, rows, dp_size, balance=balance, generator=generator if shuffle else None)
        # from the order of sampling, not from an earlier arrangement, which depends on the number of ranks
        order = torch.argsort(batch.batch["sample_index"])
        if shuffle:
            order = order[torch.randperm(len(order), generator=generator)]
        lengths = batch.batch["attention_mask"].sum(-1)[order].tolist()
        arranged = arrange_mini_batches(lengths, rows, dp_size, balance=balance)
        order = order[torch.tensor(arranged)]
        if torch.equal(order, torch.arange(len(order))):
            return batch  # the same tensors, which workers may have already
        return batch.select_idxs(order)


def _without(batch: DataProto, field: str) -> DataProto:
    """The batch less a tensor, with a table of tensors of its own."""
    names = list(batch.batch.keys())
    names.remove(field)
    return batch.select(batch_keys=names)


def _first(results: Any) -> Any:
    """The answer of rank 0 where every rank gives the same."""
    return results[0] if isinstance(results, list) else results


def _metrics(results: list[MetricSet]) -> dict[str, float]:
    """One number for each metric of the ranks: equal everywhere for losses, combined for memory."""
    return MetricSet.merged(results).values_by_name()

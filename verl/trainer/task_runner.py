"""Builds the parts of a reinforcement-learning run from its configuration and lets the trainer drive them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl.agent_loop.runner import AgentLoopRunner
from verl.algorithms.kl import get_kl_controller
from verl.algorithms.registry import fields_needed, get_adv_estimator_fn
from verl.checkpoint.failure import describe_state
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.state import load_trainer_state
from verl.config import PPOConfig, to_dict
from verl.data import create_dataloader, create_dataset, has_images
from verl.errors import ConfigError
from verl.models.loading import import_external_lib
from verl.rewards import load_reward_manager
from verl.trainer.closing import print_lines, state_logged_on_failure
from verl.trainer.image_checks import refuse
from verl.trainer.ppo.checks import (
    check_algorithm,
    check_data_sources,
    check_models,
    check_reward_model,
    image_problems,
)
from verl.trainer.ppo.placement import Rollout, build_worker_groups
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.scoring import Scorer
from verl.trainer.ppo.sources.base import NoSource, Source, SyncSource, steps_in_run
from verl.trainer.ppo.sources.group_filter import GroupFilter
from verl.trainer.ppo.sources.over_sampling import OverSamplingSource
from verl.trainer.ppo.validation import Validator
from verl.trainer.ray_session import ray_session
from verl.trainer.run_record import open_run, write_record
from verl.trajectories.batch import ROW_FIELDS
from verl.utils.device import resolve_device
from verl.utils.fs import ensure_writable_dir
from verl.utils.run_lock import locked
from verl.utils.seeding import derive_seed, deterministic
from verl.utils.stopping import StopWatch, account, require_saved
from verl.utils.tokenizer import load_processor, load_tokenizer
from verl.utils.tracking import Tracking


class TaskRunner:
    """Builds the parts of a run from its configuration and lets the trainer drive them.

    All that can be wrong with the input is found before the first worker starts. Override a method to replace a part.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.device = resolve_device(config.trainer.device)
        self.run_ids: dict[str, str] = {}  # of the run that is continued, by tracker
        self.watch = StopWatch(config.trainer.time_limit_s, config.trainer.esi_redundant_time)
        self._trainer: RayPPOTrainer | None = None
        self._at_end = ExitStack()

    def run(self) -> bool:
        """Train, or validate only; what was started is ended in any case.

        Returns:
            False if the run saved and ended before its last step, because of a signal or a deadline.
        """
        with account(self.account), deterministic(self.config.trainer.deterministic), self._at_end:
            trainer = self._trainer = self.build_trainer()
            with self.watch:  # from here on: Ray has handlers of its own when it starts
                if self.config.trainer.val_only:
                    trainer.validate_only()
                    return not trainer.stopped
                write_record(self.config, trainer.saver.manager)  # not before all that can be wrong is found
                with state_logged_on_failure(self.account):
                    trainer.fit()
            if trainer.stopped:
                require_saved(self.config.trainer.save_freq, self.watch, trainer.report.trained)
            return not trainer.stopped

    def account(self) -> str:
        """What is saved, for a run that is interrupted."""
        trainer = self._trainer
        if trainer is None:
            return "no step was begun; the same command begins anew or continues as it would have now"
        if self.config.trainer.val_only:
            return "a validation has nothing to save; the same command begins anew"
        return describe_state(trainer.step, trainer.saver.complete(), self.config.trainer)

    def print_closing(self) -> None:
        """Say how the run ended and what it left, after everything that it started has ended."""
        if self._trainer is not None and not self.config.trainer.val_only:
            print_lines(self._trainer.closing_lines())

    @property
    def has_saved(self) -> bool:
        """Whether this run has written a checkpoint."""
        return self._trainer is not None and self._trainer.saver.saved_step is not None

    def build_trainer(self) -> RayPPOTrainer:
        """Inputs first, then workers, then the trainer."""
        config, trainer = self.config, self.config.trainer
        config.check_files()
        self.check_devices()
        model = config.actor_rollout_ref.model
        import_external_lib(model.external_lib)  # estimators and reward managers run in this process
        check_algorithm(config, self.source_fields)
        check_models(config)
        check_reward_model(config)
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        self.check_agents(tokenizer)
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
        if hasattr(reward_fn, "close"):  # those of users need not have it
            self._at_end.callback(reward_fn.close)
        processor = load_processor(str(model.path), trust_remote_code=model.trust_remote_code)
        train_loader = None if trainer.val_only else self.build_train_loader(tokenizer, processor)
        val_loader = self.build_val_loader(tokenizer, processor)
        datasets = [loader.dataset for loader in (train_loader, val_loader) if loader is not None]
        if any(map(has_images, datasets)):
            refuse(image_problems(config))
        check_data_sources(config, reward_fn, datasets)
        batches = 0 if train_loader is None else len(train_loader)
        total_steps = steps_in_run(batches, trainer.total_epochs, trainer.total_training_steps)
        for key in ("rollout_data_dir", "validation_data_dir"):
            if directory := getattr(trainer, key):
                ensure_writable_dir(directory, purpose=f"directory for samples, trainer.{key}")
        self.lock_directories()
        checkpoints = CheckpointManager.from_config(trainer)
        # report a resume path that does not exist, or of another experiment, before the models are loaded
        resumed = self.open_run(checkpoints, train_loader, val_loader)
        if resumed is not None and resumed.parent == checkpoints.root:  # from elsewhere it is a run of its own
            self.run_ids = load_trainer_state(resumed).get("tracker", {})
        tracker = self.build_tracker(total_steps)
        self._at_end.callback(tracker.finish)

        if trainer.controller == "ray":
            self._at_end.enter_context(ray_session(config))
        groups = build_worker_groups(config, self.device, total_steps)
        self._at_end.callback(groups.shutdown)
        scorer = Scorer(reward_fn, groups.reward_model)
        rollout = config.actor_rollout_ref.rollout
        validator = None
        if val_loader is not None:
            validator = Validator(
                dataloader=val_loader,
                rollout=groups.rollout,
                scorer=scorer,
                tokenizer=tokenizer,
                n=rollout.val_kwargs.n,
                seed=trainer.seed,
                dump_dir=trainer.validation_data_dir,
                show=trainer.log_val_generations,
                row_fields=self.row_fields,
                reward_fn_key=config.data.reward_fn_key,
            )
        return RayPPOTrainer(
            config=config,
            actor_rollout=groups.actor_rollout,
            rollout=groups.rollout,
            ref=groups.ref,
            critic=groups.critic,
            process_reward=groups.process_reward,
            source=self.build_source(train_loader, groups.rollout, scorer) if train_loader else NoSource(),
            validator=validator,
            tracker=tracker,
            checkpoints=checkpoints,
            tokenizer=tokenizer,
            total_steps=total_steps,
            kl_ctrl=get_kl_controller(config.algorithm.kl_ctrl),
            watch=self.watch,
        )

    def lock_directories(self) -> None:
        """Hold what this run writes; a run that only validates may look at the checkpoints of a live one."""
        trainer = self.config.trainer
        directories = {
            "trainer.default_local_dir": None if trainer.val_only else trainer.default_local_dir,
            "trainer.rollout_data_dir": None if trainer.val_only else trainer.rollout_data_dir,
            "trainer.validation_data_dir": trainer.validation_data_dir,
        }
        self._at_end.enter_context(locked(directories))

    def open_run(self, checkpoints: CheckpointManager, train_loader: Any, val_loader: Any) -> Path | None:
        """Compare the run with what is in its directory; gives the checkpoint to resume from."""
        trainer = self.config.trainer
        if trainer.val_only:
            return checkpoints.find(trainer.resume_mode, trainer.resume_from_path)
        loaders = {"data.train_files": train_loader, "data.val_files": val_loader}
        datasets = {key: loader.dataset for key, loader in loaders.items() if loader is not None}
        return open_run(self.config, trainer, checkpoints, datasets)

    @property
    def source_fields(self) -> frozenset[str]:
        """What the estimator wants that only the source can make."""
        needed = fields_needed(get_adv_estimator_fn(self.config.algorithm.adv_estimator))
        return needed & {"reward_baselines"}

    @property
    def row_fields(self) -> tuple[str, ...]:
        """Columns of the data that generation reads: images, and agent loops want more than tokens."""
        agents = ROW_FIELDS if self.config.actor_rollout_ref.rollout.agent_loop is not None else ()
        return ("multi_modal_inputs", *agents)

    def build_source(self, dataloader: Any, rollout: Rollout, scorer: Scorer) -> Source:
        """Where training batches come from: generation on request, with the groups filtered where configured."""
        config, algorithm, section = self.config, self.config.algorithm, self.config.actor_rollout_ref.rollout
        n = section.n
        source: Source
        if section.over_sample_rate:
            source = OverSamplingSource(
                dataloader,
                rollout,
                n,
                scorer,
                groups=config.groups_per_batch,
                in_progress=config.groups_in_progress,
                carry=section.partial_rollout,
                max_staleness=section.max_staleness,
                parts=config.trainer.world_size if section.mode == "sync" else section.agent.num_workers,
                row_fields=self.row_fields,
            )
        else:
            source = SyncSource(
                dataloader,
                rollout,
                n,
                scorer,
                greedy_baselines="reward_baselines" in self.source_fields,
                row_fields=self.row_fields,
            )
        chosen = algorithm.filter_groups
        if not chosen.enable:
            return source
        return GroupFilter(
            source,
            groups=self.config.data.train_batch_size * section.rows_per_sample,
            n=n,
            metric=chosen.metric,
            max_batches=chosen.max_num_gen_batches,
            fill=chosen.on_exhausted == "fill",
        )

    def build_train_loader(self, tokenizer: Any, processor: Any | None) -> Any:
        """The stateful loader of training prompts."""
        data = self.config.data
        dataset = create_dataset(data.train_files, tokenizer, data, processor, data.train_max_samples)
        # prompts of which the samples are dropped are used up, so they count in the length of an epoch
        carries = self.config.actor_rollout_ref.rollout.partial_rollout
        batch_size = self.config.groups_per_batch if carries else self.config.groups_in_progress
        return create_dataloader(
            dataset, data, batch_size=batch_size, shuffle=data.shuffle, seed=self.data_seed, drop_last=True
        )

    def build_val_loader(self, tokenizer: Any, processor: Any | None) -> Any:
        """The loader of validation prompts; None without validation files."""
        data = self.config.data
        if not data.val_files:
            return None
        dataset: Any = create_dataset(data.val_files, tokenizer, data, processor, data.val_max_samples)
        batch_size = data.val_batch_size or len(dataset)
        return create_dataloader(
            dataset,
            data,
            batch_size=batch_size,
            shuffle=data.validation_shuffle,
            seed=self.data_seed,
            drop_last=False,
        )

    @property
    def data_seed(self) -> int:
        """Seed of the order of prompts."""
        given = self.config.data.seed
        return derive_seed(self.config.trainer.seed, "data") if given is None else given

    def build_tracker(self, total_steps: int) -> Any:
        """The trackers that ``trainer.logger`` names."""
        trainer = self.config.trainer
        return Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            config=to_dict(self.config),
            default_local_dir=trainer.default_local_dir,
            total_steps=total_steps,
            run_ids=self.run_ids,
        )

    def check_agents(self, tokenizer: Any) -> None:
        """Fail early on unknown or misconfigured agent loops and tools."""
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        if rollout.agent_loop is not None:
            AgentLoopRunner(rollout, tokenizer, template_kwargs=data.apply_chat_template_kwargs, name="check").close()

    def check_devices(self) -> None:
        """More GPUs than this machine has is an error before anything is loaded (one node; Ray checks the rest)."""
        import torch

        trainer = self.config.trainer
        if self.device == "cuda" and trainer.nnodes == 1 and trainer.n_gpus_per_node > torch.cuda.device_count():
            raise ConfigError(
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has "
                f"{torch.cuda.device_count()} GPU(s)"
            )

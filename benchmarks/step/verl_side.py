"""This side of ``bench_step.py``: the trainer that ``main_ppo`` runs, in one process, with the phases timed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from step.protocol import Reporter
from step.workload import Workload
from verl.config import PPOConfig
from verl.config.cli import parse_cli
from verl.trainer.task_runner import TaskRunner
from verl.utils.logging import setup_logging

PHASES = {
    "generate_sequences": "generate",
    "compute_log_prob": "log_probs",
    "update_actor": "update",
    "sync_weights": "sync",
}


def command_line(work: Workload) -> list[str]:
    """The settings of a run, as one would type them."""
    policy = "actor_rollout_ref"
    compute = "float32" if work.precision == "float32" else "bfloat16"
    settings: dict[str, Any] = {
        "data.train_files": work.prompts_file,
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt_length,
        "data.max_response_length": work.response_length,
        "data.seed": work.seed,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": work.bypass,
        f"{policy}.model.path": work.model,
        f"{policy}.model.enable_gradient_checkpointing": False,
        f"{policy}.actor.ppo_mini_batch_size": work.prompts // work.mini_batches,
        f"{policy}.actor.optim.lr": work.lr,
        f"{policy}.actor.optim.betas": list(work.betas),
        f"{policy}.actor.optim.lr_warmup_steps": work.warmup,
        f"{policy}.actor.optim.lr_scheduler_type": "cosine",
        f"{policy}.actor.optim.min_lr_ratio": 0.1,
        f"{policy}.actor.fsdp_config.mixed_precision.param_dtype": compute,
        f"{policy}.rollout.name": "hf",
        f"{policy}.rollout.dtype": compute,
        f"{policy}.rollout.n": work.n,
        f"{policy}.rollout.ignore_eos": work.fixed,
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.cpu_threads_per_worker": work.threads,
        "trainer.total_training_steps": work.total_steps,
        "trainer.total_epochs": work.total_steps,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.seed": work.seed,
        "trainer.logger": "console",
    }
    if work.precision == "pure-bfloat16":
        settings[f"{policy}.actor.fsdp_config.model_dtype"] = "bfloat16"
    if work.micro_rows:
        settings[f"{policy}.actor.ppo_micro_batch_size_per_gpu"] = work.micro_rows
    if work.reward == "coin":
        settings["reward.custom_reward_function.path"] = str(Path(__file__).with_name("workload.py"))
    return [f"{key}={value}" for key, value in settings.items()] + list(work.options)


class Timed:
    """A local worker group whose calls are timed as phases of the step."""

    def __init__(self, group: Any, reporter: Reporter) -> None:
        self._group = group
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        return TimedMethod(method, PHASES[name], self._reporter) if name in PHASES else method


class TimedMethod:
    """A method of a group; it computes when it is called or started, for there is one process."""

    def __init__(self, method: Any, phase: str, reporter: Reporter) -> None:
        self._method = method
        self._phase = phase
        self._reporter = reporter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._reporter.phase(self._phase):
            result = self._method(*args, **kwargs)
        if self._phase == "generate":
            tokens, total = (int(result.batch[name].sum()) for name in ("response_mask", "attention_mask"))
            self._reporter.add(tokens=tokens, prompt_tokens=total - tokens, rows=len(result))
        return result

    def start(self, *args: Any, **kwargs: Any) -> Any:
        with self._reporter.phase(self._phase):
            return self._method.start(*args, **kwargs)


class StepTracker:
    """Ends one step and waits for the next."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.reporter.add(reward=float(metrics["critic/score/mean"]))
        self.reporter.finish()
        self.reporter.wait()

    def log_samples(self, samples: Any, step: int) -> None:
        """There is no validation."""

    def finish(self) -> None:
        """Nothing is open."""


class Runner(TaskRunner):
    """The runner of ``main_ppo`` with the tracker above."""

    reporter: Reporter

    def build_tracker(self, total_steps: int) -> Any:
        return StepTracker(self.reporter)


def main() -> None:
    work = Workload.from_json(sys.argv[1])
    torch.set_num_threads(work.threads)
    reporter = Reporter()
    setup_logging()
    runner = Runner(parse_cli(PPOConfig, "ppo_trainer", command_line(work)))
    runner.reporter = reporter
    trainer = runner.build_trainer()
    timed: Any = Timed(trainer.actor_rollout, reporter)
    trainer.actor_rollout = trainer.rollout = timed
    trainer.source.rollout = timed  # type: ignore[attr-defined]
    reporter.wait()
    trainer.fit()


if __name__ == "__main__":
    main()

"""Train a policy with PPO, GRPO and their relatives: ``python -m verl.trainer.main_ppo key=value ...``."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

from verl.config import PPOConfig
from verl.config.base import seal
from verl.config.cli import parse_cli
from verl.errors import ConfigError, LostProcessError, WorkerError
from verl.utils.exit_status import exit_code, start_program

logger = logging.getLogger(__name__)


def run_ppo(config: PPOConfig) -> bool:
    """Run on Ray, joining a running cluster or starting a local one, or in this process alone.

    Returns:
        False if the run saved and ended before its last step.
    """
    # torch and its friends are imported from here on, when the configuration is known to be good
    from verl.trainer.task_runner import TaskRunner

    restarts = 0
    while True:
        runner = TaskRunner(config)
        try:
            finished = runner.run()
            runner.print_closing()
            return finished
        except (WorkerError, LostProcessError) as error:
            if restarts >= config.trainer.max_restarts or isinstance(error, ConfigError):
                raise
            restarts += 1
            logger.error(
                "%s\nstarting the workers again from the last checkpoint (restart %d of trainer.max_restarts=%d)",
                error,
                restarts,
                config.trainer.max_restarts,
            )
            if runner.has_saved:
                config = _resuming(config)


def _resuming(config: PPOConfig) -> PPOConfig:
    """The configuration of a run that goes on from its own checkpoints, wherever it began."""
    trainer = replace(config.trainer, resume_mode="auto", resume_from_path=None)
    return seal(replace(config, trainer=trainer))


def main(argv: list[str] | None = None) -> int:
    """Command line: exit code 0 when done, 2 for a bad configuration or bad input, 1 for a failed run.

    75 is the code of a run that saved and ended early, on SIGTERM or before a deadline: starting it again goes on.
    """
    start_program()
    config = parse_cli(PPOConfig, "ppo_trainer", argv)
    return exit_code(lambda: run_ppo(config))


def __getattr__(name: str) -> Any:
    if name == "TaskRunner":  # its well-known place
        from verl.trainer.task_runner import TaskRunner

        return TaskRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main())

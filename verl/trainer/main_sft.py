"""Fine-tune on demonstrations: ``python -m verl.trainer.main_sft key=value ...``, or several ranks with torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from verl.config import FineTuningConfig, SFTConfig
from verl.config.cli import parse_cli
from verl.errors import ConfigError
from verl.utils.exit_status import exit_code, start_program

R = TypeVar("R", bound=FineTuningConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: exit code 0 when done, 2 for a bad configuration or bad input, 1 for a failed run.

    75 is the code of a run that saved and ended early, on SIGTERM or before a deadline: starting it again goes on.
    """

    def run(config: SFTConfig) -> dict[str, float] | None:
        from verl.trainer.sft_trainer import run_sft

        return run_sft(config)

    return run_command(SFTConfig, "sft_trainer", run, argv, module="verl.trainer.main_sft")


def run_command(
    schema: type[R],
    preset: str,
    run: Callable[[R], dict[str, float] | None],
    argv: Sequence[str] | None,
    *,
    module: str,
) -> int:
    """The command line of training on a fixed data set, with or without ``torchrun``; see :func:`main`.

    Args:
        schema, preset: of the configuration.
        run: trains and returns the last metrics, None if it ended early; what needs torch is imported in it.
        argv: the words of the command line; by default those of the process.
        module: of the entry point, for messages.
    """
    start_program()
    words = list(sys.argv[1:] if argv is None else argv)
    config = parse_cli(schema, preset, [*processes_started(words), *words])

    def work() -> bool:
        check_processes(config, module)
        return run(config) is not None

    try:
        return exit_code(work)
    finally:
        from verl.utils.distributed import destroy_process_group

        destroy_process_group()


def processes_started(words: Sequence[str]) -> list[str]:
    """Overrides that say how many processes ``torchrun`` started (one without it), for keys that are not given."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    counts = {"trainer.nnodes": world // local, "trainer.n_gpus_per_node": local}
    given = {word.lstrip("+").split("=", 1)[0] for word in words}
    return [f"{key}={value}" for key, value in counts.items() if key not in given]


def check_processes(config: FineTuningConfig, module: str) -> None:
    """Raise :class:`ConfigError` if another number of processes runs than the configuration says."""
    world, trainer = int(os.environ.get("WORLD_SIZE", "1")), config.trainer
    if world != trainer.world_size:
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes} times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is "
            f"{trainer.world_size} processes, but {world} started; start them with torchrun --nnodes={trainer.nnodes} "
            f"--nproc_per_node={trainer.n_gpus_per_node} -m {module} ..., or leave both keys out"
        )


if __name__ == "__main__":
    sys.exit(main())

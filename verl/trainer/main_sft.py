"""Fine-tune on demonstrations: ``python -m verl.trainer.main_sft key=value ...``, or several ranks with torchrun."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from verl.config import SFTConfig
from verl.config.cli import parse_cli
from verl.errors import ConfigError, DataError, VerlError
from verl.utils.logging import setup_logging
from verl.utils.stopping import EXIT_UNFINISHED

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: exit code 0 when done, 2 for a bad configuration or bad input, 1 for a failed run.

    75 is the code of a run that saved and ended early, on SIGTERM or before a deadline: starting it again goes on.
    """
    setup_logging()
    words = list(sys.argv[1:] if argv is None else argv)
    config = parse_cli(SFTConfig, "sft_trainer", [*processes_started(words), *words])
    try:
        check_processes(config)
        from verl.trainer.sft_trainer import run_sft

        finished = run_sft(config) is not None
    except (ConfigError, DataError) as error:
        return _fail(error, 2)
    except VerlError as error:
        return _fail(error, 1)
    finally:
        from verl.utils.distributed import destroy_process_group

        destroy_process_group()
    return 0 if finished else EXIT_UNFINISHED


def processes_started(words: Sequence[str]) -> list[str]:
    """Overrides that say how many processes ``torchrun`` started (one without it), for keys that are not given."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    counts = {"trainer.nnodes": world // local, "trainer.n_gpus_per_node": local}
    given = {word.lstrip("+").split("=", 1)[0] for word in words}
    return [f"{key}={value}" for key, value in counts.items() if key not in given]


def check_processes(config: SFTConfig) -> None:
    """Raise :class:`ConfigError` if another number of processes runs than the configuration says."""
    world, trainer = int(os.environ.get("WORLD_SIZE", "1")), config.trainer
    if world != trainer.world_size:
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes} times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is "
            f"{trainer.world_size} processes, but {world} started; start them with torchrun --nnodes={trainer.nnodes} "
            f"--nproc_per_node={trainer.n_gpus_per_node} -m verl.trainer.main_sft ..., or leave both keys out"
        )


def _fail(error: VerlError, code: int) -> int:
    logger.debug("the run failed", exc_info=True)
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""``verl explain memory key=value ...``: what a run would need, from its configuration alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config import PPOConfig, parse_cli
from verl.utils.exit_status import exit_code, start_program
from verl.utils.output import write_result

USAGE = """usage: verl explain memory [key=value ...]

example:
  verl explain memory actor_rollout_ref.model.path=model trainer.n_gpus_per_node=8 trainer.device=cuda

memory  bytes per rank, role and phase of a training run; reads the models' config.json and no weights

Keys are those of verl train; trainer.device=cuda predicts for GPUs on a machine without one.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation and return the exit code."""
    start_program()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] != "memory":
        sys.stderr.write(f"verl explain: unknown subject {words[0]!r} (known: memory)\n")
        return 2
    # no data are read, so none need be named
    config = parse_cli(PPOConfig, "ppo_trainer", ["data.train_files=unread.parquet", *words[1:]])
    from verl.utils.device import resolve_device
    from verl.workers.memory_usage import predict, table

    device = config.trainer.device

    def work() -> bool:
        kind = device if device in ("cpu", "cuda") else resolve_device(device)
        write_result(table(predict(config, kind)) + "\n")
        return True

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

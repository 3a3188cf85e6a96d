"""The ``verl`` command: one word chooses the program, everything after it belongs to that program."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import verl
from verl.utils.output import guard_streams


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose ``main()`` runs, and one line of help."""

    module: str
    help: str


COMMANDS = {
    "train": Command("verl.trainer.main_ppo", "reinforcement learning: PPO, GRPO and their relatives"),
    "sft": Command("verl.trainer.main_sft", "supervised fine-tuning"),
    "preference": Command("verl.trainer.main_preference", "training on pairs of answers: DPO, reward models"),
    "explain": Command("verl.trainer.main_explain", "what a run would need: explain memory key=value ..."),
    "generate": Command("verl.trainer.main_generation", "answer every prompt of a data set"),
    "eval": Command("verl.trainer.main_eval", "score generated responses: means and pass@k with confidence intervals"),
    "merge": Command("verl.model_merger", "make a Hugging Face directory of a checkpoint, or compare with one"),
    "selftest": Command("verl.selftest.main", "numbers do not depend on cuts; with --model: certificate of a model"),
}


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: verl COMMAND [key=value ...]\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n"
        "  -h, --help     this text; `verl COMMAND --help` describes a command\n"
        "  -V, --version  the version\n\n"
        "Keys are those of the configuration reference; `verl train --cfg job` prints all of them."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the words after ``verl``; by default those of the process.
    """
    guard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage() + "\n")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"verl {verl.__version__}\n")
        return 0
    name, rest = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(f"verl: unknown command {name!r}{hint} (known: {', '.join(COMMANDS)})\n")
        return 2
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: plug-ins lie beside the command that names them
    module = importlib.import_module(command.module)
    # Hydra and argparse read the process's own words; show them a command line that names the command.
    saved, sys.argv = sys.argv, [f"verl {name}", *rest]
    try:
        result = module.main()
    finally:
        sys.argv = saved
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())

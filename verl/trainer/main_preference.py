"""Train on pairs of answers: ``python -m verl.trainer.main_preference objective=dpo|reward_model key=value ...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config import PreferenceConfig
from verl.trainer.main_sft import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit codes as of ``main_sft``."""

    def run(config: PreferenceConfig) -> dict[str, float] | None:
        from verl.trainer.preference_trainer import run_preference

        return run_preference(config)

    return run_command(PreferenceConfig, "preference_trainer", run, argv, module="verl.trainer.main_preference")


if __name__ == "__main__":
    sys.exit(main())

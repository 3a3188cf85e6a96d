"""Well-known path of the fine-tuning entry point: ``torchrun --nproc_per_node=N -m verl.trainer.fsdp_sft_trainer``."""

from __future__ import annotations

import sys

from verl.trainer.main_sft import main

if __name__ == "__main__":
    sys.exit(main())

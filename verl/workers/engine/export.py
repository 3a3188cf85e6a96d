"""Writing the trained model of an engine as a Hugging Face directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.final_model import EXPORT_DIR
from verl.utils.contents import PROVENANCE_FILE
from verl.utils.distributed import barrier
from verl.utils.json_text import write_json
from verl.workers.engine.base import TrainEngine
from verl.workers.engine.checkpoint import on_all_ranks

logger = logging.getLogger(__name__)


def export_model(engine: TrainEngine, root: Path, provenance: Mapping[str, Any]) -> Path:
    """Write ``root/huggingface``: weights, config, tokenizer and ``training.json``; adapters are merged. Collective.

    An older directory of that name is replaced when the new one is complete.

    Args:
        engine: of this rank.
        root: directory of the run, which all ranks see.
        provenance: content of ``training.json``.

    Returns:
        The directory.

    Raises:
        CheckpointError: it cannot be written (on every rank).
    """
    staging, final = root / f".{EXPORT_DIR}.new", root / EXPORT_DIR
    world = engine.layout.world_size

    def clear() -> None:
        if engine.layout.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(staging, ignore_errors=True)

    def finish() -> None:
        if engine.layout.rank != 0:
            return
        write_json(staging / EXPORT_DIR / PROVENANCE_FILE, provenance)
        shutil.rmtree(final, ignore_errors=True)
        (staging / EXPORT_DIR).rename(final)
        shutil.rmtree(staging)

    on_all_ranks(world, f"write {staging}", clear)
    engine.save(staging, frozenset({"hf_model"}))
    barrier()
    on_all_ranks(world, f"write {final}", finish)
    return final

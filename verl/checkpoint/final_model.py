"""The model that a finished run leaves: ``default_local_dir/huggingface``, as ``from_pretrained`` reads it.

``training.json`` beside the weights says which run made it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verl
from verl.checkpoint.fingerprint import Fingerprint
from verl.utils.contents import PROVENANCE_FILE

EXPORT_DIR = "huggingface"


def provenance(program: str, step: int, fingerprint: Fingerprint | None) -> dict[str, Any]:
    """What ``training.json`` says.

    Args:
        program: word of the command ``verl``, for example ``train``.
        step: last step of the training.
        fingerprint: of the run.
    """
    return {
        "program": program,
        "step": step,
        "verl": verl.__version__,
        "fingerprint": None if fingerprint is None else fingerprint.as_json(),
    }


def provenance_file(root: Path) -> Path:
    """Where ``training.json`` of a run directory is or would be."""
    return root / EXPORT_DIR / PROVENANCE_FILE


def is_exported(root: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether the model of a run directory is of this run and step."""
    try:
        found = json.loads(provenance_file(root).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found == json.loads(json.dumps(wanted))

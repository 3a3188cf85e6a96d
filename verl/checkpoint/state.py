"""Small controller-side state files inside a checkpoint: the data loader's position, counters, coefficients.

They hold tensors, numbers, strings and plain containers of those. Nothing in such a file can run code when it is read.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from verl.errors import CheckpointError
from verl.utils.fs import atomic_open, write_error

DATALOADER_STATE = "data.pt"
TRAINER_STATE = "trainer_state.pt"


def save_state(path: str | Path, state: Any) -> None:
    """Write state as a whole file or not at all.

    Raises:
        CheckpointError: the disk is full or the directory is not writable.
    """
    try:
        with atomic_open(path, "wb") as handle:
            torch.save(state, handle)
    except OSError as error:
        raise write_error(error, path, "checkpoint file") from error


def load_state(path: str | Path) -> Any:
    """Read what :func:`save_state` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, or holds objects that are not plain state.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint {str(path.parent)!r} has no {path.name}; it was saved without that state, or is incomplete"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read: {error}") from error

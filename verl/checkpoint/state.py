"""Small controller-side state files inside a checkpoint: the data loader's position, counters, coefficients.

They hold tensors, numbers, strings and plain containers of those. Nothing in such a file can run code when it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from verl.errors import CheckpointError, VerlError
from verl.utils.fs import atomic_open, write_error
from verl.utils.plain_pickle import describe_damage

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
    except Exception as error:  # torch and pickle raise whatever the bytes lead them to
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read: {describe_damage(error)}") from error


def load_trainer_state(directory: Path) -> dict[str, Any]:
    """The controller's own state in a step directory.

    Raises:
        CheckpointError: the file is missing or damaged, or does not say which step it is of.
    """
    path = directory / TRAINER_STATE
    state = load_state(path)
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, int) or not isinstance(state.get("tracker", {}), dict):
        raise CheckpointError(f"checkpoint file {str(path)!r} holds no state of a run: {_kind(state)}")
    return dict(state)


def load_data_state(directory: Path) -> dict[str, Any]:
    """The place in the training data in a step directory.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = directory / DATALOADER_STATE
    state = load_state(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint file {str(path)!r} holds no place in the data: {_kind(state)}")
    return dict(state)


@contextlib.contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Within the context, a state that has another form than expected is an error of that file.

    Raises:
        CheckpointError: in place of what Python raises about missing names and wrong types.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, VerlError):
            raise
        raise CheckpointError(
            f"checkpoint file {str(path)!r} holds something else than this run can continue from "
            f"({type(error).__name__}: {error})"
        ) from error


def _kind(value: Any) -> str:
    """A value in few words."""
    return (
        f"an object with {', '.join(map(str, value))[:80]}" if isinstance(value, dict) else f"a {type(value).__name__}"
    )

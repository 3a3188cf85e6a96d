"""Checkpoints of a run: written atomically, found again, kept or removed by rule."""

from __future__ import annotations

from verl.checkpoint.manager import CheckpointManager, StagedCheckpoint
from verl.checkpoint.state import load_state, save_state

__all__ = ["CheckpointManager", "StagedCheckpoint", "load_state", "save_state"]

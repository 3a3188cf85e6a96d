"""The hand-over of weights between training and generation, which share one set of parameters where they can."""

from __future__ import annotations

from verl.workers.sharding_manager.base import SyncReport, WeightSource
from verl.workers.sharding_manager.sync import WeightSync

__all__ = ["SyncReport", "WeightSource", "WeightSync"]

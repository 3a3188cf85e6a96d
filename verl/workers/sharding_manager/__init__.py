"""The weight sync between training and generation, which share one set of parameters where they can.

``sync`` joins a source, a transport and a sink. ``transports`` holds the ways that weights travel. ``reshard`` changes
how a model is divided over ranks. ``select`` chooses the path for a pair of engines.
"""

from __future__ import annotations

from verl.workers.sharding_manager.base import SendReport, SyncReport, WeightSink, WeightSource
from verl.workers.sharding_manager.select import SHARDING_MANAGERS, make_sharding_manager
from verl.workers.sharding_manager.sync import WeightReceiver, WeightSender, WeightSync
from verl.workers.sharding_manager.transports.base import Transport

__all__ = [
    "SHARDING_MANAGERS",
    "SendReport",
    "SyncReport",
    "Transport",
    "WeightReceiver",
    "WeightSender",
    "WeightSink",
    "WeightSource",
    "WeightSync",
    "make_sharding_manager",
]

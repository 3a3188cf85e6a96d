"""The weight sync between training and generation, which share one set of parameters where they can.

``sync`` joins a source, a transport and a sink; ``colocated``, ``broadcast`` and ``disk`` are the transports;
``layout``, ``reshard`` and ``resharder`` change how a model is cut over ranks; ``bindings`` says which engines fit.
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

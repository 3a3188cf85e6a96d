"""The roles of a run as workers: their remote methods, written once for every training engine.

A role owns engines and turns a :class:`~verl.protocol.DataProto` shard into engine calls and back. It knows
neither how the engine shards the model (``fsdp_workers.py`` binds that) nor which algorithm runs
(the controller does). Every worker of a group calls the same method with its own shard.
"""

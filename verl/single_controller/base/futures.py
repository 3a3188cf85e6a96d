"""Results that may not be there yet, the same for every controller."""

from __future__ import annotations

import sys
from typing import Any

from verl.protocol import Completed, DataProtoFuture


def resolve(result: Any, timeout_s: float | None = None) -> Any:
    """The value of what a worker-group method returned, blocking or not, under Ray or local.

    Args:
        result: a :class:`~verl.protocol.DataProtoFuture`, a reference, a list of references, or a plain value, which
            is returned unchanged.
        timeout_s: how long to wait for Ray references.

    Raises:
        WorkerError: a worker failed. One raised by Ray for a bare reference is a ``WorkerError``, too.
    """
    if isinstance(result, DataProtoFuture):
        return result.get()
    if isinstance(result, Completed):
        return result.value
    if is_ray_reference(result):
        import ray

        return ray.get(result, timeout=timeout_s)
    if isinstance(result, list) and any(is_reference(item) or isinstance(item, DataProtoFuture) for item in result):
        return [resolve(item, timeout_s) for item in result]
    return result


def is_ray_reference(value: Any) -> bool:
    """Whether ``value`` is a Ray object reference; without importing Ray, for there are none before someone does."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


def is_reference(value: Any) -> bool:
    """Whether ``value`` stands for a worker's result instead of being it."""
    return isinstance(value, Completed) or is_ray_reference(value)

"""Results that may not be there yet, the same for every controller."""

from __future__ import annotations

import sys
from typing import Any

from verl.protocol import Completed, DataProtoFuture, fetch_references


def resolve(result: Any, timeout_s: float | None = None) -> Any:
    """The value of what a worker-group method returned, blocking or not, under Ray or local.

    Args:
        result: a :class:`~verl.protocol.DataProtoFuture`, a reference, a list of references, or a plain value, which
            is returned unchanged.
        timeout_s: how long to wait for Ray references.

    Raises:
        WorkerError: a worker failed.
    """
    if isinstance(result, DataProtoFuture):
        return result.get()
    if is_reference(result):
        return fetch_references([result], timeout_s)[0]
    if isinstance(result, list) and result and all(map(is_reference, result)):
        return fetch_references(result, timeout_s)
    return result


def is_ray_reference(value: Any) -> bool:
    """Whether ``value`` is a Ray object reference; without importing Ray, for there are none before someone does."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


def is_reference(value: Any) -> bool:
    """Whether ``value`` stands for a worker's result instead of being it."""
    return isinstance(value, Completed) or is_ray_reference(value)

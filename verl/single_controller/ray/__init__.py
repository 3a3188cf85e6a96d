"""Worker groups as Ray actors."""

from __future__ import annotations

from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from verl.single_controller.ray.resource_pool import RayResourcePool, merge_resource_pool, split_resource_pool

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "merge_resource_pool",
    "split_resource_pool",
]

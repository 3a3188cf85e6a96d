"""What every controller implementation shares. Imports no Ray."""

from __future__ import annotations

from verl.single_controller.base.classes import ClassWithInitArgs, ColocatedClasses, ResourcePool
from verl.single_controller.base.futures import resolve
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import StartedCall, WorkerGroup

__all__ = ["ClassWithInitArgs", "ColocatedClasses", "ResourcePool", "StartedCall", "Worker", "WorkerGroup", "resolve"]

"""Worker groups in the controller's own process."""

from __future__ import annotations

from verl.single_controller.local.worker_group import LocalWorkerGroup

__all__ = ["LocalWorkerGroup"]

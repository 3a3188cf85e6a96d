"""Starting Ray."""

from __future__ import annotations

import logging
from typing import Any

import ray

logger = logging.getLogger(__name__)


def start_ray(**settings: Any) -> None:
    """``ray.init``, tried twice where Ray does not come up in time.

    Ray itself waits half a minute for its processes and then gives up, which is too short on a machine that is busy.

    Args:
        settings: arguments of ``ray.init``.
    """
    try:
        ray.init(**settings)
    except Exception as error:  # Ray raises a plain Exception there
        if "timed out during startup" not in str(error):
            raise
        logger.warning("Ray did not come up in time; trying once more")
        ray.shutdown()
        ray.init(**settings)

"""A plug-in for servers under test: engines that take their time for a step.

A tiny model is done before a message from another process arrives; a request can only be interrupted if it lasts.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from verl.workers.rollout.hf.runner import BatchRunner

STEP_S = 0.02


def slowed(step: Callable[..., Any]) -> Callable[..., Any]:
    def slow(self: Any) -> Any:
        time.sleep(STEP_S)
        return step(self)

    return slow


BatchRunner.step = slowed(BatchRunner.step)  # type: ignore[method-assign]
if importlib.util.find_spec("vllm") is not None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    VLLMRolloutEngine._step = slowed(VLLMRolloutEngine._step)  # type: ignore[method-assign]

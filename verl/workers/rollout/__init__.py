"""Rollout engines: they turn prompts into sampled completions with the current policy's weights.

``get_rollout_class`` finds an engine by the name in ``rollout.name`` and imports it only then, so that an engine's
dependencies are needed only by those who use it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.workers.rollout.engine import RolloutEngine

#: engine name -> "module:class"
ROLLOUT_ENGINES: dict[str, str] = {
    "hf": "verl.workers.rollout.hf.engine:HFRolloutEngine",
    "sglang": "verl.workers.rollout.sglang.engine:SGLangRolloutEngine",
    "vllm": "verl.workers.rollout.vllm.engine:VLLMRolloutEngine",
}

#: names that users of this ecosystem know but that this version does not serve
_NOT_SERVED = ("trtllm",)


def get_rollout_class(name: str) -> Callable[..., RolloutEngine]:
    """The rollout engine class called ``name``; it is made from the model and rollout sections and a device.

    Raises:
        ConfigError: the name is unknown, or names an engine that this version does not have.
    """
    if name in ROLLOUT_ENGINES:
        module, _, attribute = ROLLOUT_ENGINES[name].partition(":")
        cls: Callable[..., RolloutEngine] = getattr(importlib.import_module(module), attribute)
        return cls
    known = ", ".join(sorted(ROLLOUT_ENGINES))
    if name in _NOT_SERVED:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name!r}: this version does not have the engine; set "
            f"actor_rollout_ref.rollout.name=hf, vllm or sglang (known: {known})"
        )
    near = difflib.get_close_matches(str(name), [*ROLLOUT_ENGINES, *_NOT_SERVED], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"actor_rollout_ref.rollout.name={name!r} is not a rollout engine{hint} (known: {known})")

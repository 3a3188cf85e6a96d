"""Text environments in Gymnasium's form: ``reset`` and ``step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError, RolloutError
from verl.interactions.base import BaseInteraction
from verl.tools.threads import run_in_thread
from verl.utils.dynamic_import import load_target


class GymInteraction(BaseInteraction):
    """Each turn of the model is an action; the environment answers with what is seen next.

    The environment has ``reset(seed=..., options=...) -> (observation, info)`` and ``step(action) -> (observation,
    reward, terminated, truncated, info)`` with text as observations and actions. What ``reset`` shows follows the
    prompt. ``info["state"]`` names the state where the text does not tell it.

    Config:
        env: what makes an environment, ``package.module.name`` or ``file.py:name``.
        env_kwargs: its arguments.
        reward: as for :class:`BaseInteraction`; by default ``step``.

    Rows give ``seed``, ``options`` and further arguments of the maker (``env_kwargs``) in ``interaction_kwargs``.
    """

    default_reward = "step"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if "env" not in self.config:
            raise ConfigError(f"interaction {self.name!r}: give config.env, what makes an environment")
        self._make = load_target(str(self.config["env"]))
        self._running: dict[str, tuple[Any, str]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Make and reset an environment."""
        name = await super().start_interaction(instance_id)
        arguments = {**(self.config.get("env_kwargs") or {}), **(kwargs.get("env_kwargs") or {})}

        def start() -> tuple[Any, str]:
            env = self._make(**arguments)
            observation, _ = env.reset(seed=kwargs.get("seed"), options=kwargs.get("options"))
            return env, str(observation)

        self._running[name] = await run_in_thread(start)
        return name

    async def opening(self, instance_id: str) -> str | None:
        """What ``reset`` has shown."""
        return self._running[instance_id][1]

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Take the model's turn as an action."""
        if instance_id not in self._running:
            raise RolloutError(f"trajectory {instance_id} has no environment; start_interaction comes first")
        env = self._running[instance_id][0]
        action = str(messages[-1]["content"]).strip()
        observation, reward, terminated, truncated, info = await run_in_thread(env.step, action)
        return bool(terminated or truncated), str(observation), float(reward), dict(info or {})

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Close the environment."""
        env, _ = self._running.pop(instance_id, (None, ""))
        if hasattr(env, "close"):
            await run_in_thread(env.close)

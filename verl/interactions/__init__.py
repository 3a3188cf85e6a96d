"""Simulated users and environments that answer the model's turns."""

from __future__ import annotations

from verl.interactions.base import BaseInteraction
from verl.interactions.gym_env import GymInteraction
from verl.interactions.reasoning_gym import ReasoningGymEnv
from verl.interactions.textarena import TextArenaEnv, TextArenaGame

__all__ = ["BaseInteraction", "GymInteraction", "ReasoningGymEnv", "TextArenaEnv", "TextArenaGame"]

"""Simulated users and environments that answer the model's turns."""

from __future__ import annotations

from verl.interactions.base import BaseInteraction
from verl.interactions.gym_env import GymInteraction

__all__ = ["BaseInteraction", "GymInteraction"]

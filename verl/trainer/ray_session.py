"""Ray for the time of a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl.config import PPOConfig


@contextmanager
def ray_session(config: PPOConfig) -> Iterator[None]:
    """Ray for the time of the run; a Ray that was running before is left running."""
    from verl.single_controller.ray.session import ray_cluster

    defaults = {"include_dashboard": False, "log_to_driver": True, "logging_level": "ERROR"}
    with ray_cluster({**defaults, **config.ray_kwargs.ray_init}):
        yield

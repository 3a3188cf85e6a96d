"""The smallest correct command line, which tests change."""

from __future__ import annotations

import pytest

from verl.config import PPOConfig, SFTConfig, load_config
from verl.errors import ConfigError

PPO = (
    "data.train_files=train.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.n_gpus_per_node=2",
)
SFT = ("data.train_files=train.parquet", "model.path=Qwen/Qwen2.5-0.5B", "data.train_batch_size=8")


@pytest.fixture
def ppo():
    """Load a reinforcement-learning configuration from the smallest command line plus overrides."""
    return lambda *overrides: load_config(PPOConfig, "ppo_trainer", [*PPO, *overrides])


@pytest.fixture
def sft(monkeypatch):
    """Load a fine-tuning configuration from the smallest command line plus overrides."""
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda *overrides: load_config(SFTConfig, "sft_trainer", [*SFT, *overrides])


@pytest.fixture
def problems(ppo):
    """Return the problems that a command line is refused with, without the title."""

    def of(*overrides: str, load=ppo) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*overrides)
        title, *lines = str(caught.value).split("\n")
        assert title == "the configuration has problems:"
        assert all(line.startswith("  ") for line in lines)
        return [line[2:] for line in lines]

    return of

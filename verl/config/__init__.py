"""Configuration: dataclasses that hold every key, its default, its help text and its checks.

Imports no torch, ray or transformers, so that a configuration can be read, checked and printed anywhere.
"""

from __future__ import annotations

from verl.config.actor import ActorConfig, ActorRolloutRefConfig, PolicyLossConfig, RefConfig
from verl.config.algorithm import AlgorithmConfig, KLCtrlConfig
from verl.config.base import Config, MicroBatch, find_problems, seal, to_dict, to_yaml
from verl.config.checkpoint import CheckpointConfig
from verl.config.cli import main, parse_cli
from verl.config.correction import RolloutCorrectionConfig
from verl.config.critic import CriticConfig
from verl.config.data import CustomClsConfig, DataConfig
from verl.config.filter_groups import FilterGroupsConfig
from verl.config.fsdp import FSDPConfig, MixedPrecisionConfig, WrapPolicyConfig
from verl.config.load import load_config
from verl.config.megatron import MegatronConfig
from verl.config.model import ModelConfig
from verl.config.multi_turn import AgentConfig, MultiTurnConfig
from verl.config.optim import OptimConfig
from verl.config.ppo import PPOConfig, RayKwargsConfig
from verl.config.preference import PreferenceConfig, PreferenceDataConfig, PreferenceLossConfig
from verl.config.reward import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig, RewardModelConfig
from verl.config.rollout import RolloutConfig, ValKwargsConfig
from verl.config.sft import (
    ExamplesConfig,
    FineTuningConfig,
    MultiturnConfig,
    SFTConfig,
    SFTDataConfig,
    SFTModelConfig,
    SFTTrainerConfig,
)
from verl.config.trainer import RunConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "CustomClsConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "ExamplesConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "FineTuningConfig",
    "KLCtrlConfig",
    "MegatronConfig",
    "MicroBatch",
    "MixedPrecisionConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "MultiturnConfig",
    "OptimConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "PreferenceConfig",
    "PreferenceDataConfig",
    "PreferenceLossConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RewardConfig",
    "RewardManagerConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTModelConfig",
    "SFTTrainerConfig",
    "TrainerConfig",
    "ValKwargsConfig",
    "WrapPolicyConfig",
    "find_problems",
    "load_config",
    "main",
    "parse_cli",
    "seal",
    "to_dict",
    "to_yaml",
]

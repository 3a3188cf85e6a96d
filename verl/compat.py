"""Import paths that scripts and plug-ins of this ecosystem use, and where the things live here.

Each path on the left works as it is: it is a thin module, or a name that is passed on. New code should import from the
home on the right.
"""

from __future__ import annotations

import importlib
from typing import Any

WELL_KNOWN: dict[str, str] = {
    "verl.DataProto": "verl.protocol.DataProto",
    # data
    "verl.utils.dataset.RLHFDataset": "verl.data.rl_dataset.RLHFDataset",
    "verl.utils.dataset.SFTDataset": "verl.data.sft_dataset.SFTDataset",
    "verl.utils.dataset.rl_dataset.RLHFDataset": "verl.data.rl_dataset.RLHFDataset",
    "verl.utils.dataset.rl_dataset.collate_fn": "verl.data.collate.collate_fn",
    "verl.utils.dataset.sft_dataset.SFTDataset": "verl.data.sft_dataset.SFTDataset",
    "verl.utils.dataset.multiturn_sft_dataset.MultiTurnSFTDataset": "verl.data.sft_dataset.MultiTurnSFTDataset",
    "verl.utils.hf_tokenizer": "verl.utils.tokenizer.hf_tokenizer",
    "verl.utils.hf_processor": "verl.utils.tokenizer.hf_processor",
    # rewards
    "verl.utils.reward_score.default_compute_score": "verl.rewards.default.default_compute_score",
    "verl.utils.reward_score.gsm8k.compute_score": "verl.rewards.gsm8k.compute_score",
    "verl.utils.reward_score.gsm8k.extract_solution": "verl.rewards.gsm8k.extract_solution",
    "verl.utils.reward_score.math.compute_score": "verl.rewards.math.compute_score",
    "verl.utils.reward_score.math_reward.compute_score": "verl.rewards.math.compute_score",
    "verl.utils.reward_score.math_verify.compute_score": "verl.rewards.math.compute_score_symbolic",
    "verl.utils.reward_score.math_dapo.compute_score": "verl.rewards.dapo_math.compute_score",
    "verl.utils.reward_score.geo3k.compute_score": "verl.rewards.geometry3k.compute_score",
    "verl.utils.reward_score.search_r1_like_qa_em.compute_score": "verl.rewards.search_qa.compute_score",
    "verl.utils.reward_score.countdown.compute_score": "verl.rewards.countdown.compute_score",
    "verl.workers.reward_manager.register": "verl.rewards.manager.register",
    "verl.workers.reward_manager.get_reward_manager_cls": "verl.rewards.manager.get_reward_manager_cls",
    "verl.workers.reward_manager.NaiveRewardManager": "verl.rewards.managers.NaiveRewardManager",
    "verl.workers.reward_manager.BatchRewardManager": "verl.rewards.managers.BatchRewardManager",
    "verl.workers.reward_manager.DAPORewardManager": "verl.rewards.managers.DAPORewardManager",
    "verl.workers.reward_manager.PrimeRewardManager": "verl.rewards.managers.PrimeRewardManager",
    "verl.trainer.ppo.reward.load_reward_manager": "verl.rewards.loading.load_reward_manager",
    # algorithms
    "verl.trainer.ppo.core_algos.register_adv_est": "verl.algorithms.registry.register_adv_est",
    "verl.trainer.ppo.core_algos.get_adv_estimator_fn": "verl.algorithms.registry.get_adv_estimator_fn",
    "verl.trainer.ppo.core_algos.register_policy_loss": "verl.algorithms.registry.register_policy_loss",
    "verl.trainer.ppo.core_algos.get_policy_loss_fn": "verl.algorithms.registry.get_policy_loss_fn",
    "verl.trainer.ppo.core_algos.agg_loss": "verl.algorithms.aggregate.agg_loss",
    "verl.trainer.main_ppo.TaskRunner": "verl.trainer.task_runner.TaskRunner",
    "verl.trainer.ppo.ray_trainer.compute_advantage": "verl.trainer.ppo.advantage.compute_advantage",
    "verl.trainer.ppo.ray_trainer.apply_kl_penalty": "verl.trainer.ppo.advantage.apply_kl_penalty",
    "verl.trainer.ppo.ray_trainer.compute_response_mask": "verl.trainer.ppo.advantage.compute_response_mask",
    # agents
    "verl.experimental.agent_loop.AgentLoopBase": "verl.agent_loop.base.AgentLoopBase",
    "verl.experimental.agent_loop.AgentLoopOutput": "verl.agent_loop.base.AgentLoopOutput",
    "verl.experimental.agent_loop.register": "verl.agent_loop.base.register",
    "verl.tools.base_tool.BaseTool": "verl.tools.base_tool.BaseTool",
    "verl.tools.schemas.ToolResponse": "verl.tools.schemas.ToolResponse",
    "verl.tools.schemas.OpenAIFunctionToolSchema": "verl.tools.schemas.OpenAIFunctionToolSchema",
    "verl.interactions.base.BaseInteraction": "verl.interactions.base.BaseInteraction",
    # workers
    "verl.single_controller.ray.RayWorkerGroup": "verl.single_controller.ray.base.RayWorkerGroup",
    "verl.single_controller.ray.RayResourcePool": "verl.single_controller.ray.resource_pool.RayResourcePool",
    "verl.workers.fsdp_workers.ActorRolloutRefWorker": "verl.workers.fsdp_workers.ActorRolloutRefWorker",
    "verl.workers.fsdp_workers.CriticWorker": "verl.workers.fsdp_workers.CriticWorker",
    "verl.utils.tracking.Tracking": "verl.utils.tracking.Tracking",
}
"""Well-known path of an object -> its path here."""


def load(path: str) -> Any:
    """The object at a dotted path, for example ``verl.utils.dataset.rl_dataset.RLHFDataset``.

    Raises:
        ImportError: no such module, or no such name in it.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ImportError(f"module {module!r} has no {name!r}") from None

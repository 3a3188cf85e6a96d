"""The worker that holds an implicit process reward model (PRIME)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from verl.algorithms.prime import implicit_rewards
from verl.config import (
    RewardModelConfig,
)
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching, TrainEngine
from verl.workers.engine.images import engine_rows
from verl.workers.losses import implicit_reward_model_loss
from verl.workers.roles.base import POLICY, TrainedModelWorker, measured


class ImplicitRewardWorker(TrainedModelWorker):
    """A language model whose log-ratio to its frozen reference is a reward for every token, learnt from outcomes.

    It reads the policy's tokens, so it must have the policy's vocabulary.

    Args:
        config: the ``reward_model`` section.
        rollout_n: training rows per prompt, because ``mini_batch_size`` counts prompts.
    """

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig, rollout_n: int = 1, **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.rollout_n = rollout_n

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the model and its reference and build the engines. Collective."""
        config = self.config
        reference = replace(
            config.model, path=config.ref_path or config.model.path, lora_rank=0, lora_adapter_path=None
        )
        self.ref = self.make_engine(reference, config, None, head="lm")
        self.ref.build()
        self.engine = self.make_engine(config.model, config, config.optim, head="lm", checkpoint=config.checkpoint)
        self.engine.build()
        self.join_mesh("reward_model", self.engine)
        self.loss = implicit_reward_model_loss(config)

    def _log_probs(self, engine: TrainEngine, batch: TensorDict) -> torch.Tensor:
        with engine.resident(optimizer=False):
            out = engine.forward(batch, POLICY, micro=MicroBatching(*self.config.micro_batch()))
        return out["log_probs"].cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"), reuse_fields=True)
    @measured("log_prob")
    def compute_rm_ref_log_prob(self, data: DataProto) -> DataProto:
        """``rm_ref_log_prob`` (B,R) of the frozen reference, without gradients."""
        return DataProto.from_dict({"rm_ref_log_prob": self._log_probs(self.ref, engine_rows(data))})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"), reuse_fields=True)
    @measured("log_prob")
    def compute_process_rewards(self, data: DataProto) -> DataProto:
        """``process_rewards`` (B,R) of the model as it is now; reads ``rm_ref_log_prob``."""
        batch = engine_rows(data)
        rewards = implicit_rewards(
            self._log_probs(self.engine, batch), batch["rm_ref_log_prob"], batch["response_mask"], self.config.beta
        )
        return DataProto.from_dict({"process_rewards": rewards})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"),
        auto_padding=False,
        reuse_fields=True,
    )
    @measured("update")
    def update_reward_model(self, data: DataProto) -> MetricSet:
        """Learn the ``outcomes`` (B,) of this worker's rows."""
        config = self.config
        rows = config.mini_batch_size * self.rollout_n // self.engine.layout.dp_size
        with self.engine.resident(optimizer=True):
            return self.run_update(
                self.engine,
                engine_rows(data),
                prefix="reward_model",
                loss=self.loss,
                mini_batch_size=rows,
                epochs=1,
                micro=MicroBatching(*config.micro_batch()),
            )

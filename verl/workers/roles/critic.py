"""The worker that holds the value model."""

from __future__ import annotations

from typing import Any

from verl.config import (
    CriticConfig,
)
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.batching import MINI_BATCH_ROWS
from verl.workers.engine.images import engine_rows
from verl.workers.losses import critic_loss
from verl.workers.roles.base import VALUES, TrainedModelWorker, measured


class CriticWorker(TrainedModelWorker):
    """The value model.

    Args:
        config: the ``critic`` section.
        rollout_n: training rows per prompt, because ``ppo_mini_batch_size`` counts prompts.
    """

    config: CriticConfig

    def __init__(self, config: CriticConfig, rollout_n: int = 1, **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.rollout_n = rollout_n

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the backbone, add the value head and build the engine. Collective."""
        config = self.config
        self.engine = self.make_engine(
            config.model,
            config,
            config.optim,
            head="value",
            checkpoint=config.checkpoint,
        )
        self.engine.build()
        self.join_mesh("critic", self.engine)
        self.loss = critic_loss(config)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), reuse_fields=True)
    @measured("log_prob")
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` (B,R): the value before each response token, without gradients."""
        config = self.config
        with self.engine.resident(optimizer=False):
            out = self.engine.forward(
                engine_rows(data),
                VALUES,
                micro=MicroBatching(*config.forward_micro_batch()),
            )
        return DataProto.from_dict({"values": out["values"].cpu()})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), auto_padding=False, reuse_fields=True
    )
    @measured("update")
    def update_critic(self, data: DataProto) -> MetricSet:
        """Run all mini-batch updates of a step on this worker's rows."""
        config = self.config
        rows = data.meta_info.get(MINI_BATCH_ROWS, config.ppo_mini_batch_size * self.rollout_n)
        with self.engine.resident(optimizer=True):
            metrics = self.run_update(
                self.engine,
                engine_rows(data),
                prefix="critic",
                loss=self.loss,
                mini_batch_size=rows // self.engine.layout.dp_size,
                epochs=config.ppo_epochs,
                micro=MicroBatching(*config.micro_batch()),
            )
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_report(self) -> dict[str, int]:
        """Measured bytes of this rank, see :meth:`memory_of`."""
        return self.memory_of(critic=self.engine)

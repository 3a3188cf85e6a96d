"""Agent loops inside the processes that generate: each worker runs the trajectories of its rows on its own engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from verl.agent_loop.base import EngineGenerator
from verl.agent_loop.runner import AgentLoopRunner, ImageLimits, build_runner
from verl.protocol import DataProto
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register


class AgentLoopRole:
    """Mixed in before a worker class with an actor and a rollout, it answers ``generate_sequences`` by agent loops.

    Args:
        template_kwargs: ``data.apply_chat_template_kwargs``.
        image_limits: ``data.image_min_pixels`` and ``image_max_pixels`` where images may be shown, else None.
    """

    def __init__(
        self,
        *args: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        image_limits: ImageLimits | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._image_limits = image_limits
        self._template_kwargs = dict(template_kwargs or {})
        self._runner: AgentLoopRunner | None = None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run one trajectory for each row, see :meth:`AgentLoopRunner.respond`."""
        worker: Any = self

        async def run() -> DataProto:
            await worker.rollout.wake()
            try:
                return await self.runner.respond(
                    prompts,
                    EngineGenerator(worker.rollout),
                    seed=worker.seed,
                    pad_token_id=worker.rollout.pad_token_id,
                )
            finally:
                if worker.config.rollout.free_cache_engine:
                    await worker.rollout.sleep()

        answers: DataProto = worker.with_counts(asyncio.run(run()))
        return answers

    @property
    def runner(self) -> AgentLoopRunner:
        """The agent loops and tools of this process."""
        if self._runner is None:
            worker: Any = self
            self._runner = build_runner(
                worker.config.model,
                worker.config.rollout,
                self._template_kwargs,
                name=f"rank{worker.rank}",
                image_limits=self._image_limits,
            )
        return self._runner


def with_agent_loops(worker_cls: type) -> type:
    """A worker class whose generation goes through agent loops."""
    return type(worker_cls.__name__, (AgentLoopRole, worker_cls), {"__doc__": worker_cls.__doc__})

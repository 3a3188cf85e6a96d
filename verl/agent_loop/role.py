"""Agent loops inside the processes that generate: each worker runs the trajectories of its rows on its own engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from verl.agent_loop.base import EngineGenerator
from verl.agent_loop.batch import Trajectory, batch_from_trajectories, rows_from_batch
from verl.agent_loop.runner import AgentLoopRunner
from verl.protocol import DataProto
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.tokenizer import load_tokenizer


class AgentLoopRole:
    """Mixed in before a worker class with an actor and a rollout, it answers ``generate_sequences`` by agent loops.

    Args:
        template_kwargs: ``data.apply_chat_template_kwargs``.
    """

    def __init__(self, *args: Any, template_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._template_kwargs = dict(template_kwargs or {})
        self._runner: AgentLoopRunner | None = None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run one trajectory for each row.

        Args:
            prompts: as for generation without agent loops, with the columns of
                :data:`verl.agent_loop.batch.ROW_FIELDS`.

        Returns:
            What :func:`verl.agent_loop.batch.batch_from_trajectories` makes.
        """
        worker: Any = self
        config = worker.config.rollout
        meta = prompts.meta_info
        step, validate = meta["step"], meta.get("validate", False)
        rows = rows_from_batch(prompts, config, seed=worker.seed, step=step, validate=validate)
        facts = {"step": step, "validate": validate}

        async def run() -> list[Trajectory]:
            await worker.rollout.wake()
            try:
                return await self.runner.run(rows, EngineGenerator(worker.rollout), facts=facts)
            finally:
                if config.free_cache_engine:
                    await worker.rollout.sleep()

        return batch_from_trajectories(
            asyncio.run(run()),
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            pad_token_id=worker.rollout.pad_token_id,
        )

    @property
    def runner(self) -> AgentLoopRunner:
        """The agent loops and tools of this process."""
        if self._runner is None:
            worker: Any = self
            model = worker.config.model
            tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
            self._runner = AgentLoopRunner(
                worker.config.rollout, tokenizer, template_kwargs=self._template_kwargs, name=f"rank{worker.rank}"
            )
        return self._runner


def with_agent_loops(worker_cls: type) -> type:
    """A worker class whose generation goes through agent loops."""
    return type(worker_cls.__name__, (AgentLoopRole, worker_cls), {"__doc__": worker_cls.__doc__})

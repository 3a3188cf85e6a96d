"""Agent loops in processes of their own, on rollout servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import TokenGenerator
from verl.agent_loop.runner import ImageLimits, build_runner
from verl.models.loading import import_external_lib
from verl.protocol import DataProto
from verl.utils.logging import setup_logging
from verl.utils.transport import pack

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig


class AgentLoopWorker:
    """Runs the trajectories of a part of the rows. A plain class; ``rollout.mode=async`` has it as Ray actors.

    Args:
        model: the ``model`` section.
        rollout: the ``rollout`` section.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        seed: seed of the run.
        name: of this process, for logs and the file of traces.
        image_limits: ``data.image_min_pixels`` and ``image_max_pixels`` where images may be shown, else None.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        template_kwargs: Mapping[str, Any],
        seed: int,
        name: str,
        image_limits: ImageLimits | None = None,
    ) -> None:
        setup_logging(name)
        import_external_lib(model.external_lib)
        self.seed = seed
        self.runner = build_runner(model, rollout, template_kwargs, name=name, image_limits=image_limits)

    async def run(self, prompts: DataProto, generator: TokenGenerator, *, pad_token_id: int) -> Any:
        """Run one trajectory for each row.

        Args:
            prompts: as for :meth:`AgentLoopRunner.respond`.
            generator: the client of the servers.
            pad_token_id: fills prompts and responses.

        Returns:
            What :meth:`AgentLoopRunner.respond` gives, packed for the way back.
        """
        return pack(await self.runner.respond(prompts, generator, seed=self.seed, pad_token_id=pad_token_id))

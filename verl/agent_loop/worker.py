"""Agent loops in processes of their own, on rollout servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import TokenGenerator
from verl.agent_loop.batch import batch_from_trajectories, rows_from_batch
from verl.agent_loop.runner import AgentLoopRunner
from verl.models.loading import import_external_lib
from verl.protocol import DataProto
from verl.utils.logging import setup_logging
from verl.utils.tokenizer import load_tokenizer
from verl.utils.transport import pack

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

logger = logging.getLogger(__name__)


class AgentLoopWorker:
    """Runs the trajectories of a part of the rows. A plain class; ``rollout.mode=async`` has it as Ray actors.

    Args:
        model: the ``model`` section.
        rollout: the ``rollout`` section.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        seed: seed of the run.
        name: of this process, for logs and the file of traces.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        template_kwargs: Mapping[str, Any],
        seed: int,
        name: str,
    ) -> None:
        setup_logging(name)
        import_external_lib(model.external_lib)
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        self.config = rollout
        self.seed = seed
        self.runner = AgentLoopRunner(rollout, tokenizer, template_kwargs=template_kwargs, name=name)

    async def run(self, prompts: DataProto, generator: TokenGenerator, *, pad_token_id: int) -> Any:
        """Run one trajectory for each row.

        Args:
            prompts: as for :meth:`AgentLoopRole.generate_sequences`.
            generator: the client of the servers.
            pad_token_id: fills prompts and responses.

        Returns:
            What :func:`batch_from_trajectories` makes, packed for the way back.
        """
        config, meta = self.config, prompts.meta_info
        step, validate = meta["step"], meta.get("validate", False)
        rows = rows_from_batch(prompts, config, seed=self.seed, step=step, validate=validate)
        trajectories = await self.runner.run(rows, generator, facts={"step": step, "validate": validate})
        batch = batch_from_trajectories(
            trajectories,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            pad_token_id=pad_token_id,
        )
        return pack(batch)

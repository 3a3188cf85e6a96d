"""One prompt, one response."""

from __future__ import annotations

from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.token_trajectory import TokenLedger


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Answers each prompt once: the same tokens as generation without agent loops."""

    reads_images = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample one response to ``raw_prompt_ids``."""
        ledger = TokenLedger(list(kwargs["raw_prompt_ids"]))
        completion = await self.generate(ledger.prompt_ids, sampling_params, images=kwargs.get("images"))
        ledger.append_sampled(completion)
        return AgentLoopOutput.from_ledger(ledger, overlong=completion.finish_reason == "length")

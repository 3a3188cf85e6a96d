"""One prompt, one response."""

from __future__ import annotations

from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.token_trajectory import TokenTrajectory


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Answers each prompt once: the same tokens as generation without agent loops."""

    reads_images = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample one response to ``raw_prompt_ids``."""
        token_trajectory = TokenTrajectory(list(kwargs["raw_prompt_ids"]))
        completion = await self.generate(token_trajectory.prompt_ids, sampling_params, images=kwargs.get("images"))
        token_trajectory.append_sampled(completion)
        return AgentLoopOutput.from_token_trajectory(token_trajectory, overlong=completion.finish_reason == "length")

"""Agents that are programs of their own: whatever speaks OpenAI's protocol is trained by its ``base_url``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import AgentContext, AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.proxy_server import serving
from verl.agent_loop.proxy_session import ProxySession
from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.data.chat import as_messages
from verl.errors import ConfigError, RolloutError
from verl.rewards.outcome import checked_score
from verl.tools.threads import run_in_thread
from verl.utils.dynamic_import import load_object
from verl.workers.rollout.serving.openai_api import aiohttp_web
from verl.workers.rollout.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import RolloutConfig

logger = logging.getLogger(__name__)


@register("openai_agent")
class OpenAIAgentLoop(AgentLoopBase):
    """Runs the function ``rollout.agent.openai_agent`` for each row, with a model behind an address of its own.

    The function is called with ``base_url``, ``api_key`` and ``row``, and talks with the model through them as with any
    OpenAI-compatible server. What the model samples there is the trajectory. It returns the reward, None, or a mapping
    with ``reward`` and further numbers, which become metrics. A reward may also be given with
    ``POST {base_url}/reward``; a returned one goes before.
    """

    def __init__(self, context: AgentContext, **settings: Any) -> None:
        super().__init__(context, **settings)
        self._function = _function(context.config)

    @classmethod
    def check(cls, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look at the function, the packages that it takes, the tool-call format and the chat template."""
        _function(config)
        if config.agent.timeout_s is None:
            raise ConfigError("an agent may hang, which nothing would end; set rollout.agent.timeout_s")
        aiohttp_web()
        ToolAgentLoop.check(config, tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the agent on one row."""

        async def sample(ids: Sequence[int], limit: int) -> Completion:
            return await self.generate(ids, sampling_params, max_tokens=limit)

        session = ProxySession(self.context, sampling_params, sample)
        row = dict(kwargs)
        if row.get("raw_prompt") is not None:
            row["raw_prompt"] = as_messages(row["raw_prompt"])
        async with serving(session) as (base_url, api_key):
            try:
                result = await self._call(base_url, api_key, row)
            except Exception as error:
                if session.failure is not None:
                    raise session.failure from error  # what the agent saw is only its echo
                if not session.cut_short:
                    raise
                logger.info("an agent that had used up its turns or tokens ended with %r", error)
                result = None
            if session.failure is not None:
                raise session.failure
        return self._finish(session, result)

    async def _call(self, base_url: str, api_key: str, row: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(base_url, api_key, row)
        result = await run_in_thread(self._function, base_url, api_key, row)
        return await result if inspect.isawaitable(result) else result

    def _finish(self, session: ProxySession, result: Any) -> AgentLoopOutput:
        conversation = session.conversation
        if conversation is None or not any(
            any(one.mask) for one in (*conversation.earlier, conversation.token_trajectory)
        ):
            raise RolloutError("the agent ended without an answer of the model; it must ask the base_url it is given")
        if conversation.rewrites:
            self.context.trace.count("history_rewrites")
        metrics: dict[str, float] = {}
        if isinstance(result, Mapping):
            metrics = {
                str(name): checked_score(value, f"the agent, as {name!r},")
                for name, value in result.items()
                if name != "reward"
            }
            result = result.get("reward")
        reward = session.reward if result is None else checked_score(result, "the agent")
        return AgentLoopOutput.from_token_trajectory(
            conversation.token_trajectory,
            earlier=conversation.earlier,
            overlong=conversation.overlong,
            reward_score=reward,
            metrics=metrics,
        )


def _function(config: RolloutConfig) -> Callable[..., Any]:
    """The agent function.

    Raises:
        ConfigError: there is none, or it cannot be called with three arguments.
    """
    agent = config.agent.openai_agent
    if agent.path is None:
        raise ConfigError(
            "the agent loop openai_agent needs the file of the agent; set rollout.agent.openai_agent.path"
        )
    function: Callable[..., Any] = load_object(agent.path, agent.name)
    try:
        inspect.signature(function).bind("base_url", "api_key", {})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{agent.name} of {agent.path} cannot be called as {agent.name}(base_url, api_key, row): {error}"
        ) from None
    return function

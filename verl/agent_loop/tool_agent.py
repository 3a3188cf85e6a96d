"""The model reasons and calls tools until it answers without a call, or a limit ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import AgentContext, AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.conversation import Conversation, open_conversation
from verl.agent_loop.environment_session import EnvironmentSession
from verl.data.chat import as_messages
from verl.errors import DataError
from verl.interactions.base import choose
from verl.models.vision import joined
from verl.tools.parsers import PARSERS, BrokenCall, ToolCall
from verl.tools.toolbox import ToolBox, ToolResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import RolloutConfig
    from verl.models.vision import PromptImages

#: row argument with the names of the tools that a row may use
TOOLS_OF_ROW = "tool_selection"


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Turns of the model and answers of tools, or of a simulated user or environment, by turns.

    A row is offered all tools, or those that its ``extra_info["tool_selection"]`` lists. Calls beyond
    ``max_parallel_calls`` in a turn and beyond ``max_tool_calls`` in all are answered with an error, and so are broken
    ones; none of them ends the trajectory. It ends when the model makes no
    call and nobody else answers, at ``max_assistant_turns``, at
    ``max_user_turns``, and when the response length is used up; an answer that does not fit any more is left out.
    """

    reads_images = True

    def __init__(self, context: AgentContext, **settings: Any) -> None:
        super().__init__(context, **settings)
        self.multi_turn = context.config.multi_turn
        self._calls = 0

    @classmethod
    def check(cls, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look at the tool-call format and the chat template."""
        PARSERS[config.multi_turn.format]
        need_chat_template(tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the trajectory of one row, which needs ``raw_prompt``."""
        tools, context = self.tools_of(kwargs.get("extra_info") or {}), self.context
        toolbox = ToolBox(
            tools,
            context.tool_limits,
            session=context.session,
            tools_kwargs=kwargs.get("tools_kwargs"),
            note=context.trace.called,
            image_reader=context.image_reader,
        )
        about = kwargs.get("interaction_kwargs")
        environment = EnvironmentSession(
            choose(context.interactions, about),
            about,
            session=context.session,
            limits=context.tool_limits,
            trace=context.trace,
        )
        try:
            messages = await environment.start(messages_of_row(kwargs.get("raw_prompt")))
            conversation = self.begin(messages, tools, kwargs.get("images"))
            scores = await self.converse(conversation, toolbox, environment, sampling_params)
            scores.trajectory = await toolbox.rewards()
        finally:
            await toolbox.close()
            await environment.close()
        return self.finish(conversation, scores, environment)

    async def converse(
        self,
        conversation: Conversation,
        toolbox: ToolBox,
        environment: EnvironmentSession,
        sampling_params: dict[str, Any],
    ) -> Scores:
        """Turns of the model, each answered by the tools that it calls or else by the environment, until an end."""
        schemas = {name: tool.tool_schema.for_template()["function"] for name, tool in toolbox.tools.items()}
        parser = PARSERS[self.multi_turn.format](
            {name: schema.get("parameters", {}) for name, schema in schemas.items()}
        )
        scores = Scores()
        while True:
            text = await self.speak(conversation, sampling_params)
            scores.begin_turn(environment.state)
            calls = parser.parse(text).calls
            last = self.multi_turn.out_of_turns(len(scores.tools)) or conversation.room < 1
            pieces, images = None, None
            if calls:
                if last:
                    return scores
                results = await self.answers(toolbox, calls)
                scores.tools[-1] = sum(result.reward for result in results)
                messages = [_as_message(call, result) for call, result in zip(calls, results, strict=True)]
                pieces = parser.render_answers(messages)
                images = joined([result.images for result in results])
                environment.state = None
            else:
                done, words, scores.environment[-1] = await environment.answer(conversation.messages)
                if done or last:
                    return scores
                messages = [{"role": "user", "content": words}]
            if not conversation.add(messages, pieces, images):
                self.context.trace.count("truncated")
                return scores

    def tools_of(self, extra_info: dict[str, Any]) -> dict[str, Any]:
        """The tools that a row is offered."""
        chosen = extra_info.get(TOOLS_OF_ROW)
        if chosen is None:
            return dict(self.context.tools)
        unknown = [name for name in chosen if name not in self.context.tools]
        if unknown:
            raise DataError(
                f"extra_info.{TOOLS_OF_ROW} names {unknown}; the tools are {', '.join(self.context.tools) or 'none'}"
            )
        return {name: self.context.tools[name] for name in chosen}

    def begin(
        self, messages: list[dict[str, Any]], tools: dict[str, Any], images: PromptImages | None = None
    ) -> Conversation:
        """The conversation with its prompt."""
        schemas = [tool.tool_schema.for_template() for tool in tools.values()]
        return open_conversation(self.context, messages, schemas, images=images)

    async def speak(self, conversation: Conversation, sampling_params: dict[str, Any]) -> str:
        """Let the model take its turn."""
        token_trajectory = conversation.token_trajectory
        completion = await self.generate(
            token_trajectory.context, sampling_params, max_tokens=conversation.room, images=token_trajectory.images
        )
        return conversation.add_sampled(completion)

    async def answers(self, toolbox: ToolBox, calls: Sequence[ToolCall | BrokenCall]) -> list[ToolResult]:
        """Carry out the calls of a turn at the same time; one answer for each."""
        pending: list[Any] = []
        started = 0
        for call in calls:
            if isinstance(call, BrokenCall):
                pending.append(_ready(toolbox.reject(call.name or "unknown", call.problem, "malformed_call")))
            elif started >= self.multi_turn.max_parallel_calls:
                limit = f"at most {self.multi_turn.max_parallel_calls} call(s) in one turn; make this one again"
                pending.append(_ready(toolbox.reject(call.name, limit, "too_many_calls")))
            elif self.multi_turn.max_tool_calls is not None and self._calls >= self.multi_turn.max_tool_calls:
                limit = f"all {self.multi_turn.max_tool_calls} tool calls of this conversation are used up; answer now"
                pending.append(_ready(toolbox.reject(call.name, limit, "too_many_calls")))
            else:
                started += 1
                self._calls += 1
                pending.append(toolbox.call(call.name, call.arguments))
        return list(await asyncio.gather(*pending))

    def finish(self, conversation: Conversation, scores: Scores, environment: EnvironmentSession) -> AgentLoopOutput:
        """The row, with the rewards of tools and environment where the configuration wants them."""
        if conversation.rewrites:
            self.context.trace.count("history_rewrites")
        extra: dict[str, Any] = {"tool_rewards": {"turns": scores.tools, "trajectory": scores.trajectory}}
        token_trajectory, counted, total = conversation.token_trajectory, [0.0] * len(scores.tools), None
        if self.multi_turn.tool_rewards == "add":
            counted = list(scores.tools)
            counted[-1] += sum(scores.trajectory.values())
        if environment.interaction is not None:
            extra["interaction_rewards"] = scores.environment
            if environment.interaction.reward == "step":
                counted, total = [a + b for a, b in zip(counted, scores.environment, strict=True)], 0.0
            elif environment.interaction.reward == "trajectory":
                total = sum(scores.environment)
        if any(counted):
            extra["turn_scores"] = counted
        shown = [name for one in (*conversation.earlier, token_trajectory) for name in one.state_hashes()]
        extra["state_hashes"] = [
            own if own is not None else name for own, name in zip(scores.states, shown, strict=True)
        ]
        return AgentLoopOutput.from_token_trajectory(
            token_trajectory,
            earlier=conversation.earlier,
            overlong=conversation.overlong,
            reward_score=total,
            extra_fields=extra,
        )


@dataclass
class Scores:
    """What each turn of the model has earned, and the state that it acted in (None: what it was shown)."""

    tools: list[float] = field(default_factory=list)
    environment: list[float] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    trajectory: dict[str, float] = field(default_factory=dict)

    def begin_turn(self, state: Any) -> None:
        """The model has taken another turn."""
        self.tools.append(0.0)
        self.environment.append(0.0)
        self.states.append(state)


def need_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise :class:`DataError` if conversations cannot be shown to the model."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template, so an agent cannot be shown tools and their answers; use an instruct "
            "model's tokenizer, or add a chat_template to its tokenizer_config.json"
        )


def messages_of_row(raw_prompt: Any) -> list[dict[str, Any]]:
    """The prompt's messages, from a row's ``raw_prompt``.

    Raises:
        DataError: the row has none.
    """
    if raw_prompt is None:
        raise DataError("agents need the chat messages of prompts; set data.return_raw_chat=True")
    return as_messages(raw_prompt, parts=True)


def _as_message(call: ToolCall | BrokenCall, result: ToolResult) -> dict[str, Any]:
    content: Any = result.text
    if result.images is not None:
        content = [{"type": "image"} for _ in result.images.keys]
        content += [{"type": "text", "text": result.text}] if result.text else []
    return {"role": "tool", "name": call.name or "unknown", "content": content}


async def _ready(result: ToolResult) -> ToolResult:
    return result

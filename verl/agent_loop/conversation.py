"""A conversation in progress: its messages and its tokens side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from verl.agent_loop.templating import ChatTemplater
from verl.agent_loop.token_trajectory import TokenTrajectory
from verl.data.chat import Message
from verl.data.images import repeated
from verl.errors import RolloutError
from verl.workers.rollout.types import Completion

if TYPE_CHECKING:
    from verl.agent_loop.base import AgentContext
    from verl.agent_loop.templating import Piece
    from verl.data.images import ImageReader
    from verl.models.vision import PromptImages


class HistoryRewritten(RolloutError):
    """The chat template, or an agent, would have earlier turns differ from what the model was shown and wrote."""


class Conversation:
    """Messages with their tokens; turns of the model and of the others alternate.

    Args:
        templater: renders the messages.
        messages: the prompt.
        max_tokens: most tokens of the response, those of the others included.
        on_history_rewrite: ``refuse``, ``append`` or ``fork``, as in ``rollout.multi_turn``.
        images: of the prompt's messages.
        reader: of the policy; needed for images.

    Attributes:
        token_trajectory: tokens of the row that the model is adding to.
        earlier: finished rows of the same trajectory, with ``fork``.
        rewrites: how often the template would have written earlier turns differently.
        overlong: the conversation was cut off: a turn of the model used up the room, or an addition found none.
    """

    def __init__(
        self,
        templater: ChatTemplater,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        on_history_rewrite: str = "refuse",
        images: PromptImages | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self.templater = templater
        self.reader = reader
        self.messages: list[Message] = list(messages)
        prompt_ids, images = self._with_images(templater.prompt(messages), images, 0)
        self.token_trajectory = TokenTrajectory(prompt_ids, images=images)
        self.earlier: list[TokenTrajectory] = []
        self._ours = len(messages)
        self.max_tokens = max_tokens
        self.on_history_rewrite = on_history_rewrite
        self.rewrites = 0
        self.overlong = False
        self._shown = templater.text(messages)
        self._last: Completion | None = None  # the model's turn that nobody has answered yet

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.max_tokens - len(self.token_trajectory)

    def add_sampled(self, completion: Completion) -> str:
        """Add a turn of the model and return its text."""
        self.token_trajectory.append_sampled(completion)
        ended = completion.finish_reason == "stop"
        self.overlong = self.room < 1 and not ended
        text = self.templater.turn_text(completion.token_ids, ended=ended)
        self.messages.append({"role": "assistant", "content": text})
        self._shown += text
        self._last = completion
        return text

    def _with_images(
        self, ids: list[int], images: PromptImages | None, start: int
    ) -> tuple[list[int], PromptImages | None]:
        """Tokens that show images, with all their placeholders, and the images with their places.

        Args:
            ids: with one placeholder for each image.
            images: in the order of the placeholders.
            start: number of the first of ``ids`` in the row.

        Raises:
            DataError: the placeholders are not those of the images.
            RolloutError: there are images and nothing to read them with.
        """
        if images is None:
            return ids, None
        if self.reader is None:
            raise RolloutError("a conversation with images needs the policy's image reader, AgentContext.image_reader")
        copies = self.reader.copies(ids, images.grid_thw)
        starts = [start + sum(copies[:n]) for n, token in enumerate(ids) if token == self.reader.token_id]
        return repeated(ids, copies), replace(images, starts=tuple(starts))

    def add(
        self,
        messages: Sequence[Message],
        pieces: Sequence[Piece] | None = None,
        images: PromptImages | None = None,
    ) -> bool:
        """Add what the others answer to the model's turn, and open its next one.

        Args:
            messages: the answers.
            pieces: their text, where the chat template cannot render them; what it would make of earlier turns is then
                not looked at.
            images: that the messages show, as parts of type ``image``.

        Returns:
            False, with nothing added, when there is no room for it and at least one more token of the model.

        Raises:
            HistoryRewritten: the template rewrites earlier turns and the configuration refuses that.
        """
        if self._last is None:
            raise RolloutError("messages can be added after a turn of the model only")
        turn = self.messages[-1]
        if pieces is not None:
            more = self.templater.joined(pieces)
        else:
            ended = self._last.finish_reason == "stop"
            more = self.templater.continuation(self.messages[:-1], messages, self._last.token_ids, ended=ended)
        ids, images = self._with_images(more.ids, images, len(self.token_trajectory.context))
        if len(ids) >= self.room:
            self.overlong = True
            return False
        shown = self._shown + more.text
        if pieces is None and self.templater.rewrites([*self.messages, *messages], shown):
            self.rewrites += 1
            if self.on_history_rewrite == "fork":
                return self.fork([*self.messages, *messages])
            if self.on_history_rewrite == "refuse":
                raise HistoryRewritten(
                    "the chat template would write earlier turns of this conversation differently from what the model "
                    f"wrote and was shown (for instance it drops thinking); the last turn was {_short(turn)}. Set "
                    "actor_rollout_ref.rollout.multi_turn.on_history_rewrite=fork to train on it as several rows, "
                    "append to keep sampled tokens as they are, or use a chat template that changes no earlier turn"
                )
        self.token_trajectory.append_given(ids, str(messages[0]["role"]))
        if images is not None:
            self.token_trajectory.images = (
                images if self.token_trajectory.images is None else self.token_trajectory.images.followed_by(images)
            )
        self.messages.extend(messages)
        self._shown = shown
        self._last = None
        return True

    def fork(self, messages: Sequence[Message]) -> bool:
        """Go on in a new row, which begins with the conversation as the template writes it now.

        What the row has in common with the first prompt is its prompt, the rest are tokens with mask 0. The row before
        keeps what the model wrote there; nothing of it is trained on again.

        Args:
            messages: all of the conversation, as the model is to read it.

        Returns:
            False, with nothing changed, when there is no room for it and at least one more token of the model.

        Raises:
            RolloutError: the conversation has images.
        """
        if self.token_trajectory.images is not None:
            raise RolloutError("conversations with images cannot be forked; set multi_turn.on_history_rewrite=append")
        fresh = self.templater.conversation(messages, ours=self._ours)
        first = self.earlier[0] if self.earlier else self.token_trajectory
        common = sum(1 for _ in takewhile(_equal, zip(fresh.ids, first.prompt_ids, strict=False)))
        start = max(1, common)
        given = fresh.ids[start:]
        if len(given) >= self.max_tokens:
            self.overlong = True
            return False
        self.earlier.append(self.token_trajectory)
        self.token_trajectory = TokenTrajectory(fresh.ids[:start])
        self.token_trajectory.append_given(given, str(messages[-1]["role"]))
        self.messages = list(messages)
        self._shown = fresh.text
        self._last = None
        return True


def open_conversation(
    context: AgentContext,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    images: PromptImages | None = None,
) -> Conversation:
    """A conversation with its prompt, within the run's limits.

    Args:
        context: of the trajectory.
        messages: the prompt.
        tools: schemas that the template shows.
        template_kwargs: arguments of the template beside the run's.
        images: of the prompt.

    Raises:
        RolloutError: the prompt is longer than ``data.max_prompt_length``.
    """
    config = context.config
    templater = ChatTemplater(
        context.tokenizer, tools=tools, template_kwargs={**context.template_kwargs, **(template_kwargs or {})}
    )
    conversation = Conversation(
        templater,
        messages,
        max_tokens=config.response_length,
        on_history_rewrite=config.multi_turn.on_history_rewrite,
        images=images,
        reader=context.image_reader,
    )
    length, limit = len(conversation.token_trajectory.prompt_ids), config.prompt_length
    if length > limit:
        raise RolloutError(
            f"the prompt has {length} tokens with its {len(tools)} tool description(s), more than "
            f"data.max_prompt_length={limit}; raise it"
        )
    return conversation


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def _short(message: Message) -> str:
    text = repr(message["content"])
    return text if len(text) <= 120 else text[:117] + "..."

"""What a program says to the model over HTTP, kept as the tokens of one trajectory."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agent_loop.base import AgentContext
from verl.agent_loop.conversation import Conversation, HistoryRewritten, open_conversation
from verl.agent_loop.templating import ChatTemplater
from verl.data.chat import Message, as_messages
from verl.errors import DataError, RolloutError
from verl.rewards.outcome import as_number, describe, is_score
from verl.tools.parsers import PARSERS, BrokenCall, ToolParser
from verl.utils.tokenizer import text_without_specials
from verl.workers.rollout.serving.openai_api import ChatBody, Choice
from verl.workers.rollout.serving.openai_protocol import CHARS_PER_TOKEN, LIMITS, ApiError, Call, parse_call, parse_chat
from verl.workers.rollout.types import Completion, SamplingParams

logger = logging.getLogger(__name__)

#: settings that are the run's; what a program asks for instead is not used, which is said once per process
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_told: set[str] = set()

#: samples at most ``max_tokens`` after the tokens given
Sampler = Callable[[Sequence[int], int], Awaitable[Completion]]


@dataclass(frozen=True)
class Answer:
    """An answer to a chat request.

    Attributes:
        call: what was asked for.
        choice: tokens and text.
        parser: finds calls of tools in the text; None where none may be made.
        token_text: the text of one token.
    """

    call: Call
    choice: Choice
    parser: ToolParser | None
    token_text: Callable[[int], str]

    def whole(self) -> dict[str, Any]:
        """The choice in one piece."""
        return ChatBody(self.token_text, self.call, self.parser).whole(self.choice)

    def chunks(self) -> list[dict[str, Any]]:
        """The choice as a stream has it."""
        body = ChatBody(self.token_text, self.call, self.parser)
        return [*body.opening([self.choice]), *body.chunks(self.choice, 0)]


class ProxySession:
    """The conversation of one trajectory, one request after the other.

    A request must extend the one before: its messages, the answer to it, and at least one new message. What the model
    wrote stays as it was sampled; only the new messages become tokens. Any other request is refused, or with
    ``on_history_rewrite=fork`` begins another row of the trajectory.

    Args:
        context: of the trajectory.
        sampling_params: the run's settings.
        sample: see :data:`Sampler`.

    Attributes:
        conversation: None before the first request.
        reward: the reward that was given over HTTP.
        failure: what ended the trajectory for good; every further request is refused.
        cut_short: a request was refused because turns or tokens were used up.
    """

    def __init__(self, context: AgentContext, sampling_params: Mapping[str, Any], sample: Sampler) -> None:
        self.context = context
        self.conversation: Conversation | None = None
        self.reward: float | None = None
        self.failure: Exception | None = None
        self.cut_short = False
        self.turns = 0
        self._own = SamplingParams(**{**sampling_params, "max_tokens": 1})
        self._sample = sample
        self._sampling: asyncio.Future[Completion] | None = None
        self._lock = asyncio.Lock()
        self._shown: tuple[Any, Any] = (None, {})  # tools and template arguments of the prompt
        self._messages: list[Message] = []  # of the last request
        self._answer: Answer | None = None  # to the last request
        self._over = False

    async def chat(self, body: Any, *, retried: bool = False) -> Answer:
        """Answer a request for a chat completion.

        Args:
            body: decoded JSON.
            retried: the client says that it repeats a request; one that was answered gets the same answer again.

        Raises:
            ApiError: the request is refused.
        """
        config = self.context.config
        call = parse_call(body, "chat", default_max_tokens=config.response_length)
        self._check(call, body)
        places = config.prompt_length + config.response_length
        messages, usable, arguments = parse_chat(
            body, replace(LIMITS, prompt_chars=min(LIMITS.prompt_chars, max(4096, CHARS_PER_TOKEN * places)))
        )
        try:
            messages = as_messages(messages)
        except DataError as error:
            raise ApiError(422, f"messages: {error}", "messages") from None
        _check_calls(messages, body.get("tools") or ())
        shown = (body.get("tools") or None, arguments)
        parser = _parser(self.context.config.multi_turn.format, usable)
        async with self._lock:
            if retried and self._answer is not None and _alike(messages, self._messages):
                return replace(self._answer, call=call)
            if self.failure is not None:
                raise ApiError(400, f"the trajectory has ended: {self.failure}", code="trajectory_ended")
            if self._over:
                self.cut_short = True
                raise ApiError(
                    400, "the trajectory has used up its turns or tokens; finish with what there is", code="over"
                )
            try:
                return await self._turn(call, messages, shown, parser)
            except ApiError:
                raise
            except Exception as error:
                self.failure = error
                if isinstance(error, DataError | RolloutError):
                    raise ApiError(400, str(error)) from error  # final, so nothing that a client should try again
                raise

    def score(self, body: Any) -> None:
        """Take a reward, ``{"reward": number}``; the last one counts.

        Raises:
            ApiError: it is none.
        """
        value = body.get("reward") if isinstance(body, Mapping) and set(body) == {"reward"} else None
        number = as_number(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        if number is None or not is_score(number):
            raise ApiError(422, f'{describe(body)}: give {{"reward": x}} with a finite number x', "reward")
        self.reward = number

    def close(self) -> None:
        """The trajectory has ended: refuse what comes, give up what is being sampled."""
        self.failure = self.failure or RolloutError("its agent is done, or out of time")
        if self._sampling is not None:
            self._sampling.cancel()

    def _check(self, call: Call, body: Mapping[str, Any]) -> None:
        if call.n != 1:
            raise ApiError(400, f"n={call.n}: a trajectory has one continuation; use 1", "n", "unsupported")
        for key in ("ignore_eos", "stop_token_ids"):
            if body.get(key):
                raise ApiError(400, f"{key}={body[key]!r}: turns end where the run says", key, "unsupported")
        for key in _SAMPLING:
            asked, used = body.get(key), getattr(self._own, key)
            if asked is not None and asked != used and key not in _told:
                _told.add(key)
                logger.warning(
                    "an agent asks for %s=%r; trajectories are sampled with the run's own setting, %r (told once)",
                    *(key, asked, used),
                )

    async def _turn(
        self, call: Call, messages: list[Message], shown: tuple[Any, Any], parser: ToolParser | None
    ) -> Answer:
        """Bring the conversation up to date and let the model go on."""
        if self.conversation is None:
            tools, arguments = shown
            self.conversation = open_conversation(self.context, messages, tools or (), template_kwargs=arguments)
            self._shown = shown
            fits = True
        else:
            multi_turn = self.context.config.multi_turn
            fits = not multi_turn.out_of_turns(self.turns)
            try:
                added = self._added(messages, shown)
            except HistoryRewritten:
                if self.conversation.on_history_rewrite != "fork":
                    raise
                fits = fits and self._fork(messages, shown)
            else:
                fits = fits and self.conversation.room > 0
                fits = fits and self.conversation.add(added, self._pieces(added, messages[-len(added) - 1]))
        ids = self.conversation.token_trajectory.context
        if fits:
            limit = min(self.conversation.room, call.sampling.max_tokens)
            completion = await self._sampled(ids, limit)
            choice = self._said(call, completion, ids, parser)
        else:  # the program learns it the way it learns of any answer that was cut off
            self._over = True
            self.context.trace.count("truncated")
            choice = Choice(0, ids, Completion([], [], "length"), "", "length")
        self._messages = messages
        self._answer = Answer(call, choice, parser, self._token_text)
        return self._answer

    def _fork(self, messages: list[Message], shown: tuple[Any, Any]) -> bool:
        """Go on in a new row with the conversation that the program sends; False when there is no room for it."""
        assert self.conversation is not None
        tools, arguments = shown
        templater = self.conversation.templater
        if shown != self._shown:
            context = self.context
            self.conversation.templater = ChatTemplater(
                context.tokenizer, tools=tools or (), template_kwargs={**context.template_kwargs, **arguments}
            )
        names = {call.get("id"): call["function"].get("name") for m in messages for call in m.get("tool_calls") or ()}
        for message in messages:
            if message["role"] == "tool":
                message.setdefault("name", names.get(message.get("tool_call_id"), "unknown"))
        if not self.conversation.fork(messages):
            self.conversation.templater = templater
            return False
        self.conversation.rewrites += 1
        self._shown = shown
        return True

    async def _sampled(self, ids: list[int], limit: int) -> Completion:
        self._sampling = asyncio.ensure_future(self._sample(ids, limit))
        try:
            return await self._sampling
        except asyncio.CancelledError:
            if self.failure is None:
                raise
            raise ApiError(400, f"the trajectory has ended: {self.failure}", code="trajectory_ended") from None

    def _said(self, call: Call, completion: Completion, ids: list[int], parser: ToolParser | None) -> Choice:
        """Add a turn of the model; returns it as the program gets it."""
        assert self.conversation is not None
        marks = parser.marks if parser is not None else ()
        text = self._text(completion, marks)
        stopped = _before(text, call.stop) != text
        if stopped:
            completion = self._cut(completion, call.stop, marks)  # tokens behind it are as good as never sampled
            text = _before(self._text(completion, marks), call.stop)
        self.conversation.add_sampled(completion)
        self.turns += 1
        if parser is not None:
            broken = sum(isinstance(item, BrokenCall) for item in parser.parse(text).calls)
            if broken:
                self.context.trace.counts["tool_failures/malformed_call"] += broken
        return Choice(0, ids, completion, text, "stop" if stopped else completion.finish_reason)

    def _text(self, completion: Completion, marks: Sequence[str]) -> str:
        return text_without_specials(self.context.tokenizer, completion.token_ids, keep=marks)

    def _cut(self, completion: Completion, stops: Sequence[str], marks: Sequence[str]) -> Completion:
        """The shortest beginning of a completion that contains a stop text."""
        low, high = 1, len(completion.token_ids)
        while low < high:
            middle = (low + high) // 2
            text = self._text(replace(completion, token_ids=completion.token_ids[:middle]), marks)
            low, high = (low, middle) if _before(text, stops) != text else (middle + 1, high)
        return replace(
            completion,
            token_ids=completion.token_ids[:low],
            log_probs=completion.log_probs[:low],
            finish_reason="length",  # it has not ended its turn itself
        )

    def _token_text(self, token: int) -> str:
        return str(self.context.tokenizer.decode([token]))

    def _added(self, messages: list[Message], shown: tuple[Any, Any]) -> list[Message]:
        """The messages behind the model's last turn.

        Raises:
            HistoryRewritten: what stands before them is not what was said.
        """
        assert self._answer is not None
        assert self.conversation is not None
        known = [*self._messages, self._answer.whole()["message"]]
        problem = None
        if shown != self._shown:
            problem = "the tools or chat_template_kwargs are not those of its first request"
        for number, (one, other) in enumerate(zip(messages, known, strict=False)):
            if problem is None and _canonical(one) != _canonical(other):
                problem = f"message {number} is {_short(one)}, it was {_short(other)}"
        added = messages[len(known) :]
        roles = [message["role"] for message in messages[: len(known)]]
        same_shape = roles == [message["role"] for message in known]
        if not added or any(message["role"] == "assistant" for message in added):
            problem = problem or "new messages, none of them the assistant's, must follow the model's last turn"
            same_shape = False
        if problem is None:
            return added
        if same_shape and self.conversation.on_history_rewrite == "append":
            self.conversation.rewrites += 1
            return added
        remedy = (
            "; multi_turn.on_history_rewrite=append keeps the tokens as they were, whatever earlier messages say"
            if same_shape
            else ""
        )
        raise HistoryRewritten(
            f"a request must repeat the conversation so far and add to it: {problem}. A trajectory is one line of "
            f"conversation{remedy}"
        )

    def _pieces(self, added: Sequence[Message], turn: Message) -> Any:
        """Give answers of tools the tools' names; returns their text where the format has its own."""
        names = {call.get("id"): call["function"].get("name") for call in turn.get("tool_calls") or ()}
        answers = [message for message in added if message["role"] == "tool"]
        for message in answers:
            if message.get("tool_call_id") not in names:
                raise ApiError(
                    400,
                    f"messages: tool_call_id={message.get('tool_call_id')!r} is no call of the turn before; it made "
                    f"{sorted(map(str, names)) or 'none'}",
                    "messages",
                )
            message["name"] = names[message["tool_call_id"]]
        if not answers or len(answers) < len(added):
            return None
        return PARSERS[self.context.config.multi_turn.format]().render_answers(answers)


def _before(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min([place for stop in stops if (place := text.find(stop)) >= 0], default=len(text))]


def _parser(name: str, tools: Sequence[Mapping[str, Any]] | None) -> ToolParser | None:
    if not tools:
        return None
    functions = [tool["function"] for tool in tools]
    return PARSERS[name]({str(function.get("name")): function.get("parameters") or {} for function in functions})


def _check_calls(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`ApiError` unless tools, and calls of them in messages, hold an object ``function``."""
    for message in messages:
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple) or not all(map(_is_function, calls)):
            raise ApiError(422, f"messages: tool_calls={calls!r}: must be a list of function calls", "messages")
    if not all(map(_is_function, tools)):
        raise ApiError(422, "tools: must be a list of function schemas", "tools")


def _is_function(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("function"), Mapping)


def _canonical(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a message says, however a client writes it."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    said = [(function.get("name"), _value(function.get("arguments"))) for function in functions]
    return message["role"], (message.get("content") or "").strip(), said


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    return [_canonical(message) for message in some] == [_canonical(message) for message in others]


def _short(message: Message) -> str:
    text = repr({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
    return text if len(text) <= 160 else text[:157] + "..."

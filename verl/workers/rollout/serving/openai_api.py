"""An HTTP endpoint that OpenAI's client and everything built on it can talk to.

It stands before one server, or as a router before all of them: whatever has ``generate(request, session=...)``, so
before a :class:`~verl.workers.rollout.serving.client.RolloutClient` too. Needs aiohttp (``verl[server]``).

Answers that are sent in pieces, or end at a text, are sampled in pieces: a piece continues the sample exactly where the
last one ended, and a server that has the beginning in its cache does not compute it again. Tokens are decoded once.

What a request may ask for has limits (:class:`~verl.workers.rollout.serving.openai_protocol.Limits`), and large
prompts become tokens beside the event loop, so that one request does not hold up the others.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from verl.errors import ConfigError, ReplicaError, RolloutError
from verl.tools.parsers import PARSERS, BrokenCall, ToolCall, ToolParser, length_before
from verl.utils.detokenizer import Detokenizer
from verl.utils.json_text import dumps_json
from verl.workers.rollout.serving.openai_protocol import (
    CHARS_PER_TOKEN,
    LIMITS,
    ApiError,
    Call,
    Limits,
    envelope,
    parse_call,
    parse_chat,
    parse_json,
    parse_prompts,
    usage,
)
from verl.workers.rollout.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: tokens of the first piece and of the largest one; pieces grow, because each has a fixed cost
_FIRST_PIECE, _LARGEST_PIECE = 1, 32
#: a body or a prompt of more characters is read, rendered and tokenized in a thread
_INLINE_CHARS = 16_384


class Backend(Protocol):
    """What completes requests."""

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion: ...


@dataclass(frozen=True)
class ApiSettings:
    """What the endpoint says and assumes.

    Attributes:
        model: name of the model.
        default_max_tokens: of a request that gives none.
        max_model_len: most tokens of prompt and answer; None: the engine decides.
        tool_format: how the model writes calls of tools.
        api_key: that requests must bring; None: none is asked for.
        limits: of what a request may ask for.
    """

    model: str
    default_max_tokens: int
    max_model_len: int | None = None
    tool_format: str = "hermes"
    api_key: str | None = field(default=None, repr=False)
    limits: Limits = LIMITS


@dataclass
class Choice:
    """One answer as it grows."""

    index: int
    prompt_ids: list[int]
    completion: Completion
    text: str = ""
    finish_reason: str | None = None


class GrowingText:
    """The text of a choice, up to the first of the stop texts; what could become one is held back.

    Args:
        tokenizer: of the model.
        stops: texts that end the choice, which it does not contain.
        marks: special tokens that are part of the text.

    Attributes:
        stopped: whether a stop text ended it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], marks: Sequence[str]) -> None:
        self._stops = stops
        self._words = Detokenizer(tokenizer, marks)
        self._held = ""
        self.stopped = False

    def feed(self, tokens: Sequence[int], *, last: bool) -> str:
        """The text that is certain by these tokens, which follow the earlier ones, and was not before."""
        text = self._held + self._words.feed(tokens, last=last)
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        certain = min(found) if found else len(text) if last else length_before(text, self._stops)
        self._held = text[certain:]
        return text[:certain]


def _spoken(call: Call, completion: Completion) -> list[int]:
    """The tokens less one that was asked to end the choice."""
    ids = completion.token_ids
    return ids[:-1] if completion.finish_reason == "stop" and ids[-1] in call.sampling.stop_token_ids else ids


class OpenAIEndpoint:
    """Routes and their handlers.

    Args:
        backend: completes requests.
        tokenizer: of the model, with a chat template for chats.
        settings: see :class:`ApiSettings`.

    Raises:
        ConfigError: aiohttp is missing, or the tool format is unknown.
    """

    def __init__(self, backend: Backend, tokenizer: Any, settings: ApiSettings) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.settings = settings
        self._parser: Callable[..., ToolParser] = PARSERS[settings.tool_format]
        self._web = aiohttp_web()
        self._runner: Any = None
        self._vocabulary = len(tokenizer)
        longest = settings.max_model_len
        most = settings.limits.prompt_chars
        if longest is not None:  # a longer text cannot fit and need not be tokenized to know it
            most = min(most, max(4096, CHARS_PER_TOKEN * longest))
        self._limits = replace(settings.limits, prompt_chars=most)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-tokenize")

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the base URL for clients. Port 0 takes a free one."""
        web = self._web
        app = web.Application(client_max_size=self._limits.body_bytes, middlewares=[errors_as_json(web), self._guard()])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        # an answer that nobody waits for any more is not worth a token
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = site._server.sockets[0].getsockname()[1]
        return f"http://{host}:{bound}/v1"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._thread.shutdown(wait=False)

    async def _aside(self, size: int, work: Callable[[], R]) -> R:
        """The result of work on so many characters; much work is done in a thread."""
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _guard(self) -> Any:
        """Lets requests with the key pass."""

        @self._web.middleware
        async def guard(request: Any, handler: Any) -> Any:
            key = self.settings.api_key
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError(401, "the key is missing or wrong; send the value of VERL_SERVER_API_KEY", code="key")
            return await handler(request)

        return guard

    # -- routes

    async def _health(self, request: Any) -> Any:
        return self._web.json_response({"status": "ok"})

    async def _models(self, request: Any) -> Any:
        entry = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "verl"}
        return self._web.json_response({"object": "list", "data": [entry]})

    async def _chat(self, request: Any) -> Any:
        body, size = await self._body(request)
        call = parse_call(body, "chat", default_max_tokens=self.settings.default_max_tokens, limits=self._limits)
        messages, tools, arguments = parse_chat(body, self._limits)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "the model's tokenizer has no chat template; use /v1/completions", "messages")

        def render() -> list[int]:
            return list(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
                )
            )

        try:
            ids = await self._aside(size, render)
        except Exception as error:
            raise ApiError(400, f"the chat template refuses the messages: {error}", "messages") from error
        functions = [tool.get("function", {}) for tool in tools or ()]
        parser = self._parser({str(f.get("name")): f.get("parameters") or {} for f in functions}) if tools else None
        return await self._answer(request, call, [ids], ChatBody(self.token_text, call, parser))

    async def _complete(self, request: Any) -> Any:
        body, size = await self._body(request)
        call = parse_call(body, "completions", default_max_tokens=self.settings.default_max_tokens, limits=self._limits)
        given = parse_prompts(body, self._limits)
        self._limits.check("choices", call.n * len(given), "n", "n times prompts")

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]

        prompts = await self._aside(size, encode)
        strange = next((token for ids in prompts for token in ids if not 0 <= token < self._vocabulary), None)
        if strange is not None:
            raise ApiError(
                400, f"prompt: the model has no token {strange}; ids are 0 to {self._vocabulary - 1}", "prompt"
            )
        return await self._answer(request, call, prompts, _TextBody(self.token_text, call))

    async def _body(self, request: Any) -> tuple[dict[str, Any], int]:
        """The body, and how large it is."""
        data = await read_body(request, self._limits)
        body = await self._aside(len(data), lambda: parse_json(data, self._limits))
        model = body.get("model")
        if model is not None and model != self.settings.model:
            raise ApiError(
                404, f"the model {model!r} is not here; this is {self.settings.model!r}", "model", "model_not_found"
            )
        return body, len(data)

    async def _answer(self, request: Any, call: Call, prompts: list[list[int]], form: _Body) -> Any:
        call = self._within_context(call, prompts)
        choices = [
            Choice(index, prompts[index // call.n], Completion([], [], "abort"))
            for index in range(len(prompts) * call.n)
        ]
        if call.stream:
            return await self._stream(request, call, choices, form)
        await asyncio.gather(*(self._finish(call, choice, form.marks) for choice in choices))
        answer = {**envelope(form.kind, self.settings.model), "choices": [form.whole(choice) for choice in choices]}
        answer["usage"] = usage_of(choices, call.n)
        if call.token_ids:
            answer["prompt_token_ids"] = prompts[0]
        return self._web.json_response(answer, dumps=json_of)

    def _within_context(self, call: Call, prompts: Sequence[list[int]]) -> Call:
        limit, longest = self.settings.max_model_len, max(map(len, prompts))
        if not all(prompts):
            raise ApiError(422, "the prompt has no token", "prompt")
        if limit is None or longest + call.sampling.max_tokens <= limit:
            return call
        if longest >= limit or call.sampling.max_tokens != self.settings.default_max_tokens:
            raise ApiError(
                400,
                f"{longest} prompt tokens and max_tokens={call.sampling.max_tokens} exceed the model's {limit}",
                "max_tokens",
                "context_length_exceeded",
            )
        return replace(call, sampling=replace(call.sampling, max_tokens=limit - longest))

    # -- sampling

    async def _finish(self, call: Call, choice: Choice, marks: Sequence[str]) -> None:
        async for _ in self._pieces(call, choice, marks):
            pass

    async def _pieces(self, call: Call, choice: Choice, marks: Sequence[str]) -> AsyncIterator[str]:
        """Let a choice grow to its end; yields the new text of each piece, in which ``marks`` are kept."""
        sampling = call.sampling_of(choice.index % call.n)
        name = f"http-{uuid.uuid4().hex}"
        text = GrowingText(self.tokenizer, call.stop, marks)
        piece = _FIRST_PIECE if call.stream else _LARGEST_PIECE
        in_pieces = call.stream or bool(call.stop)
        while True:
            have = choice.completion.token_ids
            limit = min(sampling.max_tokens, len(have) + piece) if in_pieces else sampling.max_tokens
            got = await self.backend.generate(
                GenerationRequest(
                    choice.prompt_ids,
                    replace(sampling, max_tokens=limit),
                    name,
                    partial=replace(choice.completion, finish_reason="abort") if have else None,
                ),
                session=call.session or name,
            )
            done = got.finish_reason != "length" or len(got.token_ids) >= sampling.max_tokens
            choice.completion = got
            new = text.feed(_spoken(call, got)[len(have) :], last=done)
            choice.text += new
            if text.stopped:
                choice.finish_reason = "stop"
            elif done:
                choice.finish_reason = got.finish_reason
            if new or choice.finish_reason:
                yield new
            if choice.finish_reason:
                return
            piece = min(2 * piece, _LARGEST_PIECE)

    def token_text(self, token: int) -> str:
        """The text of one token."""
        return str(self.tokenizer.decode([token]))

    # -- answering in pieces

    async def _stream(self, request: Any, call: Call, choices: list[Choice], form: _Body) -> Any:
        """Server-sent events. An error before the first piece is an ordinary answer, later it is the last event."""
        queue: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        async def feed(choice: Choice) -> None:
            sent = 0
            async for _ in self._pieces(call, choice, form.marks):
                for chunk in form.chunks(choice, sent):
                    await queue.put(chunk)
                sent = len(choice.completion.token_ids)

        async def feed_all() -> None:
            try:
                await asyncio.gather(*(feed(choice) for choice in choices))
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - raised or sent below
                await queue.put(error)

        head = envelope(form.chunk_kind, self.settings.model)
        feeding = asyncio.create_task(feed_all())
        try:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            response = self._web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await response.prepare(request)
            for first in form.opening(choices):
                await send_event(response, {**head, "choices": [first]})
            while item is not None and not isinstance(item, Exception):
                await send_event(response, {**head, "choices": [item]})
                item = await queue.get()
            if isinstance(item, Exception):
                await send_event(response, as_api_error(item).body())
            elif call.include_usage:
                await send_event(response, {**head, "choices": [], "usage": usage_of(choices, call.n)})
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


class _Body(Protocol):
    """How choices look in an answer."""

    kind: str
    chunk_kind: str
    #: special tokens that stay in the text of a choice
    marks: tuple[str, ...]

    def whole(self, choice: Choice) -> dict[str, Any]: ...

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]: ...

    def chunks(self, choice: Choice, sent: int) -> list[dict[str, Any]]: ...


class _TextBody:
    """Choices of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    marks: tuple[str, ...] = ()

    def __init__(self, token_text: Callable[[int], str], call: Call) -> None:
        self.token_text = token_text
        self.call = call
        self._sent: dict[int, int] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice, choice.text, 0)

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: Choice, sent: int) -> list[dict[str, Any]]:
        begin, self._sent[choice.index] = self._sent.get(choice.index, 0), len(choice.text)
        return [self._entry(choice, choice.text[begin:], sent)]

    def _entry(self, choice: Choice, text: str, sent: int) -> dict[str, Any]:
        entry = {"index": choice.index, "text": text, "finish_reason": choice.finish_reason, "logprobs": None}
        tokens = choice.completion.token_ids[sent:]
        if self.call.logprobs:
            texts = [self.token_text(token) for token in tokens]
            offsets = list(accumulate(map(len, texts), initial=0))[:-1]
            values = choice.completion.log_probs[sent:]
            entry["logprobs"] = {
                "tokens": texts,
                "token_logprobs": values,
                "text_offset": offsets,
                "top_logprobs": None,
            }
        if self.call.token_ids:
            entry["token_ids"] = tokens
        return entry


class ChatBody:
    """Choices of ``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, token_text: Callable[[int], str], call: Call, parser: ToolParser | None) -> None:
        self.token_text = token_text
        self.call = call
        self.parser = parser
        self.marks = parser.marks if parser is not None else ()
        self._sent: dict[int, int] = {}
        self._plain: dict[int, int] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        content, calls, reason = self._parsed(choice)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return self._entry(choice, "message", message, reason, 0)

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": start, "finish_reason": None} for choice in choices]

    def chunks(self, choice: Choice, sent: int) -> list[dict[str, Any]]:
        """The new text; where tools may be called, without what is or may become a call, which comes at the end."""
        text, reason = choice.text, choice.finish_reason
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        if reason is not None:
            text, calls, reason = self._parsed(choice)
        elif self.parser is not None:
            plain = self._plain.get(choice.index, 0)  # what was certain to be no call stays so
            plain += self.parser.plain_length(text[plain:])
            self._plain[choice.index] = plain
            text = text[:plain].rstrip()
        begin = self._sent.get(choice.index, 0)
        self._sent[choice.index] = max(begin, len(text))
        if text[begin:]:
            delta["content"] = text[begin:]
        if calls:
            delta["tool_calls"] = [{"index": number, **item} for number, item in enumerate(calls)]
        return [self._entry(choice, "delta", delta, reason, sent)]

    def _parsed(self, choice: Choice) -> tuple[str, list[dict[str, Any]], str | None]:
        if self.parser is None:
            return choice.text, [], choice.finish_reason
        turn = self.parser.parse(choice.text)
        # white space before the text may have been streamed already
        lead = choice.text[: len(choice.text) - len(choice.text.lstrip())] if turn.content else ""
        if not turn.calls and any(mark in choice.text for mark in self.marks):
            return lead + turn.content, [], choice.finish_reason  # marks of something else than calls
        if not turn.calls or any(isinstance(item, BrokenCall) for item in turn.calls):
            return choice.text, [], choice.finish_reason  # a call that is none stays what the model wrote
        calls = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": item.name, "arguments": dumps_json(item.arguments)},
            }
            for item in turn.calls
            if isinstance(item, ToolCall)
        ]
        return lead + turn.content, calls, "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason

    def _entry(
        self, choice: Choice, name: str, message: dict[str, Any], reason: str | None, sent: int
    ) -> dict[str, Any]:
        entry = {"index": choice.index, name: message, "finish_reason": reason, "logprobs": None}
        tokens, values = choice.completion.token_ids[sent:], choice.completion.log_probs[sent:]
        if self.call.logprobs:
            texts = [self.token_text(token) for token in tokens]
            entry["logprobs"] = {
                "content": [
                    {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, value in zip(texts, values, strict=True)
                ]
            }
        if self.call.token_ids:
            entry["token_ids"] = tokens
        return entry


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, int]:
    """Tokens of the prompts, which have ``n`` choices each, and of the answers."""
    prompts = sum(len(choice.prompt_ids) for choice in choices[::n])
    return usage(prompts, sum(len(choice.completion.token_ids) for choice in choices))


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ReplicaError):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, RolloutError):
        text = str(error)
        if "no replica served" in text or "asleep" in text:
            return ApiError(503, text, code="unavailable")
        if "time limit" in text:
            return ApiError(504, text, code="timeout")
        return ApiError(400, text)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}")


async def read_body(request: Any, limits: Limits = LIMITS) -> bytes:
    """The body of a request to one of aiohttp's applications.

    Raises:
        ApiError: 413: it is too large.
    """
    try:
        data: bytes = await request.read()
    except aiohttp_web().HTTPRequestEntityTooLarge:
        size = request.content_length
        found = "larger" if size is None else f"{size} bytes"
        raise ApiError(
            413, f"the body is {found}: the limit is {limits.body_bytes} bytes", code="limit_exceeded"
        ) from None
    return data


def errors_as_json(web: Any) -> Any:
    """Middleware for aiohttp's ``web``: whatever goes wrong is answered in OpenAI's form."""

    @web.middleware
    async def middleware(request: Any, handler: Any) -> Any:
        try:
            return await handler(request)
        except web.HTTPException as error:
            found = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:  # noqa: BLE001 - every failure has an answer
            found = as_api_error(error)
        return web.json_response(found.body(), status=found.status)

    return middleware


async def send_event(response: Any, data: dict[str, Any]) -> None:
    """Write one server-sent event."""
    await response.write(b"data: " + json_of(data).encode() + b"\n\n")


def json_of(data: dict[str, Any]) -> str:
    """The JSON of an answer. Almost all are plain; what is not, such as a number that is none, takes the slower way."""
    try:
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError):
        return dumps_json(data, ascii_only=True)


def aiohttp_web() -> Any:
    """The module ``aiohttp.web``.

    Raises:
        ConfigError: aiohttp is missing.
    """
    try:
        from aiohttp import web
    except ImportError as error:
        raise ConfigError("the OpenAI-compatible endpoint needs the package aiohttp: install verl[server]") from error
    return web

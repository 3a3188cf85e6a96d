"""What the OpenAI-compatible endpoint understands and answers: bodies in, settings out, and back."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import RolloutError, VerlError
from verl.utils.seeding import derive_seed
from verl.workers.rollout.types import SamplingParams


class ApiError(VerlError):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: for people.
        param: the key that is wrong.
        code: short name for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most; more is answered with 400, a larger body with 413.

    They keep one request from holding up the others. What a model can take is less in most cases.

    Attributes:
        body_bytes: of the JSON body.
        depth: levels of lists and objects in it.
        prompts, choices: in one request; choices are counted over all prompts (``n`` of each).
        messages, tools: of a chat.
        prompt_chars: of all texts that become prompts.
        max_tokens: of a choice.
        stops, stop_chars, stop_token_ids: texts that end a choice, characters of each, and tokens.
    """

    body_bytes: int = 16 << 20
    depth: int = 64
    prompts: int = 128
    choices: int = 128
    messages: int = 4096
    tools: int = 512
    prompt_chars: int = 8 << 20
    max_tokens: int = 1 << 20
    stops: int = 16
    stop_chars: int = 1024
    stop_token_ids: int = 1024

    def check(self, name: str, value: int, param: str, what: str = "") -> None:
        """Refuse a number above the limit ``name``.

        Raises:
            ApiError: 400.
        """
        limit = getattr(self, name)
        if value > limit:
            raise ApiError(400, f"{what or param}={value}: the limit is {limit}", param, "limit_exceeded")


LIMITS = Limits()
#: characters that a token has at most, as a rule: a text that is longer than so many for each place does not fit
CHARS_PER_TOKEN = 64


@dataclass(frozen=True)
class Call:
    """What a request asks for, whichever of the two routes it came by.

    Attributes:
        sampling: of the first choice.
        n: choices per prompt.
        stop: texts that end a choice, which it does not contain.
        stream, include_usage: answer in pieces; with a last one that has the usage.
        logprobs, token_ids: add them to the answer.
        session: name of the conversation, for routing.
    """

    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    session: str | None = None

    def sampling_of(self, choice: int) -> SamplingParams:
        """Settings of one choice: each has a seed of its own, so that what is sampled in pieces is one sample."""
        seed = self.sampling.seed
        if seed is None:
            return replace(self.sampling, seed=secrets.randbits(62))
        return self.sampling if choice == 0 else replace(self.sampling, seed=derive_seed(seed, "choice", choice))


_NUMBERS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "temperature": ((int, float), 1.0),
    "top_p": ((int, float), 1.0),
    "top_k": (int, -1),
    "min_p": ((int, float), 0.0),
    "repetition_penalty": ((int, float), 1.0),
    "seed": (int, None),
    "ignore_eos": (bool, False),
}
_COMMON = {
    *_NUMBERS,
    *("model", "max_tokens", "n", "stop", "stop_token_ids", "stream", "stream_options", "logprobs"),
    *("return_token_ids", "session", "user", "metadata"),
}
_ROUTES = {
    "chat": _COMMON
    | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"},
    "completions": _COMMON | {"prompt"},
}
#: keys that clients send with a value that changes nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "response_format": ({"type": "text"}, None),
    "parallel_tool_calls": (True, None),
    "echo": (False, None),
    "best_of": (1, None),
    "suffix": ("", None),
}


def parse_json(data: bytes, limits: Limits = LIMITS) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: 400: it is no JSON, no object, holds NaN or infinities, or is nested too deeply.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not part of JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise ApiError(
            400, f"the body is nested more than {limits.depth} levels deep, which is the limit", code="limit_exceeded"
        ) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    level: list[Any] = [body]
    for _ in range(limits.depth):
        level = [item for value in level for item in _inside(value)]
        if not level:
            return body
    raise ApiError(
        400, f"the body is nested more than {limits.depth} levels deep, which is the limit", code="limit_exceeded"
    )


def _inside(value: Any) -> list[Any]:
    """The containers that a container holds."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, dict | list)]


def parse_call(body: Any, route: str, *, default_max_tokens: int, limits: Limits = LIMITS) -> Call:
    """Check a body and take its settings.

    Args:
        body: decoded JSON.
        route: ``"chat"`` or ``"completions"``.
        default_max_tokens: where none is given.
        limits: of its numbers.

    Raises:
        ApiError: 400 for what is not served, 422 for a value of the wrong type or out of range.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body must be a JSON object")
    for key, value in body.items():
        if key in _NEUTRAL and value in _NEUTRAL[key]:
            continue
        if key not in _ROUTES[route]:
            raise ApiError(400, f"{key}={value!r} is not served here; leave it out", key, "unsupported")
    values = {key: _typed(body, key, kinds, default) for key, (kinds, default) in _NUMBERS.items()}
    limit_key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _typed(body, limit_key, int, default_max_tokens)
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(_list_of(stop, str, "stop"))
    limits.check("stops", len(stop), "stop", "number of stop texts")
    limits.check("stop_chars", max(map(len, stop), default=0), "stop", "characters of a stop text")
    if "" in stop:
        raise ApiError(422, "stop: an empty text ends every answer before it begins; leave it out", "stop")
    options = _typed(body, "stream_options", Mapping, {}) or {}
    n = _typed(body, "n", int, 1)
    if n < 1:
        raise ApiError(422, f"n={n}: at least one choice", "n")
    limits.check("choices", n, "n")
    limits.check("max_tokens", max_tokens, limit_key)
    stop_token_ids = tuple(_list_of(body.get("stop_token_ids") or (), int, "stop_token_ids"))
    limits.check("stop_token_ids", len(stop_token_ids), "stop_token_ids", "number of stop_token_ids")
    if body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs: only the sampled token has a log-probability; use 0", "top_logprobs")
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            **values,
        )
    except RolloutError as error:
        raise ApiError(422, str(error), str(error).partition("=")[0]) from None
    return Call(
        sampling=sampling,
        n=n,
        stop=stop,
        stream=_typed(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        logprobs=_wants_logprobs(body.get("logprobs"), route),
        token_ids=_typed(body, "return_token_ids", bool, False),
        session=_typed(body, "session", str, None),
    )


def _wants_logprobs(value: Any, route: str) -> bool:
    if value is None or value is False:
        return False
    if route == "chat" and value is True:
        return True
    if route == "completions" and value == 0:
        return True
    raise ApiError(
        400, f"logprobs={value!r}: only the sampled token has one; use true for chats and 0 for completions", "logprobs"
    )


def _typed(body: Mapping[str, Any], key: str, kinds: Any, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    wrong_bool = isinstance(value, bool) and kinds is not bool
    if wrong_bool or not isinstance(value, kinds):
        raise ApiError(422, f"{key}={value!r}: has the wrong type", key)
    return value


def _list_of(values: Any, kind: type, key: str) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ApiError(422, f"{key}={values!r}: must be a list", key)
    if any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
        raise ApiError(422, f"{key}={values!r}: must hold values of type {kind.__name__}", key)
    return list(values)


def parse_prompts(body: Mapping[str, Any], limits: Limits = LIMITS) -> list[str | list[int]]:
    """The ``prompt`` of a completion: a text, tokens, or a list of either; as a list.

    Raises:
        ApiError: 400 or 422.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(422, "prompt: give a text, a list of token ids, or a list of these", "prompt")
    if isinstance(prompt[0], int):
        prompt = [prompt]
    limits.check("prompts", len(prompt), "prompt", "number of prompts")
    limits.check("prompt_chars", sum(map(len, prompt)), "prompt", "characters and tokens of the prompts")
    return [check_text(item, "prompt") if isinstance(item, str) else _list_of(item, int, "prompt") for item in prompt]


def check_text(text: str, param: str) -> str:
    """The text, if it is valid.

    Raises:
        ApiError: 400: it has half a character (a surrogate), which no tokenizer takes.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"{param}: character {error.start} is {text[error.start]!r}, half of a character; send valid text",
            param,
        ) from None
    return text


def check_texts(value: Any, param: str, limits: Limits = LIMITS) -> int:
    """Characters of all texts in a JSON value, keys included.

    Raises:
        ApiError: 400: too many, or one is no valid text.
    """
    count, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            count += len(check_text(item, param))
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            rest += item
    limits.check("prompt_chars", count, param, f"characters of {param}")
    return count


def parse_chat(
    body: Mapping[str, Any], limits: Limits = LIMITS
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools (None: none) and arguments of the chat template.

    Raises:
        ApiError: 400 or 422.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(422, "messages: give a list of messages", "messages")
    if any(not isinstance(message, Mapping) or not isinstance(message.get("role"), str) for message in messages):
        raise ApiError(422, "messages: each needs a role and a content", "messages")
    limits.check("messages", len(messages), "messages", "number of messages")
    tools = body.get("tools") or None
    if tools is not None and any(not isinstance(tool, Mapping) for tool in _list_of(tools, Mapping, "tools")):
        raise ApiError(422, "tools: must be a list of function schemas", "tools")
    limits.check("tools", len(tools or ()), "tools", "number of tools")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise ApiError(400, f"tool_choice={choice!r}: the model decides itself; use auto or none", "tool_choice")
    arguments = _typed(body, "chat_template_kwargs", Mapping, {})
    check_texts([messages, tools or [], arguments], "messages", limits)
    return [_with_text(message) for message in messages], None if choice == "none" else tools, dict(arguments)


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text also where it came in parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": content or ""}
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in content}
    if kinds - {"text"}:
        raise ApiError(400, f"messages: content of type {kinds - {'text'}} is not served; use text", "messages")
    if any(not isinstance(part.get("text"), str) for part in content):
        raise ApiError(422, "messages: a part of type text needs a text", "messages")
    return {**message, "content": "".join(part["text"] for part in content)}


def envelope(kind: str, model: str) -> dict[str, Any]:
    """Head of an answer; ``kind`` is ``chat.completion``, ``chat.completion.chunk`` or ``text_completion``."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """How many tokens a request had and got."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

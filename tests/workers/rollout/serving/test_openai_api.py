"""The HTTP endpoint, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AddedToken, AutoModelForCausalLM

from tests.fixtures.tiny import make_tokenizer
from tests.tools.test_parsers import FIND, OURS, SCHEMAS, written
from tests.utils.test_detokenizer import byte_level
from tests.workers.rollout.helpers import weights_of
from tests.workers.rollout.served import load, replicas
from tests.workers.rollout.serving.test_server import Here
from verl.config import ModelConfig, RolloutConfig
from verl.errors import RolloutError
from verl.tools.parsers import PARSERS
from verl.workers.rollout.serving.openai_api import ApiSettings, OpenAIEndpoint
from verl.workers.rollout.serving.server import RolloutServer, ServerSpec
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams

openai = pytest.importorskip("openai", reason="the package openai is not installed (requirements/dev.txt)")
pytest.importorskip("aiohttp", reason="the package aiohttp is not installed (requirements/dev.txt)")

CHAT = [{"role": "user", "content": "sort 3142"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@contextmanager
def in_thread(start: Callable[[], Any]) -> Iterator[Any]:
    """Run ``await start()`` in an event loop of its own and keep that going; gives what it returns."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def real(tiny_model_dir: str) -> Iterator[tuple[Any, RolloutServer]]:
    """A client of a server's own endpoint, and the server."""
    rollout = RolloutConfig(dtype="float32", prompt_length=64, response_length=20, max_model_len=128)
    server = RolloutServer(ServerSpec(ModelConfig(path=tiny_model_dir), rollout, "cpu", 5, http_host="127.0.0.1"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)

    async def start() -> str:
        info = await server.start({})
        await server.receive_weights(Here("first", model, 1), 0)
        assert info.url is not None
        return info.url

    with in_thread(start) as url:
        yield client_of(url), server


class Scripted:
    """A backend whose model always writes the same text and then stops; ``special`` are special tokens."""

    def __init__(self, text: str, special: Sequence[str] = ()) -> None:
        self.tokenizer = make_tokenizer()
        self.tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
        self.tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        self.requests: list[tuple[GenerationRequest, str | None]] = []

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        self.requests.append((request, session))
        tokens = self.tokens[: request.sampling.max_tokens]
        reason = "stop" if len(tokens) == len(self.tokens) else "length"
        return Completion(tokens, [-0.5] * len(tokens), reason, 3)  # type: ignore[arg-type]


@contextmanager
def scripted(
    text: str,
    default_max_tokens: int = 300,
    max_model_len: int = 400,
    tool_format: str = "hermes",
    special: Sequence[str] = (),
) -> Iterator[tuple[Any, Scripted]]:
    backend = Scripted(text, special)
    settings = ApiSettings("policy", default_max_tokens, max_model_len, tool_format)
    endpoint = OpenAIEndpoint(backend, backend.tokenizer, settings)
    with in_thread(endpoint.start) as url:
        yield client_of(url), backend


def model_of(client: Any) -> str:
    (model,) = client.models.list().data
    return model.id


def test_a_chat_is_the_engines_completion_of_the_templated_prompt(real: Any) -> None:
    client, server = real
    answer = client.chat.completions.create(
        model=model_of(client),
        messages=CHAT,
        max_tokens=12,
        seed=5,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    tokenizer = server._endpoint.tokenizer
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    request = GenerationRequest(ids, SamplingParams(12, seed=5), "r")
    expected = asyncio.run(_with_own_engine(server, request))
    (choice,) = answer.choices
    assert choice.model_extra["token_ids"] == expected.token_ids
    assert [item.logprob for item in choice.logprobs.content] == pytest.approx(expected.log_probs, abs=1e-5)
    assert choice.message.content == tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert answer.model_extra["prompt_token_ids"] == ids
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected.token_ids))
    assert choice.finish_reason == expected.finish_reason


async def _with_own_engine(server: RolloutServer, request: GenerationRequest) -> Completion:
    from verl.workers.rollout.hf.engine import HFRolloutEngine

    engine = HFRolloutEngine(server.spec.model, server.spec.rollout)
    model = AutoModelForCausalLM.from_pretrained(server.spec.model.path, dtype=torch.float32)
    await engine.begin_update(1)
    await engine.load(weights_of(model).items())
    await engine.end_update()
    return await engine.generate(request)


def test_a_stream_is_the_same_answer_in_pieces(real: Any) -> None:
    client, _ = real
    settings = {"model": model_of(client), "messages": CHAT, "max_tokens": 20, "seed": 7, "temperature": 0.9}
    more = {"return_token_ids": True, "ignore_eos": True}
    whole = client.chat.completions.create(**settings, extra_body=more)
    chunks = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}, logprobs=True, extra_body=more
        )
    )
    last = chunks.pop()
    assert (last.choices, last.usage.completion_tokens) == ([], 20)
    pieces = [chunk.choices[0] for chunk in chunks]
    assert pieces[0].delta.role == "assistant"
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    tokens = [token for piece in pieces for token in (piece.model_extra or {}).get("token_ids", [])]
    assert tokens == whole.choices[0].model_extra["token_ids"]
    assert sum(len(piece.logprobs.content) for piece in pieces if piece.logprobs) == 20
    assert len(pieces) > 3
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_choices_differ_and_a_seed_repeats_them(real: Any) -> None:
    client, _ = real

    def texts(seed: int | None) -> list[str]:
        answer = client.completions.create(
            model=model_of(client), prompt="abc", n=4, max_tokens=16, seed=seed, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    assert len(set(texts(None))) == 4
    assert texts(3) == texts(3)
    assert texts(3) != texts(4)


def test_completions_take_texts_tokens_and_lists(real: Any) -> None:
    client, server = real
    ids = server._endpoint.tokenizer.encode("abc")
    greedy = {"model": model_of(client), "max_tokens": 6, "temperature": 0, "logprobs": 0}
    text = client.completions.create(prompt="abc", **greedy)
    assert client.completions.create(prompt=ids, **greedy).choices[0].text == text.choices[0].text
    both = client.completions.create(prompt=["abc", "x"], **greedy)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == text.choices[0].text
    assert both.usage.prompt_tokens == len(ids) + 1
    assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens
    streamed = client.completions.create(prompt="abc", stream=True, **greedy)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [("wor", "hello "), (["zzz", "lo"], "hel"), ("never", "hello world")])
def test_a_stop_text_ends_the_answer_before_it(stop: Any, expected: str, stream: bool) -> None:
    with scripted("hello world") as (client, backend):
        settings = {"model": "policy", "messages": CHAT, "stop": stop}
        if stream:
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**settings, stream=True)]
            text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
        else:
            (choice,) = client.chat.completions.create(**settings).choices
            text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == (expected, "stop")
    assert len({session for _, session in backend.requests}) == 1


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def test_calls_of_tools_come_as_such() -> None:
    with scripted(f"I add.\n{CALL}{CALL}") as (client, _):
        (choice,) = client.chat.completions.create(model="policy", messages=CHAT, tools=TOOLS).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add."
        calls = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("add", {"a": 1, "b": 2})
        ] * 2
        assert calls[0].id != calls[1].id

        chunks = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(model="policy", messages=CHAT, tools=TOOLS, stream=True)
        ]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "I add."
        found = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in found] == [(0, "add"), (1, "add")]
        assert chunks[-1].finish_reason == "tool_calls"

        (plain,) = client.chat.completions.create(model="policy", messages=CHAT).choices
        assert plain.message.tool_calls is None
        assert CALL in plain.message.content


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "ordinary text"])
@pytest.mark.parametrize("name", OURS)
def test_calls_in_every_format_whatever_its_marks_are_for_the_tokenizer(name: str, special: bool) -> None:
    marks = PARSERS[name].marks
    if not special and not all(mark.isascii() for mark in marks):
        pytest.skip("the test's tokenizer has no token for other characters")
    # the last token before the end is special too, and no mark: nobody sees it
    text = f"{written(name)}<|note|>"
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMAS["find"]}}]
    asked = {"model": "policy", "messages": CHAT, "tools": tools}
    with scripted(text, 700, 1100, name, ["<|note|>", *(marks if special else ())]) as (client, _):
        (choice,) = client.chat.completions.create(**asked).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert found == [(FIND.name, FIND.arguments)] * 2

        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
        calls = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == found


def test_harmony_answers_are_the_final_channel() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>six"
    with scripted(text, tool_format="gpt-oss", special=PARSERS["gpt-oss"].marks) as (client, _):
        (choice,) = client.chat.completions.create(model="policy", messages=CHAT, tools=TOOLS).choices
        assert (choice.message.content, choice.finish_reason) == ("six", "stop")
        chunks = client.chat.completions.create(model="policy", messages=CHAT, tools=TOOLS, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "six"


def test_what_is_no_call_stays_text() -> None:
    text = "<tool_call>not json</tool_call>"
    with scripted(text) as (client, _):
        (choice,) = client.chat.completions.create(model="policy", messages=CHAT, tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_settings_reach_the_engine() -> None:
    with scripted("x") as (client, backend):
        client.completions.create(
            model="policy",
            prompt="a",
            max_tokens=7,
            temperature=0.5,
            top_p=0.75,
            seed=11,
            extra_body={
                "top_k": 4,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "ignore_eos": True,
                "stop_token_ids": [5],
                "session": "s",
            },
        )
        client.chat.completions.create(model="policy", messages=CHAT, max_completion_tokens=9, frequency_penalty=0)
    (first, session), (second, _) = backend.requests
    assert session == "s"
    assert first.sampling == SamplingParams(
        7,
        temperature=0.5,
        top_p=0.75,
        top_k=4,
        min_p=0.125,
        repetition_penalty=1.5,
        seed=11,
        ignore_eos=True,
        stop_token_ids=(5,),
    )
    assert (second.sampling.max_tokens, second.sampling.temperature) == (9, 1.0)


@pytest.mark.parametrize(
    ("settings", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"temperature": -1}, 422, "temperature"),
        ({"top_p": "high"}, 422, "top_p"),
        ({"n": 0}, 422, "n"),
        ({"max_tokens": 1000}, 400, "max_tokens"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "top_logprobs"),
        ({"tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"extra_body": {"unheard_of": 1}}, 400, "unheard_of"),
    ],
)
def test_what_is_wrong_is_told_in_openais_form(settings: dict[str, Any], status: int, param: str) -> None:
    with scripted("x") as (client, _), pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": "policy", "messages": CHAT, **settings})
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert caught.value.body["type"] == "invalid_request_error"


def test_unknown_routes_broken_bodies_and_failing_backends() -> None:
    with scripted("x") as (client, backend):
        url = str(client.base_url)
        with pytest.raises(HTTPError) as unknown:
            urlopen(f"{url}nothing", timeout=20)
        assert unknown.value.code == 404
        with pytest.raises(HTTPError) as broken:
            urlopen(f"{url}completions", data=b"{", timeout=20)
        assert (broken.value.code, "not JSON" in json.load(broken.value)["error"]["message"]) == (400, True)

        async def fail(request: GenerationRequest, *, session: str | None = None) -> Completion:
            raise RolloutError("request 'r': not completed within the time limit of 1 s")

        backend.generate = fail  # type: ignore[method-assign]
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model="policy", messages=CHAT, stream=stream)
            assert caught.value.status_code == 504


def test_a_prompt_that_leaves_little_room_gets_a_shorter_answer() -> None:
    with scripted("a" * 300, default_max_tokens=300) as (client, backend):
        client.completions.create(model="policy", prompt="b" * 390)
        assert backend.requests[0][0].sampling.max_tokens == 10
        with pytest.raises(openai.BadRequestError, match="exceed the model's 400") as caught:
            client.completions.create(model="policy", prompt="b" * 400)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.dist
@pytest.mark.usefixtures("ray_local")
def test_one_endpoint_before_two_replicas(tiny_model_dir: str, tmp_path: Path) -> None:
    rollout = RolloutConfig(dtype="float32", prompt_length=64, response_length=20)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with replicas(ServerSpec(ModelConfig(path=tiny_model_dir), rollout, "cpu", 5), 2) as group:
        load(group, model)
        endpoint = OpenAIEndpoint(group.client(), make_tokenizer(), ApiSettings("policy", 20))
        with in_thread(endpoint.start) as url:
            client = client_of(url)
            greedy = {"model": "policy", "messages": CHAT, "temperature": 0, "extra_body": {"ignore_eos": True}}
            answers = [client.chat.completions.create(**greedy).choices[0].message.content for _ in range(4)]
            assert len(set(answers)) == 1
            assert [health.requests for health in group.call("health")] == [2, 2]
            stream = client.chat.completions.create(**greedy, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answers[0]
            # the pieces of a stream go where its beginning is
            assert sorted(health.requests for health in group.call("health"))[0] == 2


def test_an_endpoint_with_a_key_answers_those_who_have_it() -> None:
    backend = Scripted("hi")
    settings = ApiSettings("policy", 300, 400, api_key="s3cret")
    assert "s3cret" not in repr(settings)
    endpoint = OpenAIEndpoint(backend, backend.tokenizer, settings)
    with in_thread(endpoint.start) as url:
        for key in ("none", "s3cre"):
            stranger = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)
            with pytest.raises(openai.AuthenticationError, match="VERL_SERVER_API_KEY"):
                stranger.chat.completions.create(model="policy", messages=CHAT)
        assert not backend.requests
        friend = openai.OpenAI(base_url=url, api_key="s3cret", max_retries=0, timeout=30)
        assert friend.chat.completions.create(model="policy", messages=CHAT).choices[0].message.content == "hi"


def status_of(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a raw request."""
    request = Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, {}
    except HTTPError as error:
        return error.code, json.load(error)["error"]


def chat_of(**more: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": CHAT, **more}).encode()


def completion_of(**more: Any) -> bytes:
    return json.dumps({"model": "policy", "prompt": "a", **more}).encode()


DEEP = {"role": "user", "content": "a", "extra": json.loads("[" * 200 + "]" * 200)}


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("completions", completion_of(n=50_000), 400, ["n=50000", "128"]),
        ("completions", completion_of(n=2, prompt=["a"] * 100), 400, ["n times prompts=200", "128"]),
        ("completions", completion_of(prompt=["a"] * 200), 400, ["number of prompts=200", "128"]),
        ("completions", completion_of(best_of=50_000), 400, ["best_of=50000"]),
        ("completions", completion_of(logprobs=50), 400, ["logprobs=50"]),
        ("completions", completion_of(max_tokens=1 << 40), 400, ["max_tokens=1099511627776", str(1 << 20)]),
        ("completions", completion_of(stop=["x"] * 100), 400, ["number of stop texts=100", "16"]),
        ("completions", completion_of(stop="x" * 5000), 400, ["characters of a stop text=5000", "1024"]),
        ("completions", completion_of(stop=["a", ""]), 422, ["an empty text"]),
        ("completions", completion_of(stop_token_ids=[1] * 5000), 400, ["stop_token_ids=5000", "1024"]),
        ("completions", completion_of(prompt="a" * 100_000), 400, ["=100000", "25600"]),
        ("completions", completion_of(prompt=[5, 10**9]), 400, ["no token 1000000000"]),
        ("completions", completion_of(prompt=[5, -1]), 400, ["no token -1"]),
        ("completions", completion_of(prompt="a\ud83d"), 400, ["character 1", "half of a character"]),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, ["NaN is not part of JSON"]),
        ("completions", b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400, ["not JSON"]),
        ("completions", b"[" * 100_000, 400, ["nested"]),
        ("completions", b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, ["nested more than 64"]),
        ("completions", b"[1]", 400, ["must be a JSON object"]),
        ("completions", b"\xff\xfe{}", 400, ["not JSON"]),
        ("completions", b'{"prompt": "' + b"a" * (17 << 20) + b'"}', 413, [str(16 << 20)]),
        ("chat/completions", chat_of(n=129), 400, ["n=129", "128"]),
        ("chat/completions", chat_of(messages=CHAT * 5000), 400, ["number of messages=5000", "4096"]),
        ("chat/completions", chat_of(messages=[DEEP]), 400, ["nested more than 64"]),
        ("chat/completions", chat_of(messages=[{"role": "user", "content": "\udc00"}]), 400, ["half of a character"]),
        ("chat/completions", chat_of(messages=[{"role": "user", "content": "a" * 30_000}]), 400, ["25600"]),
        ("chat/completions", chat_of(messages=[{"role": "user", "content": [{"type": "text"}]}]), 422, ["text"]),
        ("chat/completions", chat_of(tools=TOOLS * 600), 400, ["number of tools=600", "512"]),
        ("chat/completions", chat_of(tools=[{"function": {"description": "\ud800"}}]), 400, ["half of a character"]),
    ],
)  # fmt: skip
def test_requests_beyond_a_limit_are_refused_by_value_and_limit(
    route: str, body: bytes, status: int, words: list[str]
) -> None:
    with scripted("x") as (client, backend):
        found, error = status_of(f"{client.base_url}{route}", body)
        assert found == status, error
        assert all(word in error["message"] for word in words), error
        assert backend.requests == []
        client.completions.create(model="policy", prompt="a")  # the next one is served


def test_a_large_prompt_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted("x", max_model_len=1 << 20) as (client, backend):
        encode = backend.tokenizer.encode
        began, may_end = Event(), Event()

        def slow(text: str, **settings: Any) -> list[int]:
            if len(text) > 1000:
                began.set()
                assert may_end.wait(60)
            return encode(text, **settings)

        monkeypatch.setattr(backend.tokenizer, "encode", slow)
        body = completion_of(prompt="a" * 100_000)
        large = Thread(target=lambda: status_of(f"{client.base_url}completions", body))
        large.start()
        assert began.wait(30)
        client.completions.create(model="policy", prompt="a", timeout=20)
        client.chat.completions.create(model="policy", messages=CHAT, timeout=20)
        may_end.set()
        large.join(60)
        assert len(backend.requests) == 3


@pytest.mark.parametrize("stops", [[], ["9\n数"], ["学は", "zz"]])
def test_a_long_stream_in_every_size_of_pieces_is_the_whole_answer(stops: list[str]) -> None:
    text = "".join(f"{number % 10}\n数学は楽しい😀 " for number in range(40))
    backend = Scripted("")
    backend.tokenizer = byte_level()
    backend.tokens = [*backend.tokenizer.encode(text), backend.tokenizer.eos_token_id]
    endpoint = OpenAIEndpoint(backend, backend.tokenizer, ApiSettings("policy", 5000, 8000))
    with in_thread(endpoint.start) as url:
        client = client_of(url)
        settings = {"model": "policy", "prompt": "a", **({"stop": stops} if stops else {})}
        whole = client.completions.create(**settings).choices[0]
        streamed = [chunk.choices[0] for chunk in client.completions.create(**settings, stream=True)]
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert whole.text == (text[: min(places)] if places else text)
    assert "".join(chunk.text for chunk in streamed) == whole.text
    assert streamed[-1].finish_reason == whole.finish_reason == "stop"


def test_numbers_that_are_none_are_valid_json() -> None:
    """An engine's log-probability of a token that it could not sample."""
    with scripted("ab") as (client, backend):

        async def odd(request: GenerationRequest, *, session: str | None = None) -> Completion:
            return Completion([5, 6], [float("-inf"), float("nan")], "stop", 3)

        backend.generate = odd  # type: ignore[method-assign]
        for stream in (False, True):
            body = completion_of(logprobs=0, stream=stream)
            with urlopen(Request(f"{client.base_url}completions", data=body), timeout=20) as answer:
                for line in answer.read().decode().splitlines():
                    data = line.removeprefix("data: ")
                    if data.startswith("{"):
                        json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

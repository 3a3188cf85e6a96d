"""What engines answer is checked in one place, whichever engine it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from verl.errors import RolloutError, WeightSyncError
from verl.workers.rollout.pausing import PauseController
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams


def answer(engine: str, tokens: Sequence[int], log_probs: Sequence[float]) -> list[Completion]:
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=4), "rollout-3-7-0")

    async def serve(requests: list[GenerationRequest]) -> list[Completion]:
        return [Completion(list(tokens), list(log_probs), "length")]

    return asyncio.run(PauseController(engine, 10).run(serve, [request]))


def test_good_completions_pass() -> None:
    assert answer("vllm", [0, 9], [-0.5, 0.0])[0].token_ids == [0, 9]
    assert answer("vllm", [], [])[0].token_ids == []


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_not_finite(engine: str, value: float) -> None:
    with pytest.raises(RolloutError) as raised:
        answer(engine, [3, 4], [-0.5, value])
    text = str(raised.value)
    assert (
        f"rollout.name={engine}: the engine answered request 'rollout-3-7-0' with the log-probability {value}" in text
    )
    assert "for token 4 at position 1" in text
    assert (
        "lower the learning rate" if engine == "hf" else f"leave out settings of rollout.engine_kwargs.{engine}"
    ) in text


@pytest.mark.parametrize("token", [-1, 10, 2**40])
def test_tokens_outside_of_the_vocabulary(token: int) -> None:
    with pytest.raises(RolloutError, match=rf"token id {token} at position 1, outside of the model's vocabulary of 10"):
        answer("sglang", [3, token], [-0.5, -0.1])


def test_missing_log_probabilities() -> None:
    with pytest.raises(RolloutError, match="2 tokens and 1 log-probabilities"):
        answer("vllm", [3, 4], [-0.5])


# --- answers that say no ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "asked"), [([True], [{}]), ([False, True], [{}, {"reset_running_requests": True}])]
)
def test_vllm_is_asked_again_when_it_keeps_its_cache(answers: list[bool], asked: list[dict[str, bool]]) -> None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    calls: list[dict[str, bool]] = []
    left = iter(answers)

    class Engine:
        def reset_prefix_cache(self, **options: bool) -> bool:
            calls.append(options)
            return next(left)

    rollout = object.__new__(VLLMRolloutEngine)
    rollout.engine = Engine()
    rollout._drop_cache(WeightSyncError)
    assert calls == asked


def test_a_cache_of_older_weights_is_an_error() -> None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    rollout = object.__new__(VLLMRolloutEngine)
    rollout.engine = type("Engine", (), {"reset_prefix_cache": lambda self, **_: False})()
    with pytest.raises(WeightSyncError, match=r"kept keys and values of older weights.*enable_prefix_caching=False"):
        rollout._drop_cache(WeightSyncError)


@pytest.mark.parametrize(
    ("status", "answer", "refused"),
    [
        (200, {"success": True}, False),
        (200, {"success": False, "message": "no room"}, True),
        (400, {"error": "x"}, True),
    ],
)
def test_a_server_that_refuses_is_heard_whatever_its_status(status: int, answer: dict[str, Any], refused: bool) -> None:
    pytest.importorskip("aiohttp")
    from verl.workers.rollout.sglang.connection import Connection

    class Response:
        content_type = "application/json"

        async def __aenter__(self) -> Response:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        async def text(self) -> str:
            return ""

        async def json(self) -> Any:
            return answer

    Response.status = status  # type: ignore[attr-defined]
    connection = object.__new__(Connection)
    connection.url = "http://server"
    session = type("Session", (), {"request": lambda self, *_, **__: Response()})()
    connection._open = lambda: session  # type: ignore[method-assign]
    if refused:
        with pytest.raises(RolloutError, match="http://server/flush answered"):
            asyncio.run(connection._request("POST", "/flush", {}))
    else:
        assert asyncio.run(connection._request("POST", "/flush", {})) == answer

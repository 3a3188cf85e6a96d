"""What engines answer is checked in one place, whichever engine it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from verl.errors import RolloutError
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.serving import Gate


def answer(engine: str, tokens: Sequence[int], log_probs: Sequence[float]) -> list[Completion]:
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=4), "rollout-3-7-0")

    async def serve(requests: list[GenerationRequest]) -> list[Completion]:
        return [Completion(list(tokens), list(log_probs), "length")]

    return asyncio.run(Gate(engine, 10).run(serve, [request]))


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

"""A judge behind a real HTTP server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.rewards.batches import TOKENIZER, batch
from tests.rewards.servers import serve
from verl.config import CustomRewardFunctionConfig, PPOConfig, RewardConfig, RewardManagerConfig
from verl.errors import ConfigError, RewardError
from verl.rewards import load_reward_manager
from verl.rewards.judge import compute_score, fill, parse_score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Good.\nScore: 7", 7.0),
        ("score: 3 ... no, **Score: 8.5**", 8.5),
        ('{"reason": "ok", "score": 4}', 4.0),
        ("I say [[9]]", 9.0),
        ("Score: -1", -1.0),
        ("seven", None),
        ('{"score": "high"}', None),
    ],
)
def test_parsing(reply: str, score: float | None) -> None:
    assert parse_score(reply) == score


def test_values_are_not_templates() -> None:
    assert fill("{question} and {response}", question="{response}", response="{x}") == "{response} and {x}"


def chat(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_request_and_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serve("/v1/chat/completions", lambda *_: (200, chat("Fine. Score: 7"))) as service:
        result = asyncio.run(
            compute_score(
                "d",
                "my answer",
                "the truth",
                {},
                prompt_str="why?",
                base_url=f"{service.url}/v1/",
                model="m",
                api_key_env="JUDGE_KEY",
                extra_body={"top_p": 0.9},
            )
        )
        assert result == {"score": 0.7, "judge_score": 7.0}
        request = service.requests[0]
        assert (request["model"], request["temperature"], request["top_p"]) == ("m", 0.0, 0.9)
        text = request["messages"][0]["content"]
        assert "my answer" in text
        assert "the truth" in text
        assert "why?" in text
        assert "from 0 (wrong or useless) to 10" in text
        assert service.headers[0]["Authorization"] == "Bearer secret"


def test_scale_is_cut() -> None:
    with serve("/chat/completions", lambda *_: (200, chat("Score: 12"))) as service:
        options = {"base_url": service.url, "model": "m"}
        assert asyncio.run(compute_score("d", "a", "t", None, **options))["score"] == 1.0
        assert asyncio.run(compute_score("d", "a", "t", None, low=10, high=20, **options))["score"] == 0.2
        with pytest.raises(ConfigError, match="high must be above low"):
            asyncio.run(compute_score("d", "a", "t", None, low=1, high=1, **options))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, chat("I would rather not say")), "gave no score; its reply ends in 'I would rather not say'"),
        ((200, {"error": "x"}), "did not answer as a chat completion"),
        ((401, {"error": "who are you"}), "HTTP 401.*who are you"),
    ],
)
def test_no_score_is_an_error(answer: Any, message: str) -> None:
    with serve("/chat/completions", lambda *_: answer) as service, pytest.raises(RewardError, match=message):
        asyncio.run(compute_score("d", "a", "t", None, base_url=service.url, model="m"))


@pytest.mark.parametrize("manager", ["naive", "streaming"])
def test_as_reward_function_of_a_run(manager: str) -> None:
    def answer(request: dict[str, Any], _: int) -> Any:
        time.sleep(0.1)
        text = request["messages"][0]["content"]
        return 200, chat("Score: 10" if "[Answer to be judged]\ngood" in text else "Score: 0")

    with serve("/v1/chat/completions", answer) as service:
        function = CustomRewardFunctionConfig(
            path="pkg://verl.rewards.judge", reward_kwargs={"base_url": f"{service.url}/v1", "model": "m"}
        )
        reward = RewardConfig(
            custom_reward_function=function,
            reward_manager=RewardManagerConfig(name=manager),
            max_concurrent=4,
            timeout_s=20.0,
        )
        built = load_reward_manager(PPOConfig(reward=reward), TOKENIZER)
        result = built(batch(["good", "bad"] * 6), return_dict=True)
        built.close()
        assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0] * 6
        assert result["reward_extra_info"]["judge_score"] == [10.0, 0.0] * 6
        assert 2 <= service.most_at_once <= 4
        assert "[Question]\nab" in service.requests[0]["messages"][0]["content"]

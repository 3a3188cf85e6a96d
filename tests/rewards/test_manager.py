"""From responses to token-level scores, and what happens where there is no score."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rewards.batches import TOKENIZER, R, batch
from verl.config import CustomRewardFunctionConfig, DataConfig, PPOConfig, RewardConfig, RewardManagerConfig
from verl.errors import ConfigError, DataError, RewardError
from verl.rewards import REWARD_MANAGERS, RewardOutcome, ScoringOptions, load_reward_manager
from verl.workers.reward_manager import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    get_reward_manager_cls,
    register,
)


def manager(function: Callable[..., Any] | None = None, **options: Any) -> NaiveRewardManager:
    return NaiveRewardManager(TOKENIZER, 0, function, scoring=ScoringOptions(**options))


def by_text(answers: dict[str, Any]) -> Callable[..., Any]:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        answer = answers[solution_str]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return compute_score


def test_score_sits_on_the_last_valid_token() -> None:
    seen: list[tuple[Any, ...]] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(len(solution_str))

    rewards = manager(compute_score)(batch(["xyz", "123456", "q"]))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[0, 0, 0, 3, 0, 0], [0, 0, 0, 0, 0, 6], [0, 1, 0, 0, 0, 0]]
    # special tokens and padding are not part of the text
    assert seen == [("d", "xyz", "7", {"index": 0}), ("d", "123456", "7", {"index": 1}), ("d", "q", "7", {"index": 2})]


def test_score_sits_on_the_last_sampled_token_when_tool_output_follows() -> None:
    data = batch(["123456"])
    data.batch["response_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0]])
    assert manager(by_text({"123": 2.0}))(data).tolist() == [[0, 0, 2, 0, 0, 0]]


def test_batch_without_response_mask() -> None:
    data = batch(["xy"])
    data.pop(batch_keys=["response_mask"])
    assert manager(by_text({"xy": 2.0}))(data).tolist() == [[0, 0, 2, 0, 0, 0]]


def test_extra_values_have_one_entry_per_sample() -> None:
    function = by_text(
        {"a": {"score": 1.0, "acc": 1, "pred": "x"}, "b": 0.5, "c": {"score": 0.0, "acc": 0, "note": None}}
    )
    result = manager(function)(batch(["a", "b", "c"]), return_dict=True)
    info = result["reward_extra_info"]
    assert info["score"] == [1.0, 0.5, 0.0]
    assert info["acc"][0] == 1
    assert math.isnan(info["acc"][1])
    assert info["acc"][2] == 0
    assert info["pred"] == ["x", None, None]
    assert info["note"] == [None, None, None]
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.5, 0.0]
    assert result["sample_mask"].tolist() == [True, True, True]
    assert result["reward_metrics"] == {
        "reward/errors": 0.0,
        "reward/timeouts": 0.0,
        "reward/abstained": 0.0,
        "reward/empty_responses": 0.0,
    }


def test_empty_response_is_scored_but_has_no_token_for_it() -> None:
    result = manager(by_text({"": 3.0, "a": 1.0}))(batch(["", "a"]), return_dict=True)
    assert result["reward_tensor"].tolist() == [[0] * 6, [0, 1, 0, 0, 0, 0]]
    assert result["reward_extra_info"]["score"] == [3.0, 1.0]
    assert result["reward_metrics"]["reward/empty_responses"] == 1.0


def test_default_is_to_stop_at_the_first_error_with_its_traceback() -> None:
    function = by_text({"a": 1.0, "b": 1.0, "c": ZeroDivisionError("oops")})
    with pytest.raises(RewardError) as error:
        manager(function)(batch(["a", "b", "c"]))
    text = str(error.value)
    assert "failed on 1 of 3 samples; the first is sample 2 with data_source='d' and response 'c'" in text
    assert "ZeroDivisionError: oops" in text
    assert "reward.on_error=penalise" in text


@pytest.mark.parametrize("value", [None, math.nan, "1.0", {"acc": 1}])
def test_a_value_that_is_no_score_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="the reward function returned"):
        manager(by_text({"a": 1.0, "b": 1.0, "c": value}))(batch(["a", "b", "c"]))


def test_errors_as_a_configured_score() -> None:
    function = by_text({"a": 1.0, "b": 0.0, "c": ValueError("x")})
    result = manager(function, on_error="score", error_score=-1.0)(batch(["a", "b", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0, -1.0]
    assert result["reward_metrics"]["reward/errors"] == 1.0
    assert result["reward_metrics"]["reward/abstained"] == 0.0
    assert result["sample_mask"].tolist() == [True, True, True]


def test_errors_and_abstentions_take_samples_out_of_the_loss() -> None:
    function = by_text({"a": 1.0, "b": RewardOutcome.abstain(), "c": ValueError("x")})
    data = batch(["a", "b", "c"])
    result = manager(function, on_error="abstain")(data, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0, 0.0]
    assert result["sample_mask"].tolist() == [True, False, False]
    assert result["reward_metrics"]["reward/errors"] == 1.0
    assert result["reward_metrics"]["reward/abstained"] == 2.0
    assert [math.isnan(s) for s in result["reward_extra_info"]["score"]] == [False, True, True]


def test_timeouts_have_their_own_policy() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        while solution_str == "b":
            pass
        return 1.0

    options = {"timeout_s": 0.3, "on_timeout": "score", "error_score": 0.25}
    result = manager(compute_score, **options)(batch(["a", "b", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.25, 1.0]
    assert result["reward_metrics"]["reward/timeouts"] == 1.0
    with pytest.raises(RewardError, match=r"no score within 0\.3 s[\s\S]*reward\.on_timeout=penalise"):
        manager(compute_score, timeout_s=0.3, on_error="score")(batch(["a", "b", "c"]))


def test_too_many_failures_stop_the_run_whatever_the_policy() -> None:
    bad = ValueError("first problem")
    function = by_text({"a": 1.0, "b": bad, "c": bad})
    with pytest.raises(RewardError, match=r"failed on 67% of the batch, more than 50%[\s\S]*first problem"):
        manager(function, on_error="score")(batch(["a", "b", "c"]))
    with pytest.raises(RewardError, match=r"failed on every sample[\s\S]*first problem"):
        manager(by_text({"b": bad}), on_error="score", max_failed_fraction=1.0)(batch(["b", "b"]))


def test_unknown_data_source_is_an_error_of_set_up() -> None:
    with pytest.raises(RewardError, match=r"cannot be used: no built-in scorer for data_source='d'.*openai/gsm8k"):
        manager(on_error="score")(batch(["a"]))


def test_ready_made_scores_pass_through() -> None:
    data = batch(["a", "b"])
    data.batch["rm_scores"] = torch.full((2, R), 0.5)
    data.non_tensor_batch["acc"] = np.array([1, 0], dtype=object)
    data.meta_info["reward_extra_keys"] = ["acc"]
    result = manager(by_text({}))(data, return_dict=True)
    assert torch.equal(result["reward_tensor"], data.batch["rm_scores"])
    assert result["reward_extra_info"] == {"acc": [1, 0]}
    assert result["sample_mask"].tolist() == [True, True]


def test_missing_fields_are_named() -> None:
    data = batch(["a"])
    del data.non_tensor_batch["reward_model"]
    with pytest.raises(DataError, match="no 'reward_model'"):
        manager(by_text({"a": 1.0}))(data)
    data = batch(["a"], reward_model=np.array(["rule"], dtype=object))
    with pytest.raises(DataError, match="sample 0: reward_model='rule' is no mapping with 'ground_truth'"):
        manager(by_text({"a": 1.0}))(data)


def test_examples_are_logged_per_source(caplog: pytest.LogCaptureFixture) -> None:
    function = by_text({"a": 1.0, "b": 0.0, "c": 0.0})
    with caplog.at_level(logging.INFO, logger="verl"):
        NaiveRewardManager(TOKENIZER, 2, function)(batch(["a", "b", "c"]))
    lines = [r.getMessage() for r in caplog.records if r.name == "verl.rewards.manager"]
    assert lines[0] == "[d] prompt: 'ab' | response: 'a' | ground truth: '7' | score: 1.0"
    assert len(lines) == 2


def test_batch_manager_calls_once() -> None:
    calls: list[dict[str, Any]] = []

    def compute_score(**arguments: Any) -> list[Any]:
        calls.append(arguments)
        return [len(s) if s != "bad" else None for s in arguments["solution_strs"]]

    scoring = ScoringOptions(on_error="score", error_score=-2.0)
    scores = BatchRewardManager(TOKENIZER, 0, compute_score, scoring=scoring)(batch(["a", "bad", "xyz"])).sum(1)
    assert scores.tolist() == [1.0, -2.0, 3.0]
    assert len(calls) == 1
    assert calls[0] == {
        "data_sources": ["d"] * 3,
        "solution_strs": ["a", "bad", "xyz"],
        "ground_truths": ["7"] * 3,
        "extra_infos": [{"index": i} for i in range(3)],
    }
    with pytest.raises(RewardError, match="returned 1 results for 2 samples"):
        BatchRewardManager(TOKENIZER, 0, lambda **k: [1.0])(batch(["a", "b"]))
    with pytest.raises(ConfigError, match="needs a function that scores a whole batch"):
        BatchRewardManager(TOKENIZER, 0)


def test_dapo_punishes_long_responses_softly() -> None:
    function = by_text({"a": 1.0, "abc": 1.0, "abcd": 0.0, "abcdef": 1.0})
    dapo = DAPORewardManager(
        TOKENIZER,
        0,
        function,
        max_resp_len=6,
        overlong_buffer_cfg={"enable": True, "len": 4, "penalty_factor": 0.5, "log": True},
    )
    # lengths with the end token: 2, 4, 5, 6; nothing up to 6 - 4 = 2 tokens, then 0.5 * (n - 2) / 4
    result = dapo(batch(["a", "abc", "abcd", "abcdef"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.75, -0.375, 0.5]
    assert result["reward_extra_info"]["acc"] == [1.0, 1.0, 0.0, 1.0]
    assert result["reward_extra_info"]["overlong_reward"] == [0.0, -0.25, -0.375, -0.5]
    assert result["reward_extra_info"]["overlong"] == [False, True, True, True]
    assert dapo.overlong(100) == -0.5
    off = DAPORewardManager(TOKENIZER, 0, function)(batch(["abcdef"]), return_dict=True)
    assert off["reward_tensor"].sum().item() == 1.0
    with pytest.raises(ConfigError, match="0 < len <= max_resp_len"):
        DAPORewardManager(TOKENIZER, 0, function, max_resp_len=2, overlong_buffer_cfg={"enable": True, "len": 4})
    with pytest.raises(ConfigError, match="unknown key 'length'"):
        DAPORewardManager(TOKENIZER, 0, function, overlong_buffer_cfg={"length": 4})


# --- from a configuration ---------------------------------------------------------------------------------------------


def config(path: str | None = None, name: str = "compute_score", manager: str = "naive", **reward: Any) -> PPOConfig:
    kwargs = reward.pop("function_kwargs", {})
    return PPOConfig(
        data=DataConfig(),
        reward=RewardConfig(
            custom_reward_function=CustomRewardFunctionConfig(path=path, name=name, reward_kwargs=kwargs),
            reward_manager=RewardManagerConfig(name=manager),
            **reward,
        ),
    )


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, weight=1.0):\n"
        "    return weight * len(solution_str)\n"
        "def other(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0, 'acc': 1.0}\n"
        "async def slow(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 2.0\n"
        "VALUE = 3\n"
    )
    return str(path)


def test_custom_function_with_arguments(code: str) -> None:
    built = load_reward_manager(config(code, function_kwargs={"weight": 2.0}), TOKENIZER, num_examine=0)
    assert built(batch(["a", "abc"])).sum(1).tolist() == [2.0, 6.0]
    assert load_reward_manager(config(code, "slow"), TOKENIZER)(batch(["a"])).sum().item() == 2.0


def test_custom_function_in_processes(code: str) -> None:
    built = load_reward_manager(config(code, num_workers=2, timeout_s=60.0), TOKENIZER)
    try:
        assert built(batch(["a", "abc", "ab"])).sum(1).tolist() == [1.0, 3.0, 2.0]
    finally:
        built.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "/no/such.py"}, "file '/no/such.py' does not exist"),
        ({"path": "CODE", "name": "score_it"}, "has no 'score_it'; it defines compute_score, other, slow"),
        ({"path": "CODE", "name": "VALUE"}, "'VALUE' in .* is int, not a function"),
        ({"path": "CODE", "function_kwargs": {"wheight": 1}}, "wheight"),
        ({"manager": "naiv"}, "unknown reward manager 'naiv'; did you mean 'naive'"),
        ({"reward_kwargs": {"max_resp_len": 5}}, "reward manager 'naive' .*max_resp_len"),
    ],
)
def test_mistakes_are_found_at_start(code: str, settings: dict[str, Any], message: str) -> None:
    settings = {k: code if v == "CODE" else v for k, v in settings.items()}
    with pytest.raises(ConfigError, match=message):
        load_reward_manager(config(**settings), TOKENIZER)


def test_file_that_does_not_import(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_like_this\n")
    with pytest.raises(ConfigError, match=r"importing .*broken\.py' raised ModuleNotFoundError"):
        load_reward_manager(config(str(path)), TOKENIZER)


def test_manager_of_a_plug_in(code: str) -> None:
    class Constant:
        def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", value=1.0, **kwargs):
            self.value, self.compute_score = value, compute_score

        def __call__(self, data, return_dict=False):
            score = self.compute_score(data_source="", solution_str="ab", ground_truth="", extra_info={})
            return torch.full((len(data), R), self.value * score)

    register("constant-for-test")(Constant)
    try:
        assert get_reward_manager_cls("constant-for-test") is Constant
        settings = config(code, manager="constant-for-test", reward_kwargs={"value": 2.0})
        assert load_reward_manager(settings, TOKENIZER)(batch(["x"]))[0, 0].item() == 4.0
    finally:
        del REWARD_MANAGERS._items["constant-for-test"]


def test_the_names() -> None:
    for name in ("naive", "batch", "dapo", "prime", "streaming"):
        assert isinstance(get_reward_manager_cls(name), type)


def test_keys_as_scripts_write_them() -> None:
    from verl.config import load_config

    common = ["data.train_files=a.parquet", "data.val_files=a.parquet", "actor_rollout_ref.model.path=m"]
    loaded = load_config(
        PPOConfig,
        overrides=[
            *common,
            "reward.on_error=fail",
            "reward_model.sandbox_fusion.url=http://host:8080/run_code",
            "reward_model.sandbox_fusion.max_concurrent=64",
            "reward_model.sandbox_fusion.memory_limit_mb=2048",
            "reward_model.reward_manager=streaming",
            "reward_model.max_rpm=600",
        ],
    )
    reward = loaded.reward
    assert (reward.on_error, reward.on_timeout, reward.on_abstain) == ("stop", "stop", "drop_sample")
    assert reward.sandbox.url == "http://host:8080/run_code"
    assert (reward.sandbox.max_concurrent, reward.sandbox.memory_limit_mb) == (64, 2048)
    built = load_reward_manager(loaded, TOKENIZER)
    assert type(built).__name__ == "StreamingRewardManager"
    assert built.scoring.max_rpm == 600


@pytest.mark.parametrize("name", ["naive", "prime", "dapo", "streaming"])
def test_built_in_rules_under_every_manager(name: str) -> None:
    data = batch(["####7", "####8"], ground_truth="7")
    data.non_tensor_batch["data_source"][:] = "openai/gsm8k"
    built = load_reward_manager(config(manager=name), TOKENIZER)
    try:
        assert built(data).sum(1).tolist() == [1.0, 0.0]
    finally:
        built.close()

"""Samples that are scored while others are still being made."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.batches import TOKENIZER, batch
from verl.errors import ConfigError, RewardError
from verl.rewards import RewardOutcome, Sample, ScoringOptions, StreamingRewardManager, make_sample
from verl.rewards.function import ScoreFunction
from verl.rewards.managers import DAPORewardManager, NaiveRewardManager


def sample(text: str) -> Sample:
    return Sample(prompt="p", response=text, length=len(text), data_source="d", ground_truth="g")


def streaming(function: Any, **options: Any) -> StreamingRewardManager:
    return StreamingRewardManager(TOKENIZER, 0, function, scoring=ScoringOptions(**options))


def test_submit_returns_before_the_score_is_there() -> None:
    release = threading.Event()

    def held(solution_str: str, **_: Any) -> float:
        if solution_str == "slow":
            release.wait(20)
        return float(len(solution_str))

    manager = streaming(held)
    slow = manager.submit(sample("slow"))
    quick = manager.submit(sample("ab"))
    assert quick.result(20).score == 2.0  # not behind the slow one
    assert not slow.done()
    release.set()
    assert slow.result(20).score == 4.0
    manager.close()
    assert manager.submit(sample("a")).result(20).score == 1.0  # it opens again when it is used again
    manager.close()


def test_lanes_are_limited() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def counted(solution_str: str, **_: Any) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 1.0

    manager = streaming(counted, max_concurrent=3)
    assert [f.result(20).score for f in [manager.submit(sample(str(i))) for i in range(12)]] == [1.0] * 12
    assert most == 3
    manager.close()


def test_async_functions_and_event_loops() -> None:
    running, most = 0, 0

    async def counted(solution_str: str, **_: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return {"score": float(solution_str), "acc": 1}

    manager = streaming(counted, max_concurrent=5)

    async def agent_loop() -> list[RewardOutcome]:
        return await asyncio.gather(*(manager.score(sample(str(i))) for i in range(20)))

    outcomes = asyncio.run(agent_loop())
    assert [outcome.score for outcome in outcomes] == [float(i) for i in range(20)]
    assert outcomes[3].extra == {"acc": 1}
    assert most == 5
    manager.close()


def test_time_limits_and_errors_are_outcomes() -> None:
    def function(solution_str: str, **_: Any) -> float:
        while solution_str == "loop":
            pass
        return float(solution_str)

    manager = streaming(function, timeout_s=0.3)
    texts = ["1", "loop", "x", "2"]
    kinds = [str(f.result(20).kind) for f in [manager.submit(sample(text)) for text in texts]]
    assert kinds == ["score", "timeout", "error", "score"]
    manager.close()


def test_in_processes(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n"
        "def score(solution_str, **_):\n"
        "    if solution_str == 'die':\n"
        "        os._exit(3)\n"
        "    return float(solution_str)\n"
    )
    manager = streaming(ScoreFunction.from_file(str(path), "score"), num_workers=2, timeout_s=60.0)
    try:
        outcomes = [f.result(120) for f in [manager.submit(sample(t)) for t in ("1", "die", "2")]]
        assert [str(o.kind) for o in outcomes] == ["score", "error", "score"]
    finally:
        manager.close()
    with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
        streaming(lambda **k: 1.0, num_workers=2).submit(sample("1"))


def test_a_batch_uses_the_outcomes_that_are_already_there() -> None:
    calls: list[str] = []

    def counted(solution_str: str, **_: Any) -> float:
        calls.append(solution_str)
        return float(len(solution_str))

    manager = streaming(counted, on_error="drop_sample")
    early = manager.submit(sample("abc"))
    column = np.empty(4, dtype=object)
    column[:] = [early, None, RewardOutcome.error("the sandbox was away"), RewardOutcome.scored(0.5, {"acc": 1})]
    result = manager(batch(["abc", "ab", "x", "y"], score_outcome=column), return_dict=True)
    assert sorted(calls) == ["ab", "abc"]
    assert result["reward_extra_info"]["score"][:2] == [3.0, 2.0]
    assert result["reward_tensor"].sum(1).tolist() == [3.0, 2.0, 0.0, 0.5]
    assert result["sample_mask"].tolist() == [True, True, False, True]
    manager.close()


def test_whole_batches_and_long_responses() -> None:
    def function(solution_str: str, **_: Any) -> float:
        return 1.0

    manager = StreamingRewardManager(
        TOKENIZER, 0, function, max_resp_len=6, overlong_buffer_cfg={"enable": True, "len": 4, "penalty_factor": 1.0}
    )
    # 2 and 6 tokens with the end token: nothing, and the whole factor
    assert manager(batch(["a", "abcdef"])).sum(1).tolist() == [1.0, 0.0]
    assert manager.submit(sample("abcde")).result(20).score == 0.25  # 5 tokens: 3 of 4 into the buffer
    manager.close()
    plain = streaming(function)(batch(["a"]), return_dict=True)
    assert list(plain["reward_extra_info"]) == ["score"]


def test_scoring_of_a_batch_overlaps_with_other_work() -> None:
    release = threading.Event()

    def held(solution_str: str, **_: Any) -> float:
        release.wait(20)
        return 1.0

    for cls in (NaiveRewardManager, DAPORewardManager, StreamingRewardManager):
        release.clear()
        manager = cls(TOKENIZER, 0, held)
        pending = manager.begin(batch(["a", "b"]), background=True)
        assert not pending.done()
        release.set()
        assert pending.result().sum(1).tolist() == [1.0, 1.0]
        manager.close()


def test_errors_in_the_background_are_raised_at_the_result() -> None:
    def broken(solution_str: str, **_: Any) -> float:
        raise ValueError("broken")

    pending = NaiveRewardManager(TOKENIZER, 0, broken).begin(batch(["a"]), background=True)
    with pytest.raises(RewardError, match="broken"):
        pending.result()


def test_sample_from_tokens_has_only_what_the_policy_wrote() -> None:
    ids = TOKENIZER("call12345done")["input_ids"]
    mask = [1] * 4 + [0] * 5 + [1] * 4
    row = {"data_source": "d", "reward_model": {"ground_truth": "g"}, "extra_info": {"index": 3}, "__num_turns__": 4}
    made = make_sample(
        TOKENIZER, prompt_ids=TOKENIZER("hi")["input_ids"], response_ids=ids, response_mask=mask, row=row
    )
    assert made.response == "call\ndone"
    assert made.full_response == "call12345done"
    assert made.prompt == "hi"
    assert made.length == 13
    assert made.extra_info == {"index": 3, "num_turns": 4}
    everything = make_sample(TOKENIZER, prompt_ids=[], response_ids=ids, response_mask=None, row=row)
    assert everything.response == "call12345done"


def test_function_that_asks_for_everything() -> None:
    import torch

    data = batch(["123456"])
    data.batch["response_mask"] = torch.tensor([[1, 1, 0, 0, 1, 1]])
    seen: dict[str, Any] = {}

    def curious(solution_str: str, full_solution_str: str, prompt_str: str, **_: Any) -> float:
        seen.update(own=solution_str, full=full_solution_str, prompt=prompt_str)
        return 1.0

    NaiveRewardManager(TOKENIZER, 0, curious)(data)
    assert seen == {"own": "12\n56", "full": "123456", "prompt": "ab"}

    def modest(**arguments: Any) -> float:
        seen["names"] = sorted(arguments)
        return 1.0

    NaiveRewardManager(TOKENIZER, 0, modest)(data)
    assert seen["names"] == ["data_source", "extra_info", "ground_truth", "solution_str"]

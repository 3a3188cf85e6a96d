"""A score that is no finite number stops on its way, whoever made it, and the message says who."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from tests.agent_loop.script import TOKENIZER as AGENT_TOKENIZER
from tests.agent_loop.script import batch_of, config, row, run
from tests.rewards.batches import TOKENIZER, batch
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, LoopSpec
from verl.agent_loop.proxy_session import ProxySession
from verl.agent_loop.runner import AgentLoopRunner
from verl.errors import DataError, RewardError, ScoreError
from verl.interactions.base import BaseInteraction
from verl.protocol import DataProto
from verl.rewards import OutcomeKind, RewardOutcome, ScoringOptions
from verl.rewards.managers import BatchRewardManager, NaiveRewardManager
from verl.rewards.outcome import as_outcome, checked_score
from verl.tools import ToolResponse, function_tool
from verl.trainer.ppo.scoring import Scorer
from verl.trajectories import Sample
from verl.workers.rollout.serving.openai_protocol import ApiError

NO_SCORES = [math.nan, math.inf, -math.inf, 1e39, -1e300, 10**400, np.float32("nan"), torch.tensor(math.inf)]
"""Not finite as float32, in which scores are kept."""


@pytest.mark.parametrize("value", [*NO_SCORES, "0.5", [1.0], {}, b"1", 1j, Decimal("0.5"), np.zeros(2), object()])
def test_what_is_no_score(value: Any) -> None:
    with pytest.raises(ScoreError, match=r"^tool 'x' gave the reward .*; a finite number is needed"):
        checked_score(value, "tool 'x'")
    assert as_outcome(value).kind is OutcomeKind.ERROR
    assert as_outcome({"score": value}).kind is OutcomeKind.ERROR
    assert as_outcome(RewardOutcome(OutcomeKind.SCORE, value)).kind is OutcomeKind.ERROR


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.array(2), torch.tensor([0.25]), 3e38])
def test_what_is_a_score(value: Any) -> None:
    assert checked_score(value, "x") == float(value)
    assert as_outcome(value).score == float(value)


def test_an_outcome_that_is_no_score_stays_what_it_is() -> None:
    value = RewardOutcome(OutcomeKind.ABSTAIN, 1.0)
    assert as_outcome(value).kind is OutcomeKind.ABSTAIN


def test_one_bad_score_of_a_batch_function_fails_its_sample_alone() -> None:
    function = lambda **given: [10**400, 1.0]  # noqa: E731
    options = ScoringOptions(on_error="penalise", error_score=-1.0)
    manager = BatchRewardManager(TOKENIZER, 0, function, scoring=options)
    assert manager(batch(["a", "b"])).sum(-1).tolist() == [-1.0, 1.0]


# --- tools, partners, environments, agents ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["report", "add"])
@pytest.mark.parametrize("value", [math.nan, 1e39, "high"])
def test_tools(how: str, value: Any) -> None:
    @function_tool("pay")
    def pay() -> Any:
        """Pay."""
        return ToolResponse(text="done"), value, {}

    loops = AgentLoopRunner(config(multi_turn={"tool_rewards": how}), AGENT_TOKENIZER, tools={"pay": pay})
    said = '<tool_call>{"name": "pay", "arguments": {}}</tool_call><|end|>'
    (trajectory,) = run(loops, lambda text: "ok<|end|>" if "<|tool|>" in text else said)
    assert trajectory.aborted == "score"
    assert "tool 'pay' gave the reward" in trajectory.info["error"]
    assert trajectory.trajectory.score is None


def test_rewards_of_tools_for_the_trajectory() -> None:
    @function_tool("pay")
    def pay() -> str:
        """Pay."""
        return "done"

    async def calc_reward(*_: Any, **__: Any) -> float:
        return math.nan

    pay.calc_reward = calc_reward  # type: ignore[method-assign]
    loops = AgentLoopRunner(config(multi_turn={"tool_rewards": "add"}), AGENT_TOKENIZER, tools={"pay": pay})
    said = '<tool_call>{"name": "pay", "arguments": {}}</tool_call><|end|>'
    (trajectory,) = run(loops, lambda text: "ok<|end|>" if "<|tool|>" in text else said)
    assert trajectory.aborted == "score"
    assert "calc_reward of tool 'pay' gave the reward nan" in trajectory.info["error"]


@pytest.mark.parametrize("reward", ["report", "step", "trajectory"])
def test_interactions(reward: str) -> None:
    class Judge(BaseInteraction):
        async def generate_response(self, *_: Any, **__: Any) -> Any:
            return True, "", math.nan, {}

    loops = AgentLoopRunner(config(), AGENT_TOKENIZER)
    loops.interactions = {"judge": Judge({"name": "judge", "reward": reward})}
    loops.default = "tool_agent"
    (trajectory,) = run(loops, lambda _: "ok<|end|>")
    assert trajectory.aborted == "score"
    assert "interaction 'judge' gave the reward nan" in trajectory.info["error"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward_score": math.nan}, "agent loop Mine, as reward_score, gave the reward nan"),
        ({"extra_fields": {"turn_scores": [0.0, -math.inf]}}, r"in turn_scores\[1\], gave the reward -inf"),
        ({"extra_fields": {"turn_scores": 1.0}}, "turn_scores=1.0; give a list"),
        ({"reward_score": "good"}, "as reward_score, gave the reward 'good'"),
    ],
)
def test_agent_loops(given: dict[str, Any], words: str) -> None:
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return AgentLoopOutput([5], [6, 7, 8], [1, 0, 1], [0.0] * 3, **given)

    loops = AgentLoopRunner(config(), AGENT_TOKENIZER)
    loops.loops = {"mine": LoopSpec(Mine)}
    (trajectory,) = run(loops, lambda _: "ok<|end|>", [row(agent_name="mine")])
    assert trajectory.aborted in ("score", "rollout")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(trajectory.info["error"])


@pytest.mark.parametrize("body", ['{"reward": NaN}', {"reward": math.inf}, {"reward": 10**400}, {"reward": 1e39}, {}])
def test_rewards_that_programs_post(body: Any) -> None:
    session = ProxySession.__new__(ProxySession)
    with pytest.raises(ApiError, match="finite number"):
        session.score(body)
    session.score({"reward": 0.5})
    assert session.reward == 0.5


# --- the last check ---------------------------------------------------------------------------------------------------


def _manager_of(scores: torch.Tensor, mask: list[bool] | None = None) -> Any:
    def judge(data: DataProto, return_dict: bool = False) -> Any:
        result = {"reward_tensor": scores}
        return result if mask is None else {**result, "sample_mask": torch.tensor(mask)}

    return judge


def test_managers_of_users() -> None:
    data = batch(["a", "bc"])
    scores = torch.zeros(2, 6)
    scores[1, 1] = math.nan
    words = r"the reward manager judge gave the score nan to 1 of 2 samples; the first is sample 1 with data_source='d'"
    with pytest.raises(ScoreError, match=words):
        Scorer(_manager_of(scores)).judge(data)
    with pytest.raises(RewardError):
        Scorer(_manager_of(scores * math.inf))(data)
    # where nothing reads them, numbers may be anything
    assert Scorer(_manager_of(scores, [True, False])).judge(data).scores.tolist() == torch.zeros(2, 6).tolist()
    scores = torch.zeros(2, 6)
    scores[:, 5] = math.nan  # behind the responses
    assert Scorer(_manager_of(scores)).judge(data).scores.tolist() == torch.zeros(2, 6).tolist()


def test_reward_models() -> None:
    class Group:
        def compute_rm_score(self, data: DataProto) -> DataProto:
            return DataProto.from_dict({"rm_scores": torch.full((2, 6), math.inf)})

    data = batch(["a", "b"], raw_prompt=np.array([[{"role": "user", "content": "ab"}]] * 2 + [None], object)[:2])
    data.batch["input_ids"] = torch.cat([data.batch["prompts"], data.batch["responses"]], 1)
    data.batch["position_ids"] = data.batch["attention_mask"].cumsum(-1)
    manager = NaiveRewardManager(TOKENIZER, 0, lambda **_: 0.0)
    with pytest.raises(ScoreError, match="the reward model gave the score inf to 2 of 2 samples"):
        Scorer(manager, Group()).judge(data)  # type: ignore[arg-type]


def test_a_penalty_that_is_no_number() -> None:
    options = ScoringOptions(on_error="penalise", error_score=math.nan, max_failed_fraction=1.0)

    def function(solution_str: str, **_: Any) -> float:
        return float(solution_str)

    manager = NaiveRewardManager(TOKENIZER, 0, function, scoring=options)
    with pytest.raises(ScoreError, match="the reward function .*function.* gave the score nan"):
        Scorer(manager).judge(batch(["1", "x"]))


# --- rows in which the model says nothing -----------------------------------------------------------------------------


def _row(mask: list[int], **more: Any) -> AgentLoopOutput:
    return AgentLoopOutput([5, 6], [7] * len(mask), mask, [0.0] * len(mask), **more)


def _batch_of(output: AgentLoopOutput, prompt_length: int = 4, response_length: int = 4) -> DataProto:
    sample = Sample([output.trajectory()], {"aborted": None})
    return batch_of([sample], prompt_length=prompt_length, response_length=response_length, forks=True)


@pytest.mark.parametrize("scores", [[1.0], [1.0, 2.0], None])
@pytest.mark.parametrize("last", [[], [0, 0]])
def test_a_last_row_in_which_the_model_says_nothing(scores: list[float] | None, last: list[int]) -> None:
    extra = {} if scores is None else {"turn_scores": scores}
    with pytest.raises(DataError, match="1 earlier rows and a last row in which the model says nothing"):
        _batch_of(_row(last, earlier=[_row([1, 0, 1])], extra_fields=extra))


def test_other_counts_of_turns() -> None:
    earlier = [_row([1, 0, 1])]
    for scores in ([], [1.0], [1.0, 2.0], [1.0] * 4):
        with pytest.raises(DataError, match=f"gave {len(scores)} turn_scores for 3 turns"):
            _batch_of(_row([1], earlier=earlier, extra_fields={"turn_scores": scores}))
    made = _batch_of(_row([1], earlier=earlier, extra_fields={"turn_scores": [1.0, 2.0, 4.0]}))
    assert made.batch["turn_scores"].sum().item() == 7.0


def test_earlier_rows_that_are_too_long() -> None:
    earlier = [_row([1, 0, 1])]
    with pytest.raises(DataError, match=r"a response has 3 tokens, more than data.max_response_length=2"):
        _batch_of(_row([1], earlier=earlier), response_length=2)
    with pytest.raises(DataError, match=r"a prompt has 3 tokens, more than data.max_prompt_length=2"):
        long = AgentLoopOutput([5, 6, 7], [8], [1], [0.0])
        _batch_of(_row([1], earlier=[long]), prompt_length=2)


def test_a_loop_with_such_rows_loses_its_trajectory_alone() -> None:
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            await asyncio.sleep(0)
            return _row([0, 0], earlier=[_row([1])], extra_fields={"turn_scores": [1.0]})

    loops = AgentLoopRunner(config(multi_turn={"on_history_rewrite": "fork"}), AGENT_TOKENIZER)
    loops.loops = {"mine": LoopSpec(Mine)}
    bad, good = run(loops, lambda _: "ok<|end|>", [row(agent_name="mine"), row()])
    assert (bad.aborted, good.aborted) == ("data", None)

"""Trajectories forked into rows: every row is what the model saw and wrote, and nothing is trained on twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent_loop.chat_templates import ADDED, TEMPLATES, chat_tokenizer, control_ids, ids_of
from tests.agent_loop.script import TOKENIZER, batch_of, config, row, run
from verl.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.base import AGENT_LOOPS
from verl.agent_loop.conversation import Conversation
from verl.agent_loop.runner import AgentLoopRunner
from verl.agent_loop.templating import ChatTemplater
from verl.config import PPOConfig, load_config
from verl.errors import ConfigError, DataError
from verl.trajectories import Sample, turn_ends
from verl.trajectories.batch import EARLIER_ROWS
from verl.workers.rollout.types import Completion

PROMPT = [{"role": "user", "content": "what is 2*3?"}]
THOUGHT = "<think>\nhm\n</think>\n\n"


def conversation(family: str, *, max_tokens: int = 10_000) -> tuple[Conversation, Any]:
    tokenizer = chat_tokenizer(family, merges=True)
    return (
        Conversation(ChatTemplater(tokenizer), PROMPT, max_tokens=max_tokens, on_history_rewrite="fork"),
        tokenizer,
    )


def turn(tokenizer: Any, text: str) -> Completion:
    ids = [*ids_of(tokenizer, text), tokenizer.eos_token_id]
    return Completion(ids, [-1.0] * len(ids), "stop", 1)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def token_trajectories(talk: Conversation) -> list[Any]:
    return [*talk.earlier, talk.token_trajectory]


def test_dropped_thinking_begins_a_row_with_what_the_template_writes() -> None:
    talk, tokenizer = conversation("qwen3")
    prompt = list(talk.token_trajectory.prompt_ids)
    first, second = turn(tokenizer, f"{THOUGHT}6"), turn(tokenizer, f"{THOUGHT}9")
    talk.add_sampled(first)
    before = talk.token_trajectory
    assert talk.add([user("and 3*3?")])
    assert talk.earlier == [before]
    assert before.ids == first.token_ids, "the finished row is what was sampled"
    shown = tokenizer.apply_chat_template(
        [*PROMPT, {"role": "assistant", "content": f"{THOUGHT}6"}, user("and 3*3?")],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert "hm" not in shown
    assert tokenizer.decode(talk.token_trajectory.context, skip_special_tokens=False) == shown
    assert talk.token_trajectory.prompt_ids == prompt
    assert set(talk.token_trajectory.mask) == {0}
    talk.add_sampled(second)
    assert [
        token for token, mask in zip(talk.token_trajectory.ids, talk.token_trajectory.mask, strict=True) if mask
    ] == second.token_ids
    output = AgentLoopOutput.from_token_trajectory(talk.token_trajectory, earlier=talk.earlier)
    assert output.num_turns == 4
    assert len(output.extra_fields["state_hashes"]) == 2
    assert [one.response_ids for one in output.earlier] == [first.token_ids]


def test_turns_that_change_nothing_stay_in_one_row() -> None:
    talk, tokenizer = conversation("qwen2.5")
    talk.add_sampled(turn(tokenizer, "6"))
    assert talk.add([user("and 3*3?")])
    assert talk.earlier == []


def test_what_does_not_fit_changes_nothing() -> None:
    talk, tokenizer = conversation("qwen3", max_tokens=40)
    talk.add_sampled(turn(tokenizer, f"{THOUGHT}6"))
    before = list(talk.token_trajectory.ids)
    assert not talk.add([user("and 3*3? " * 20)])
    assert talk.earlier == []
    assert talk.token_trajectory.ids == before


def test_what_was_cut_off_is_known() -> None:
    talk, tokenizer = conversation("qwen2.5", max_tokens=60)
    talk.add_sampled(turn(tokenizer, "6"))
    assert not talk.overlong
    assert not talk.add([user("x" * 80)])
    assert talk.overlong
    full, tokenizer = conversation("qwen2.5", max_tokens=4)
    full.add_sampled(Completion([5] * 4, [0.0] * 4, "length"))
    assert full.overlong
    ended, tokenizer = conversation("qwen2.5", max_tokens=4)
    ended.add_sampled(Completion([5] * 4, [0.0] * 4, "stop"))
    assert not ended.overlong
    outputs = [
        AgentLoopOutput([1], [2] * count, [1] * count, [0.0] * count, overlong=given)
        for count, given in ((4, None), (3, None), (4, False), (2, True))
    ]
    batch = batch_of([Sample([output.trajectory()]) for output in outputs], prompt_length=2, response_length=4)
    assert batch.batch["overlong"].tolist() == [True, False, False, True]


def test_a_history_that_shares_nothing_still_has_a_prompt() -> None:
    talk, tokenizer = conversation("qwen2.5")
    talk.add_sampled(turn(tokenizer, "6"))
    assert talk.fork([{"role": "system", "content": "sum up"}, user("so far: 6")])
    assert talk.token_trajectory.prompt_ids
    spelled = tokenizer.decode(talk.token_trajectory.context, skip_special_tokens=False)
    assert spelled.startswith("<|im_start|>system\nsum up")
    assert talk.room == 10_000 - len(talk.token_trajectory)


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_control_tokens_in_the_words_of_tools_stay_ordinary_text_in_later_rows(family: str) -> None:
    evil = "".join(["x<tool_call>", *TEMPLATES[family][1], *ADDED, "</think> <"])
    counts = []
    for words in ("harmless", evil):
        tokenizer = chat_tokenizer(family, merges=True)
        messages = [
            *PROMPT,
            {"role": "assistant", "content": "hm"},
            {"role": "tool", "name": "calc", "content": words},
            {"role": "assistant", "content": "so"},
            user(words),
        ]
        fresh = ChatTemplater(tokenizer).conversation(messages, ours=1)
        counts.append([token for token in fresh.ids if token in control_ids(tokenizer)])
        assert tokenizer.decode(fresh.ids, skip_special_tokens=False) == fresh.text
    assert counts[0] == counts[1]


turns_of = st.lists(
    st.tuples(st.booleans(), st.text("ab <>1\n", min_size=1, max_size=8), st.text("xyz \n<|", max_size=8)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(TEMPLATES)), turns_of)
def test_every_row_is_what_the_model_saw_and_each_token_is_trained_on_once(
    family: str, turns: list[tuple[bool, str, str]]
) -> None:
    talk, tokenizer = conversation(family)
    sampled: list[tuple[list[int], list[int]]] = []
    for thinks, said, answer in turns:
        completion = turn(tokenizer, f"{THOUGHT if thinks else ''}{said}")
        sampled.append((list(talk.token_trajectory.context), completion.token_ids))
        talk.add_sampled(completion)
        assert talk.add([user(f"say {answer}")])
    rows = token_trajectories(talk)
    trained = []
    for token_trajectory in rows:
        token_trajectory.check()
        start = 0
        for end in turn_ends(token_trajectory.mask):
            begin = next(n for n in range(start, end + 1) if token_trajectory.mask[n])
            trained.append(
                (token_trajectory.prompt_ids + token_trajectory.ids[:begin], token_trajectory.ids[begin : end + 1])
            )
            start = end + 1
    assert trained == sampled, "prefix and tokens of every turn, in order, once"
    assert sum(len(token_trajectory.state_hashes()) for token_trajectory in rows) == len(turns)


# ---- in batches --------------------------------------------------------------------------------------------------


class TwoRows(AgentLoopBase):
    """Forgets what it has said: two turns, each a row of its own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = list(kwargs["raw_prompt_ids"])
        rows = []
        for number in range(2):
            given = [30 + number] * (number + 1)
            said = await self.generate(prompt + given, sampling_params)
            ids = said.token_ids
            rows.append(
                AgentLoopOutput(
                    prompt,
                    given + ids,
                    [0] * len(given) + [1] * len(ids),
                    [0.0] * len(given) + said.log_probs,
                    policy_versions=(number, number),
                    token_versions=[-1] * len(given) + [number] * len(ids),
                )
            )
        last = rows[-1]
        last.earlier = rows[:-1]
        last.extra_fields = {"turn_scores": [0.25, 0.5]}
        return last


@pytest.fixture(autouse=True)
def two_rows() -> Any:
    AGENT_LOOPS._items.pop("two_rows", None)
    register("two_rows")(TwoRows)
    yield
    AGENT_LOOPS._items.pop("two_rows", None)


def test_a_batch_has_the_last_row_and_the_earlier_ones_beside_it() -> None:
    runner = AgentLoopRunner(config(multi_turn={"on_history_rewrite": "fork"}), TOKENIZER)
    trajectories = run(
        runner, lambda text: "ok<|end|>", [row("0", agent_name="two_rows"), row("1", agent_name="two_rows")]
    )
    assert [trajectory.aborted for trajectory in trajectories] == [None, None]
    assert trajectories[0].info["counts"] == {"forked_rows": 1}
    batch = batch_of(trajectories, prompt_length=32, response_length=32, forks=True)
    assert batch.batch["policy_version"].tolist() == [[0, 1]] * 2
    (earlier,) = batch.non_tensor_batch[EARLIER_ROWS][0]
    assert earlier["response_ids"][0] == 30
    assert earlier["turn_scores"] == [0.25]
    assert batch.batch["turn_scores"].sum(1).tolist() == [0.75, 0.75], "the trajectory's score is whole"


def test_rows_that_were_not_asked_for_are_refused() -> None:
    (trajectory,) = run(
        AgentLoopRunner(config(), TOKENIZER), lambda text: "ok<|end|>", [row("0", agent_name="two_rows")]
    )
    assert trajectory.aborted == "rollout"
    assert "trajectories of several rows need rollout.multi_turn.on_history_rewrite=fork" in trajectory.info["error"]


def test_scores_must_fit_the_turns_of_all_rows() -> None:
    runner = AgentLoopRunner(config(multi_turn={"on_history_rewrite": "fork"}), TOKENIZER)
    trajectories = run(runner, lambda text: "ok<|end|>", [row("0", agent_name="two_rows")])
    wrong = Sample([replace(trajectories[0].trajectory, turn_scores=[1.0, 2.0, 3.0])], trajectories[0].info)
    with pytest.raises(DataError, match="gave 3 turn_scores for 2 turns"):
        batch_of([wrong], prompt_length=32, response_length=32, forks=True)


@pytest.mark.parametrize("key", ["algorithm.use_pf_ppo=True"])
def test_what_works_on_single_responses_is_refused(key: str, tiny_model_dir: str) -> None:
    overrides: Sequence[str] = [
        "data.train_files=x.parquet",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.multi_turn.on_history_rewrite=fork",
        key,
    ]
    with pytest.raises(ConfigError, match="a trajectory may have several rows; use refuse or append"):
        load_config(PPOConfig, "ppo_trainer", list(overrides))

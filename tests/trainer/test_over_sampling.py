"""More prompts in progress than a step takes: which groups it gets, and what becomes of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.agent_loop.script import TOKENIZER, config
from tests.agent_loop.ticking import Ticking, length_of, log_prob_of, token_of
from verl.agent_loop.runner import AgentLoopRunner
from verl.checkpoint.state import load_state, save_state
from verl.errors import CheckpointError
from verl.protocol import DataProto
from verl.trainer.ppo.glossary import undocumented
from verl.trainer.ppo.metrics import compute_data_metrics, compute_staleness_metrics
from verl.trainer.ppo.scoring import Scorer
from verl.trainer.ppo.sources.base import SyncSource
from verl.trainer.ppo.sources.group_filter import GroupFilter
from verl.trainer.ppo.sources.over_sampling import OverSamplingSource
from verl.trajectories.batch import ROW_FIELDS
from verl.utils.seeding import derive_seed
from verl.utils.timing import StepTimer

N = 2
LONGEST = 40
SEED = 11


class Prompts:
    """Batches of ``size`` numbered prompts."""

    def __init__(self, size: int = 4) -> None:
        self.size, self.drawn, self.epoch = size, 0, 0

    def __iter__(self) -> Any:
        while True:
            first = self.drawn * self.size
            self.drawn += 1
            numbers = list(range(first, first + self.size))
            yield {
                "input_ids": torch.tensor([[0, 5 + number % 90] for number in numbers]),
                "attention_mask": torch.tensor([[0, 1]] * self.size),
                "index": np.array(numbers, dtype=object),
            }

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Rollout:
    """Runs the agent loops of ``parts`` processes, one after the other, on an engine each."""

    def __init__(self, parts: int = 1) -> None:
        sizes = {"prompt_length": 2, "response_length": LONGEST}
        agent = {"default_agent_loop": "single_turn_agent"}
        self.runner = AgentLoopRunner(config(multi_turn={"enable": False}, agent=agent, **sizes), TOKENIZER)
        self.parts = parts
        self.version = 0
        self.sampled = 0

    def generate_sequences(self, request: DataProto) -> DataProto:
        return DataProto.concat([self._part(part) for part in request.chunk(self.parts)])

    def _part(self, part: DataProto) -> DataProto:
        engine = Ticking(self.version, LONGEST)
        answer = asyncio.run(self.runner.respond(part, engine, seed=SEED, pad_token_id=0))
        self.sampled += engine.sampled
        return answer


def reward(batch: DataProto, return_dict: bool = True) -> dict[str, Any]:
    scores = torch.zeros(batch.batch["responses"].shape)
    scores[:, 0] = batch.batch["responses"][:, 0] % 7
    return {"reward_tensor": scores}


def source(*, parts: int = 1, groups: int = 4, in_progress: int = 8, **kw: Any) -> OverSamplingSource:
    return OverSamplingSource(
        Prompts(),
        Rollout(parts),
        N,
        Scorer(reward),
        groups=groups,
        in_progress=in_progress,
        parts=parts,
        row_fields=ROW_FIELDS,
        **kw,
    )


def steps(made: OverSamplingSource | GroupFilter, first: int, last: int) -> list[tuple[DataProto, dict[str, float]]]:
    """Batches of some steps; every step's weights are the next version."""
    inner = made.source if isinstance(made, GroupFilter) else made
    out = []
    for step in range(first, last + 1):
        inner.rollout.version = step - 1  # type: ignore[attr-defined]
        out.append(made.next_batch(step, StepTimer()))
    return out


def answers(batch: DataProto) -> list[list[int]]:
    masks = batch.batch["response_mask"].bool()
    return [row[mask].tolist() for row, mask in zip(batch.batch["responses"], masks, strict=True)]


def born(batch: DataProto) -> list[int]:
    """The step that began each row, which its uid says."""
    return [int(str(uid).split("-")[0].split(".")[0]) for uid in batch.non_tensor_batch["uid"]]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("staleness", [1, 3])
def test_carried_samples_are_what_they_would_have_been(parts: int, staleness: int) -> None:
    """With one token a tick and random numbers of (seed, place), being cut off changes no token."""
    made = source(carry=True, max_staleness=staleness, parts=parts)
    carried = stale = 0
    seen: set[int] = set()
    for step, (batch, metrics) in enumerate(steps(made, 1, 12), start=1):
        assert len(batch) == 4 * N
        uids = batch.non_tensor_batch["uid"].tolist()
        assert uids == [uid for uid in uids[::N] for _ in range(N)]
        prompts = batch.non_tensor_batch["index"].tolist()[::N]
        assert not seen & set(prompts), "no prompt is trained on twice"
        seen |= set(prompts)
        versions, log_probs = batch.batch["token_versions"], batch.batch["rollout_log_probs"]
        for row, (said, begun) in enumerate(zip(answers(batch), born(batch), strict=True)):
            count = len(said)
            seeds = [derive_seed(SEED, "rollout", begun, sample) for sample in range(8 * N)]
            (seed,) = [s for s in seeds if said == [token_of(s, place) for place in range(length_of(s, LONGEST))]]
            assert count == length_of(seed, LONGEST)
            ages = versions[row, :count].tolist()
            assert ages == sorted(ages)
            assert begun - 1 <= ages[0] <= ages[-1] <= step - 1
            assert step - begun <= staleness
            expected = [log_prob_of(version, place) for place, version in enumerate(ages)]
            assert log_probs[row, :count].tolist() == pytest.approx(expected)
            assert batch.batch["policy_version"][row].tolist() == [ages[0], ages[-1]]
            assert (versions[row, count:] == -1).all()
            stale += len(set(ages)) > 1
        carried += int(metrics["over_sampling/carried"])
        assert metrics["over_sampling/dropped"] == 0
    assert carried > 0
    assert stale > 0, "some samples must have been cut off in the middle"
    drawn = made.dataloader.drawn * 4
    waiting = 0 if made._prompts is None else len(made._prompts)
    held = 0 if made._rows is None else len(made._rows) // N
    assert drawn == len(seen) + waiting + held, "no prompt is lost"


def test_the_number_in_progress_is_kept_up_and_old_groups_are_waited_for() -> None:
    made = source(carry=True, max_staleness=1)
    for step, (batch, metrics) in enumerate(steps(made, 1, 8), start=1):
        assert metrics["over_sampling/started"] == (8 if step == 1 else 4)
        assert metrics["over_sampling/carried"] == 4 * N
        assert max(step - begun for begun in born(batch)) <= 1


def test_dropping_keeps_the_first_groups_and_counts_the_rest() -> None:
    made = source()
    for batch, metrics in steps(made, 1, 5):
        assert metrics["over_sampling/started"] == 8
        assert metrics["over_sampling/dropped"] == 4 * N
        assert metrics["over_sampling/carried"] == 0
        assert "over_sampling/carried_tokens" not in metrics
        assert (batch.batch["token_versions"].amax(1) == batch.batch["policy_version"][:, 0]).all()
    assert made._rows is None
    whole = SyncSource(Prompts(8), Rollout(), N, Scorer(reward), row_fields=ROW_FIELDS)
    whole.next_batch(1, StepTimer())
    assert whole.rollout.sampled > 5 * N  # type: ignore[attr-defined]


def test_cutting_off_samples_fewer_tokens_than_waiting() -> None:
    cut = source()
    cut.next_batch(1, StepTimer())
    whole = SyncSource(Prompts(8), Rollout(), N, Scorer(reward), row_fields=ROW_FIELDS)
    whole.next_batch(1, StepTimer())
    assert cut.rollout.sampled < whole.rollout.sampled  # type: ignore[attr-defined]


@pytest.mark.parametrize("carry", [True, False])
def test_resuming_is_exact(tmp_path: Path, carry: bool) -> None:
    whole, saved = source(carry=carry), source(carry=carry)
    steps(whole, 1, 3)
    steps(saved, 1, 3)
    save_state(tmp_path / "data.pt", saved.state_dict())
    resumed = source(carry=carry)
    resumed.load_state_dict(load_state(tmp_path / "data.pt"))
    for (expected, a), (actual, b) in zip(steps(whole, 4, 8), steps(resumed, 4, 8), strict=True):
        assert a == b
        assert set(expected.batch.keys()) == set(actual.batch.keys())
        for name, value in expected.batch.items():
            assert torch.equal(value, actual.batch[name]), name
            assert value.dtype == actual.batch[name].dtype
        for name in ("uid", "index"):
            assert expected.non_tensor_batch[name].tolist() == actual.non_tensor_batch[name].tolist()


def test_states_of_other_sources() -> None:
    plain = SyncSource(Prompts(), Rollout(), N, Scorer(reward), row_fields=ROW_FIELDS)
    plain.next_batch(1, StepTimer())
    made = source(carry=True)
    made.load_state_dict(plain.state_dict())
    assert made.dataloader.drawn == 1
    steps(made, 2, 3)
    other = source(carry=True, in_progress=2, groups=1)
    with pytest.raises(CheckpointError, match=r"carries 8 samples .* not at most 2 groups of 2"):
        other.load_state_dict(made.state_dict())


def plain_source() -> SyncSource:
    return SyncSource(Prompts(), Rollout(), N, Scorer(reward), row_fields=ROW_FIELDS)


def test_carried_samples_cannot_be_lost_by_leaving_over_sampling_out(caplog: pytest.LogCaptureFixture) -> None:
    """The error names the keys, and the second way that it names works."""
    saved = source(carry=True)
    steps(saved, 1, 3)
    carried = 0 if saved._rows is None else len(saved._rows)
    assert carried
    with pytest.raises(CheckpointError) as info:
        plain_source().load_state_dict(saved.state_dict())
    text = str(info.value)
    assert f"carries {carried} unfinished samples" in text
    assert "this run has actor_rollout_ref.rollout.over_sample_rate=0" in text
    assert "resume with over_sample_rate and partial_rollout as they were" in text
    assert "partial_rollout=False" in text

    between = source(carry=False)
    between.load_state_dict(saved.state_dict())
    ((batch, _),) = steps(between, 4, 4)
    assert len(batch) == 4 * N
    after = plain_source()
    after.load_state_dict(between.state_dict())
    assert after.dataloader.drawn == between.dataloader.drawn
    left = between.state_dict()["prompts"]
    assert ("had drawn and not begun are left out" in caplog.text) == (left is not None)


def test_without_carried_samples_any_source_goes_on() -> None:
    saved = source()
    steps(saved, 1, 2)
    after = plain_source()
    after.load_state_dict(saved.state_dict())
    assert after.dataloader.drawn == saved.dataloader.drawn


def test_states_of_dynamic_sampling_around_over_sampling() -> None:
    filtered = GroupFilter(source(carry=True), groups=4, n=N)
    steps(filtered, 1, 2)
    state = filtered.state_dict()
    assert state["surplus"] is None
    made = source(carry=True)
    made.load_state_dict(state)
    assert made.dataloader.drawn == filtered.source.dataloader.drawn  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="over_sample_rate=0"):
        plain_source().load_state_dict(state)


def test_dynamic_sampling_asks_several_times() -> None:
    made = GroupFilter(source(carry=True), groups=4, n=N)
    seen: list[str] = []
    for batch, metrics in steps(made, 1, 4):
        assert len(batch) == 4 * N
        seen += batch.non_tensor_batch["uid"].tolist()[::N]
        assert undocumented(metrics) == []
    assert len(seen) == len(set(seen))


def test_metrics_say_how_old_tokens_are() -> None:
    made = source(carry=True, max_staleness=2)
    found = []
    for step, (batch, metrics) in enumerate(steps(made, 1, 6), start=1):
        numbers = compute_staleness_metrics(batch, step - 1)
        found.append(numbers)
        mask = batch.batch["response_mask"].bool()
        stale = (batch.batch["token_versions"][mask] < step - 1).double().mean().item()
        assert numbers["training/stale_token_fraction"] == pytest.approx(stale)
        assert numbers["training/staleness/max"] <= 2
        assert undocumented(numbers | metrics | compute_data_metrics(batch, False)) == []
    assert found[0]["training/staleness/max"] == 0
    assert max(numbers["training/staleness/max"] for numbers in found) > 0

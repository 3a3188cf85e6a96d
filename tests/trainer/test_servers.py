"""Rollout servers as the trainer uses them: weights again for one that died, sleep between uses."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.workers.rollout.helpers import make_model, random_prompts, served_everywhere, weights_of
from tests.workers.rollout.served import replicas, server_spec
from verl.agent_loop.runner import longest_run_s
from verl.config import AgentConfig, ModelConfig, RolloutConfig
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.trainer.ppo import servers
from verl.trainer.ppo.placement import processes_per_slot, replica_count, shared_config, slots_of_replicas
from verl.trainer.ppo.servers import AgentLoopPool, ServerRollout
from verl.trajectories.batch import from_envelope
from verl.workers.rollout.engine import run_blocking
from verl.workers.rollout.types import GenerationRequest, SamplingParams
from verl.workers.sharding_manager import SendReport, SyncReport
from verl.workers.sharding_manager.weight_link import WeightLink


@pytest.mark.parametrize(
    ("replicas", "parallel", "workers", "count", "per_slot", "slots"),
    [
        (None, 1, 4, 4, 1, [[0], [1], [2], [3]]),
        (None, 2, 4, 2, 1, [[0, 1], [2, 3]]),
        (3, 1, 2, 3, 2, [[0], [1], [0]]),
        (1, 1, 4, 1, 1, [[0]]),
    ],
)
def test_replicas_get_the_places_of_the_workers(
    replicas: int | None, parallel: int, workers: int, count: int, per_slot: int, slots: list[list[int]]
) -> None:
    config = RolloutConfig(mode="async", num_replicas=replicas, tensor_model_parallel_size=parallel)
    assert replica_count(config, workers) == count
    assert processes_per_slot(config, workers) == per_slot
    assert slots_of_replicas(count, parallel, workers) == slots
    assert shared_config(config, 4).gpu_memory_utilization == config.gpu_memory_utilization / 4


@ray.remote(num_cpus=0)
class Sender:
    """The worker that trains; always with the same weights."""

    def __init__(self) -> None:
        self.transports: list[Any] = []  # their memory is read when a call is over

    def send(self, version: int, links: dict[int, WeightLink], again: bool) -> SendReport:
        weights = weights_of(make_model(served_everywhere(), spread=2.0))
        for link in links.values():
            self.transports.append(link.sender(most_bytes=1 << 20))
            self.transports[-1].send(version, weights.items())
        return SendReport(version, 0.1, 1, len(weights), changed=7)


class Trainers:
    """A worker group of one such worker."""

    def __init__(self) -> None:
        self.worker = Sender.remote()
        self.calls: list[tuple[int, bool]] = []

    @property
    def send_weights(self) -> Any:
        class Method:
            def options(_, blocking: bool) -> Any:
                return self.send

        return Method()

    def send(self, version: int, links: dict[int, WeightLink], again: bool, adapter_apart: bool) -> list[Any]:
        assert not adapter_apart
        self.calls.append((version, again))
        return [self.worker.send.remote(version, links, again)]


def test_what_changed_is_told_by_those_who_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers read no weight twice; senders look at all of them."""

    class Remote:
        def remote(self, *_: Any) -> str:
            return "receiving"

    class Method:
        def options(self, blocking: bool) -> Any:
            return lambda **_: ["sending 0", "sending 1"]

    received = SyncReport(version=4, seconds=0.5, bytes_copied=1, bytes_shared=0, tensors=3, buckets=1)
    answers = {
        "receiving": received,
        "sending 0": SendReport(4, 0.1, 1, 3, changed=2),
        "sending 1": SendReport(4, 0.1, 0, 3, changed=2),
    }
    monkeypatch.setattr(servers, "wait_for", lambda calls, limit: [answers[call] for call in calls])
    rollout = object.__new__(ServerRollout)
    rollout._links, rollout.timeout_s = None, 1.0
    rollout.trainers = type("Trainers", (), {"send_weights": Method()})()  # type: ignore[assignment]
    rollout.group = type("Group", (), {"repair": lambda self: [], "live": []})()  # type: ignore[assignment]
    server = type("Server", (), {"receive_weights": Remote()})()
    link = type("Link", (), {"name": "weights-1-0"})()
    monkeypatch.setattr(rollout, "_connect", lambda replicas: {0: (link, [server])})
    metrics = rollout.sync_weights(4)
    assert metrics["weight_sync/changed_tensors"] == 2
    assert metrics["weight_sync/seconds"] == 0.5
    answers["sending 0"] = answers["sending 1"] = SendReport(5, 0.1, 1, 3)  # on_unchanged_weights=ignore: nobody looks
    rollout._links = None
    assert "weight_sync/changed_tensors" not in rollout.sync_weights(5)


@pytest.mark.dist
@pytest.mark.usefixtures("ray_local")
def test_a_server_that_dies_in_use_comes_back_with_the_weights(tmp_path: Path) -> None:
    model = make_model(served_everywhere(), spread=2.0)
    settings = {"mode": "async", "prompt_length": 28, "response_length": 60, "max_num_seqs": 64, "dtype": "float32"}
    with replicas(server_spec(model, tmp_path, **settings), 2) as group:
        trainers = Trainers()
        rollout = ServerRollout(
            group,
            [[0], [0]],
            trainers,  # type: ignore[arg-type]
            RolloutConfig(**settings),  # type: ignore[arg-type]
            seed=1,
            host="127.0.0.1",
            device="cpu",
            timeout_s=200,
        )
        metrics = rollout.sync_weights(3)
        assert metrics["weight_sync/version"] == 3
        assert metrics["weight_sync/changed_tensors"] == 7  # which the senders know
        prompts = torch.tensor(random_prompts([6, 6]))
        batch = DataProto.from_dict({"input_ids": prompts, "attention_mask": torch.ones_like(prompts)})
        batch.meta_info.update(step=1)
        first = rollout.generate_sequences(batch)
        assert [health.state for health in group.call("health")] == ["asleep", "asleep"]
        assert first.batch["policy_version"].unique().tolist() == [3]
        counted = {"rollout/preemptions": 0.0, "rollout/recomputed_tokens": 0.0}
        assert first.meta_info["metrics"].values_by_name() == counted

        with rollout.serving() as client:
            os.kill(group.replicas[0].infos[0].pid, signal.SIGKILL)
            request = GenerationRequest([3, 4], SamplingParams(8, seed=1, ignore_eos=True), "r")
            assert len(run_blocking(client.generate_many([request, request]))) == 2
        assert [health.state for health in group.call("health")] == ["asleep", "asleep"]
        assert trainers.calls == [(3, False), (3, True)]
        again = rollout.generate_sequences(batch)
        assert torch.equal(again.batch["responses"], first.batch["responses"])
        rollout.sync_weights(4)
        assert [health.policy_version for health in group.call("health")] == [4, 4]
        os.kill(group.replicas[1].infos[0].pid, signal.SIGKILL)  # between two updates: the next one finds a new process
        rollout.sync_weights(5)
        assert [health.policy_version for health in group.call("health")] == [5, 5]


LOOP = """
import os
import signal
import time

from verl.agent_loop import AgentLoopBase, AgentLoopOutput

OK, DIES, BLOCKS = 1, 2, 3


class Loop(AgentLoopBase):
    async def run(self, sampling_params, **fields):
        ids = list(fields["raw_prompt_ids"])
        if ids[0] == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if ids[0] == BLOCKS:
            time.sleep(3600)
        return AgentLoopOutput(ids, [ids[0] + 10], [1], [0.0])
"""
OK, DIES, BLOCKS = 1, 2, 3


@contextlib.contextmanager
def agent_processes(model: str, directory: Path, **agent: Any) -> Iterator[Callable[[list[int]], list[int]]]:
    """Two processes; yields a function from the first tokens of prompts to the first tokens of responses."""
    (directory / "loop.py").write_text(LOOP)
    (directory / "loops.yaml").write_text(f"- {{name: mine, _target_: '{directory}/loop.py:Loop'}}")
    settings = AgentConfig("mine", f"{directory}/loops.yaml", num_workers=2, **agent)
    rollout = RolloutConfig(mode="async", prompt_length=2, response_length=2, agent=settings)
    pool = AgentLoopPool(
        ModelConfig(path=model), rollout, template_kwargs={}, image_limits=None, seed=1, environment={}
    )

    def respond(first: list[int]) -> list[int]:
        prompts = torch.tensor([[token, 9] for token in first])
        batch = DataProto.from_dict({"input_ids": prompts, "attention_mask": torch.ones_like(prompts)})
        batch.meta_info.update(step=1)
        result = pool.run(batch, None, pad_token_id=0)  # type: ignore[arg-type]  # these loops sample nothing
        return [int(sample.trajectory.last.response_ids[0]) for sample in from_envelope(result)[0]]

    try:
        yield respond
    finally:
        pool.shutdown()


@pytest.mark.usefixtures("ray_local")
def test_an_agent_process_that_dies_is_an_error_at_once(tiny_model_dir: str, tmp_path: Path) -> None:
    with agent_processes(tiny_model_dir, tmp_path) as respond:
        assert respond([OK, OK, OK]) == [11, 11, 11]
        started = time.monotonic()
        with pytest.raises(RolloutError, match="agent loops of process 1 failed: its process died"):
            respond([BLOCKS, OK, OK, DIES])  # the other process would take an hour
        assert time.monotonic() - started < 60


@pytest.mark.usefixtures("ray_local")
def test_an_agent_process_that_blocks_is_an_error_in_the_end(
    tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.agent_loop.runner._GRACE_S", 1.5)
    with agent_processes(tiny_model_dir, tmp_path, timeout_s=0.5) as respond:
        assert respond([OK, OK]) == [11, 11]  # takes as long as the processes take to start
        with pytest.raises(RolloutError, match=r"no answer within 2 s to: agent loops of process 0; .*timeout_s=0\.5"):
            respond([BLOCKS, OK])


def test_rows_that_take_turns_have_more_time() -> None:
    assert longest_run_s(AgentConfig(max_concurrent=4), 100) is None
    assert longest_run_s(AgentConfig(max_concurrent=4, timeout_s=10.0), 4) == 40.0  # and 30 s to clean up
    assert longest_run_s(AgentConfig(max_concurrent=4, timeout_s=10.0), 9) == 120.0

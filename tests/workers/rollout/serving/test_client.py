"""Replicas on Ray behind a client: routing, limits, deaths, restarts."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.workers.rollout.helpers import generate as generate_here
from tests.workers.rollout.helpers import make_engine, make_model, random_prompts, served_everywhere, weights_of
from tests.workers.rollout.served import Trainer, load, replicas, server_spec
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.workers.rollout.serving.client import RolloutClient
from verl.workers.rollout.serving.replicas import ReplicaGroup
from verl.workers.rollout.types import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("ray_local")]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(served_everywhere(), spread=2.0)


@pytest.fixture(scope="module")
def pair(ray_local: None, model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaGroup]:
    """Two replicas with weights, for tests that leave them as they are."""
    with replicas(server_spec(model, tmp_path_factory.mktemp("model"), quiet_timeout_s=5), 2) as group:
        load(group, model)
        yield group


def requests(count: int, tokens: int = 8, **sampling: Any) -> list[GenerationRequest]:
    prompts = random_prompts([5 + n % 3 for n in range(count)])
    return [
        GenerationRequest(prompt, SamplingParams(tokens, seed=n, ignore_eos=True, **sampling), f"r{n}")
        for n, prompt in enumerate(prompts)
    ]


def served_by(group: ReplicaGroup) -> list[int]:
    """Requests that each replica has completed."""
    return [health.requests for health in group.call("health")]


def test_it_generates_what_an_engine_here_does(pair: ReplicaGroup, model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    asyncio.run(_load_here(engine, model))
    batch = requests(6)
    expected = generate_here(engine, [r.prompt_ids for r in batch], [r.sampling for r in batch])
    got = asyncio.run(pair.client().generate_many(batch))
    assert [item.token_ids for item in got] == [item.token_ids for item in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
    assert asyncio.run(pair.client().generate_many([])) == []


async def _load_here(engine: Any, model: torch.nn.Module) -> None:
    await engine.begin_update(1)
    await engine.load(weights_of(model).items())
    await engine.end_update()


def test_a_conversation_stays_where_it_began_and_others_spread(pair: ReplicaGroup) -> None:
    client = pair.client()

    async def sessions() -> None:
        for request in requests(6):
            await client.generate(request, session="a")

    before = served_by(pair)
    asyncio.run(sessions())
    assert sorted(now - then for now, then in zip(served_by(pair), before, strict=True)) == [0, 6]

    async def at_once() -> None:
        await asyncio.gather(*(client.generate(request) for request in requests(8)))

    before = served_by(pair)
    asyncio.run(at_once())
    assert [now - then for now, then in zip(served_by(pair), before, strict=True)] == [4, 4]


def test_new_requests_go_where_the_fewest_are(pair: ReplicaGroup) -> None:
    client = pair.client()

    async def run() -> None:
        long = asyncio.create_task(client.generate(requests(1, 90)[0], session="long"))
        await asyncio.sleep(0)
        # while one replica has the long request, short ones one after the other go to the other replica
        for request in requests(4, 1):
            await client.generate(request)
        assert not long.done()
        await long

    before = served_by(pair)
    asyncio.run(run())
    assert sorted(now - then for now, then in zip(served_by(pair), before, strict=True)) == [1, 4]


def test_a_client_can_be_sent_to_other_processes(pair: ReplicaGroup) -> None:
    @ray.remote(num_cpus=0)
    def elsewhere(client: RolloutClient, request: GenerationRequest) -> list[int]:
        return asyncio.run(client.generate(request, session="s")).token_ids

    client = pair.client(timeout_s=50)
    (request,) = requests(1)
    here = asyncio.run(client.generate(request)).token_ids
    assert ray.get(elsewhere.remote(client, request), timeout=60) == here


def test_a_request_has_a_time_limit_and_is_taken_out_after_it(pair: ReplicaGroup) -> None:
    pair.call("pause")
    try:
        with pytest.raises(RolloutError, match=r"request 'r0': not completed .* time limit of 0.3 s"):
            asyncio.run(pair.client(timeout_s=0.3).generate(requests(1)[0]))
        waited = [health.waiting for health in pair.call("health")]
        for _ in range(50):  # the cancellation takes its way
            if not sum(waited):
                break
            waited = [health.waiting for health in pair.call("health")]
        assert waited == [0, 0]
    finally:
        pair.call("resume")


def test_what_is_wrong_with_a_request_is_not_tried_again(pair: ReplicaGroup) -> None:
    bad = GenerationRequest([10_000], SamplingParams(4), "bad")
    before = [health.requests + health.in_flight for health in pair.call("health")]
    with pytest.raises(RolloutError, match="token id 10000"):
        asyncio.run(pair.client().generate(bad))
    assert [health.requests + health.in_flight for health in pair.call("health")] == before


def test_an_aborted_request_keeps_its_tokens(pair: ReplicaGroup) -> None:
    client = pair.client()

    async def run() -> Any:
        tasks = [asyncio.create_task(client.generate(request)) for request in requests(4, 90)]
        await asyncio.sleep(0.02)
        await client.abort()
        return await asyncio.gather(*tasks)

    assert {item.finish_reason for item in asyncio.run(run())} == {"abort"}


def test_wrong_limits_are_told() -> None:
    with pytest.raises(ConfigError, match="at least one replica"):
        RolloutClient([])
    with pytest.raises(ConfigError, match="max_attempts=0"):
        RolloutClient([object()], max_attempts=0)
    assert pickle.loads(pickle.dumps(RolloutClient([1, 2], timeout_s=7))).timeout_s == 7


def test_a_sender_that_dies_leaves_a_message_and_a_server_that_recovers(
    pair: ReplicaGroup, model: torch.nn.Module
) -> None:
    servers = [replica.servers[0] for replica in pair.replicas]

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(weights_of(model).items()))
        raise ValueError("the trainer's GPU fell off")

    class Weights(dict):
        def items(self) -> Any:
            return broken()

    with pytest.raises(WeightSyncError, match="the trainer's GPU fell off"):
        Trainer().send(servers, Weights(), 8)
    while "updating" in (states := [health.state for health in pair.call("health")]):  # the first failure was told
        time.sleep(0.01)
    assert states == ["no weights"] * 2
    with pytest.raises(RolloutError, match=r"no replica served it in 2 attempts.*has no weights"):
        asyncio.run(pair.client(max_attempts=2, retry_delay_s=0.01).generate(requests(1)[0]))
    Trainer().send(servers, weights_of(model), 9)
    assert asyncio.run(pair.client().generate(requests(1)[0])).policy_version == 9


def test_a_trainer_that_never_sends_ends_the_wait(pair: ReplicaGroup, model: torch.nn.Module) -> None:
    server = pair.replicas[0].servers[0]

    with pytest.raises(WeightSyncError, match=r"waited 1 s for weights newer .* is the other side alive"):
        _only_receive(server, timeout_s=1)
    Trainer().send([server], weights_of(model), 20)


def _only_receive(server: Any, timeout_s: float) -> None:
    from verl.workers.rollout.serving.replicas import wait_for
    from verl.workers.sharding_manager.weight_link import WeightLink

    trainer = Trainer()
    link = WeightLink("shared_memory", "silent", 1, "127.0.0.1", trainer.store.port, timeout_s=timeout_s)
    wait_for({server.receive_weights.remote(link, 0): "update"}, 20)


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
def test_weights_also_come_over_a_group_and_through_a_directory(
    kind: str, pair: ReplicaGroup, model: torch.nn.Module, tmp_path: Path
) -> None:
    version = max(health.policy_version for health in pair.call("health")) + 1
    Trainer(kind, tmp_path).send([replica.servers[0] for replica in pair.replicas], weights_of(model), version)
    assert [health.policy_version for health in pair.call("health")] == [version] * 2
    expected = asyncio.run(_digests(model, tmp_path))
    assert pair.call("checksums") == [expected] * 2


async def _digests(model: torch.nn.Module, directory: Path) -> dict[str, str]:
    engine = make_engine(model, directory)
    await _load_here(engine, model)
    return await engine.checksums()


def test_a_killed_replica_hands_its_requests_on_and_comes_back_with_the_weights(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    with replicas(server_spec(model, tmp_path), 2, max_restarts=1) as group:
        load(group, model)
        client = group.client(retry_delay_s=0.2)
        batch = requests(8, 90)

        async def run(victim: int) -> Any:
            singles = [asyncio.create_task(client.generate(request, session=str(n))) for n, request in enumerate(batch)]
            together = asyncio.create_task(client.generate_many(batch))
            await asyncio.sleep(0.03)
            assert not any(task.done() for task in singles)
            os.kill(group.replicas[victim].infos[0].pid, signal.SIGKILL)
            return await asyncio.gather(*singles), await together

        singles, together = asyncio.run(run(0))
        assert [item.token_ids for item in singles] == [item.token_ids for item in together]
        assert {len(item.token_ids) for item in singles} == {90}

        (restarted,) = group.repair()
        assert restarted.index == 0
        assert ray.get(restarted.servers[0].health.remote(), timeout=30).state == "no weights"
        asyncio.run(client.generate_many(requests(4)))  # goes to those that can
        Trainer().send(restarted.servers, weights_of(model), 1)
        assert group.repair() == []
        assert [health.state for health in group.call("health")] == ["ready", "ready"]

        # the restart was the last one: now it stays away, and without the other one nothing is left
        os.kill(restarted.infos[0].pid, signal.SIGKILL)
        assert group.repair() == []
        assert [replica.index for replica in group.live] == [1]
        assert len(asyncio.run(client.generate_many(requests(4)))) == 4
        for replica in group.live:
            ray.kill(replica.servers[0])
        with pytest.raises(RolloutError, match=r"no replica served it in 3 attempts; .*its process is gone"):
            asyncio.run(client.generate(requests(1)[0]))
        with pytest.raises(RolloutError, match="no rollout replica is left"):
            group.repair()

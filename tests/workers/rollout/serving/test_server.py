"""What a server does around its engine; in this process, with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout.helpers import make_model, random_prompts, served_everywhere, weights_of
from tests.workers.rollout.served import server_spec
from verl.errors import ReplicaError, RolloutError, WeightSyncError
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.serving.server import RolloutServer
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams
from verl.workers.sharding_manager import WeightReceiver
from verl.workers.sharding_manager.transports.colocated import ColocatedTransport

LONG = SamplingParams(90, ignore_eos=True, seed=1)


class Here:
    """Weights of a model in this process, as a server finds them."""

    def __init__(self, name: str, model: torch.nn.Module | None, version: int) -> None:
        self.name = name
        self.transport = ColocatedTransport()
        if model is not None:
            self.transport.send(version, weights_of(model).items(), live=True)

    def receiver(self, index: int, sink: RolloutEngine) -> WeightReceiver:
        return WeightReceiver(sink, self.transport)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(served_everywhere(), spread=2.0)


@pytest.fixture
def with_server(model: torch.nn.Module, tmp_path: Path) -> Callable[..., Any]:
    """Run a coroutine with a server that has the weights of version 1."""

    def run(use: Callable[[RolloutServer], Awaitable[Any]], *, weights: bool = True, **settings: Any) -> Any:
        async def whole() -> Any:
            server = RolloutServer(server_spec(model, tmp_path, **settings), "server 0")
            await server.start({})
            if weights:
                await server.receive_weights(Here("first", model, 1), 0)
            return await use(server)

        return asyncio.run(asyncio.wait_for(whole(), 60))

    return run


def request(name: str = "r", sampling: SamplingParams = LONG) -> GenerationRequest:
    return GenerationRequest([3, 4], sampling, name)


def test_concurrent_calls_share_the_engines_steps(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        calls = [asyncio.create_task(server.generate_many([request(f"r{n}")])) for n in range(8)]
        await asyncio.sleep(0.01)
        health = await server.health()
        assert (health.state, health.in_flight) == ("ready", 8)
        answers = [(await call)[0] for call in calls]
        assert {len(answer.token_ids) for answer in answers} == {90}
        # one pass over 8 rows per token, not 8 passes
        assert server.engine.runner.forward_tokens < 2 * 8 * 92  # type: ignore[union-attr]
        health = await server.health()
        assert (health.in_flight, health.requests, health.prompt_tokens, health.tokens) == (0, 8, 16, 720)
        assert health.busy_s > 0

    with_server(use)


def test_busy_and_idle_time_add_up_to_the_clock(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> tuple[float, float]:
        before = await server.health()
        await server.generate_many([request()])
        await asyncio.sleep(0.2)
        after = await server.health()
        return after.idle_s - before.idle_s, after.busy_s - before.busy_s

    idle, busy = with_server(use)
    assert 0.2 <= idle < 0.3
    assert busy > 0


def test_a_paused_server_ends_its_work_and_lets_new_requests_wait(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        running = asyncio.create_task(server.generate_many([request("first")]))
        await asyncio.sleep(0.01)
        await server.pause("wait")
        assert len((await running)[0].token_ids) == 90
        waiting = asyncio.create_task(server.generate_many([request("second")]))
        await asyncio.sleep(0.05)
        health = await server.health()
        assert (health.state, health.in_flight, health.waiting) == ("paused", 0, 1)
        await server.resume()
        assert len((await waiting)[0].token_ids) == 90

    with_server(use)


def test_a_pause_can_stop_requests_in_the_middle(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        (expected,) = await server.generate_many([request()])
        running = asyncio.create_task(server.generate_many([request()]))
        await asyncio.sleep(0.01)
        await server.pause()
        assert server.engine.runner.running == 0  # type: ignore[union-attr]
        health = await server.health()
        assert (health.state, health.in_flight) == ("paused", 1)
        await server.resume()
        assert (await running)[0].token_ids == expected.token_ids
        with pytest.raises(RolloutError, match="mode='now'"):
            await server.pause("now")  # type: ignore[arg-type]

    with_server(use)


def test_a_pause_can_cut_requests_short(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> Completion:
        running = asyncio.create_task(server.generate_many([request()]))
        await asyncio.sleep(0.01)
        await server.pause("abort")
        return (await running)[0]

    completion = with_server(use)
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 90


def test_requests_do_not_wait_for_ever_at_a_paused_server(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        await server.pause()
        with pytest.raises(ReplicaError, match=r"server 0 was closed \(pause\) for 0.1 s"):
            await server.generate_many([request()])

    with_server(use, quiet_timeout_s=0.1)


def test_a_pause_gives_up_on_requests_that_do_not_end(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        running = asyncio.create_task(server.generate_many([request()]))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="1 requests were still in flight"):
            await server.pause("wait")
        assert len((await running)[0].token_ids) == 90
        assert (await server.health()).state == "ready"

    with_server(use, quiet_timeout_s=0.001)


def test_new_weights_wait_for_what_is_in_flight_and_hold_back_what_comes(
    with_server: Callable[..., Any], model: torch.nn.Module
) -> None:
    other = make_model(served_everywhere(), seed=5, spread=2.0)

    async def use(server: RolloutServer) -> list[int]:
        before = asyncio.create_task(server.generate_many([request("before")]))
        await asyncio.sleep(0.01)
        update = asyncio.create_task(server.receive_weights(Here("second", other, 2), 0))
        await asyncio.sleep(0)
        after = asyncio.create_task(server.generate_many([request("after")]))
        report = await update
        assert report.version == 2
        return [(await call)[0].policy_version for call in (before, after)]

    assert with_server(use) == [1, 2]


def test_new_weights_can_interrupt_what_is_in_flight(with_server: Callable[..., Any]) -> None:
    other = make_model(served_everywhere(), seed=5, spread=2.0)

    async def use(server: RolloutServer) -> Completion:
        running = asyncio.create_task(server.generate_many([request()]))
        await asyncio.sleep(0.01)
        await server.receive_weights(Here("second", other, 2), 0, interrupt=True)
        assert not running.done()
        return (await running)[0]

    completion = with_server(use)
    assert (completion.policy_version, completion.last_policy_version) == (1, 2)
    assert len(completion.token_ids) == 90


def test_a_failed_update_that_interrupted_is_not_the_requests_fault(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        running = asyncio.create_task(server.generate_many([request()]))
        await asyncio.sleep(0.01)
        with pytest.raises(WeightSyncError):
            await server.receive_weights(Here("nothing", None, 2), 0, interrupt=True)
        with pytest.raises(ReplicaError, match="lost its weights"):
            await running

    with_server(use)


def test_a_failed_update_leaves_a_server_that_refuses(with_server: Callable[..., Any], model: torch.nn.Module) -> None:
    async def use(server: RolloutServer) -> None:
        with pytest.raises(WeightSyncError, match="no weights were sent"):
            await server.receive_weights(Here("nothing", None, 2), 0)
        assert (await server.health()).state == "no weights"
        with pytest.raises(ReplicaError, match="has no weights"):
            await server.generate_many([request()])
        await server.receive_weights(Here("again", model, 3), 0)
        assert (await server.generate_many([request()]))[0].policy_version == 3

    with_server(use)


def test_a_new_server_says_so_and_refuses(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        assert (await server.health()).state == "no weights"
        with pytest.raises(ReplicaError, match="has no weights"):
            await server.generate_many([request()])

    with_server(use, weights=False)
    fresh = RolloutServer(None, "server 0")  # type: ignore[arg-type]
    assert asyncio.run(fresh.health()).state == "new"
    with pytest.raises(ReplicaError, match="start"):
        asyncio.run(fresh.abort())


def test_asleep_it_refuses_and_awake_it_answers_as_before(with_server: Callable[..., Any]) -> None:
    prompts = random_prompts([6])

    async def use(server: RolloutServer) -> None:
        first = await server.generate_many([GenerationRequest(prompts[0], LONG, "r")])
        await server.sleep()
        health = await server.health()
        assert (health.state, health.memory.kv_cache) == ("asleep", 0)
        with pytest.raises(RolloutError, match="asleep"):
            await server.generate_many([request()])
        await server.wake(["weights"])
        assert (await server.health()).state == "asleep"
        await server.wake()
        assert await server.generate_many([GenerationRequest(prompts[0], LONG, "r")]) == first

    with_server(use)


def test_an_abandoned_call_is_taken_out(with_server: Callable[..., Any]) -> None:
    async def use(server: RolloutServer) -> None:
        call = asyncio.create_task(server.generate_many([request()]))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        health = await server.health()
        assert (health.in_flight, health.requests) == (0, 0)
        assert server.engine.runner.running == 0  # type: ignore[union-attr]

    with_server(use)

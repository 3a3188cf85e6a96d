"""Rollout servers for tests, and a server behind a client as one more rollout engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from tests.workers.rollout.helpers import weights_of
from verl.config import ModelConfig, RolloutConfig
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.serving.replicas import ReplicaGroup, wait_for
from verl.workers.rollout.serving.server import ServerHealth, ServerSpec
from verl.workers.rollout.types import MEMORY_PARTS, Completion, GenerationRequest, MemoryPart, RolloutMemory
from verl.workers.sharding_manager.weight_link import WeightLink

_names = itertools.count()


def server_spec(
    model: torch.nn.Module,
    directory: Path,
    *,
    quiet_timeout_s: float = 30.0,
    external_lib: str | None = None,
    **rollout: Any,
) -> ServerSpec:
    """A server of the model's architecture."""
    model.config.save_pretrained(directory)
    settings = {"dtype": "float32", "prompt_length": 28, "response_length": 100, "max_num_seqs": 64, **rollout}
    model_config = ModelConfig(path=str(directory), external_lib=external_lib)
    return ServerSpec(model_config, RolloutConfig(**settings), "cpu", quiet_timeout_s)


class Trainer:
    """The sending side: gives any weights to the servers of a group, or to some of them."""

    def __init__(self, kind: str = "shared_memory", directory: Path | None = None) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.kind = kind
        self.directory = directory

    def send(
        self, servers: list[Any], weights: Mapping[str, torch.Tensor], version: int, timeout_s: float = 30
    ) -> None:
        """Hand over weights; raises what the receiving side raises."""
        link = WeightLink(
            self.kind,  # type: ignore[arg-type]
            f"test-{next(_names)}",
            len(servers),
            "127.0.0.1",
            self.store.port,
            bucket_bytes=1 << 16,
            directory=None if self.directory is None else str(self.directory),
            timeout_s=timeout_s,
        )

        def run() -> None:
            transport = link.sender()
            try:
                transport.send(version, weights.items())
            finally:
                wait_for(calls, timeout_s + 10)
                transport.close()

        calls = {
            server.receive_weights.remote(link, number): f"update of server {number}"
            for number, server in enumerate(servers)
        }
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(run)
            wait_for(calls, timeout_s + 10)
            sending.result()


@contextmanager
def replicas(spec: ServerSpec, count: int = 1, ranks: int = 1, **settings: Any) -> Iterator[ReplicaGroup]:
    """Running replicas without weights."""
    settings.setdefault("environment", {"OMP_NUM_THREADS": "1"})
    group = ReplicaGroup(spec, [[None] * ranks] * count, **settings)
    try:
        yield group
    finally:
        group.shutdown()


def load(group: ReplicaGroup, model: torch.nn.Module, version: int = 1) -> None:
    """Give all replicas the model's weights."""
    servers = [server for replica in group.replicas for server in replica.servers]
    Trainer().send(servers, weights_of(model), version)


class ServedEngine(RolloutEngine):
    """One replica behind a client, with an engine's interface: weights are collected and sent at the end.

    Between processes versions must increase, while a test may offer one again: it sees the version that it gave.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self.group = group
        self.client = group.client(timeout_s=60, max_attempts=2, retry_delay_s=0.05)
        self.trainer = Trainer()
        self.pad_token_id = group.replicas[0].infos[0].pad_token_id
        self._weights: dict[str, torch.Tensor] = {}
        self._offered: dict[int, int] = {}  # version here -> version that the test gave
        self._next = -1

    @property
    def health(self) -> ServerHealth:
        return ray.get(self.group.replicas[0].servers[0].health.remote(), timeout=30)

    @property
    def policy_version(self) -> int:
        return self._as_offered(self.health.policy_version)

    def _as_offered(self, version: int | None) -> Any:
        return self._offered.get(version, version)

    async def turns(self, count: int) -> None:
        """Wait until the server works, and then for a few of its steps: it answers between them."""
        server = self.group.replicas[0].servers[0]
        while not (await server.health.remote()).in_flight:
            await asyncio.sleep(0)
        for _ in range(-(-count // 6)):
            await server.health.remote()

    async def generate(self, request: GenerationRequest) -> Completion:
        return self._seen(await self.client.generate(request))

    async def generate_many(self, requests: Any) -> list[Completion]:
        return [self._seen(item) for item in await self.client.generate_many(requests)]

    def _seen(self, completion: Completion) -> Completion:
        first, last = map(self._as_offered, (completion.policy_version, completion.last_policy_version))
        return replace(completion, policy_version=first, last_policy_version=None if last == first else last)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        await self.client.abort(None if request_ids is None else list(request_ids))

    async def pause(self) -> None:
        await asyncio.to_thread(self.group.call, "pause", leaders=True)

    async def resume(self) -> None:
        await asyncio.to_thread(self.group.call, "resume", leaders=True)

    async def halt(self) -> None:
        raise NotImplementedError("a server halts its engine when it is paused")

    async def sleep(self) -> None:
        await asyncio.to_thread(self.group.call, "sleep")

    async def wake(self, parts: Iterable[MemoryPart] = MEMORY_PARTS) -> None:
        await asyncio.to_thread(self.group.call, "wake", tuple(parts))

    async def begin_update(self, version: int) -> None:
        self._weights, self._next = {}, version

    async def load(self, bucket: Iterable[tuple[str, torch.Tensor]], *, live: bool = True) -> None:
        self._weights.update(bucket)

    async def end_update(self) -> None:
        version = 1000 + len(self._offered)
        self._offered[version] = self._next
        await asyncio.to_thread(self.trainer.send, self.group.replicas[0].servers, self._weights, version)

    async def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        (found, *_) = await asyncio.to_thread(self.group.call, "checksums", source)
        return found

    def memory(self) -> RolloutMemory:
        return self.health.memory

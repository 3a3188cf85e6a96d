"""Generation by rollout servers (``rollout.mode=async``), with the surface of a worker group that samples."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch.distributed as dist

from verl import envs
from verl.agent_loop.batch import CUT_OFF
from verl.agent_loop.runner import ImageLimits, longest_run_s
from verl.agent_loop.worker import AgentLoopWorker
from verl.config import ModelConfig, RolloutConfig
from verl.errors import LostProcessError, RolloutError
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup
from verl.utils.fs import ensure_writable_dir
from verl.utils.owned import sweep
from verl.utils.owned_dirs import make_owned_dir
from verl.utils.transport import pack
from verl.utils.watcher import also_sweep
from verl.workers.rollout.batch import EventCounts, batch_from_completions, requests_from_batch
from verl.workers.rollout.engine import run_blocking
from verl.workers.rollout.serving.client import RolloutClient
from verl.workers.rollout.serving.replicas import NoAnswerError, Replica, ReplicaGroup, wait_for
from verl.workers.sharding_manager import SyncReport
from verl.workers.sharding_manager.weight_link import LinkKind, WeightLink

logger = logging.getLogger(__name__)

#: time beyond a transport's own limit in which its error should have come
_GRACE_S = 30.0
_PURPOSE = "directory for weights (rollout.checkpoint_engine.directory)"


class AgentLoopPool:
    """Processes that run agent loops.

    They start when there are rows for them, at most ``rollout.agent.num_workers``.

    Args:
        model, rollout: sections of the configuration.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        image_limits: ``data.image_min_pixels`` and ``image_max_pixels`` where images may be shown, else None.
        seed: seed of the run.
        environment: environment variables that each process starts with.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        template_kwargs: Mapping[str, Any],
        image_limits: ImageLimits | None,
        seed: int,
        environment: Mapping[str, str],
    ) -> None:
        self.rollout = rollout
        self._arguments = {
            "model": model,
            "rollout": rollout,
            "template_kwargs": dict(template_kwargs),
            "image_limits": image_limits,
            "seed": seed,
        }
        self._env_vars = {**envs.set_in_environment(), **environment}
        self._workers: list[Any] = []

    def run(self, prompts: DataProto, client: RolloutClient, *, pad_token_id: int) -> DataProto:
        """One trajectory for each row, rows in the order given.

        Raises:
            NoAnswerError: a process had no answer after the time that ``rollout.agent.timeout_s`` allows.
            LostProcessError: a process died.
            VerlError: what a process raised.
        """
        cut_off = prompts.meta_info.get(CUT_OFF)
        unit = 1 if cut_off is None else cut_off["group_size"]  # a cut-off counts whole groups
        count = min(self.rollout.agent.num_workers, len(prompts) // unit)
        most = -(-(len(prompts) // unit) // count) * unit
        limit = self._longest_wait_s(most, starts=len(self._workers) < count, stops=cut_off is not None)
        while len(self._workers) < count:
            self._workers.append(self._start(len(self._workers)))
        size, more = divmod(len(prompts) // unit, count)
        calls: dict[Any, str] = {}
        begin = 0
        for number, worker in enumerate(self._workers[:count]):
            end = begin + (size + (number < more)) * unit
            part = pack(prompts.slice(begin, end))
            calls[worker.run.remote(part, client, pad_token_id=pad_token_id)] = f"agent loops of process {number}"
            begin = end
        try:
            return DataProto.concat(wait_for(calls, limit))
        except NoAnswerError as error:
            raise NoAnswerError(
                f"{error}; with rollout.agent.timeout_s={self.rollout.agent.timeout_s:g} every trajectory should have "
                "ended by then: an agent loop or a tool blocks its process, where it should await"
            ) from error

    def _longest_wait_s(self, rows: int, *, starts: bool, stops: bool) -> float | None:
        """Time limit for the process with the most rows; None: the calls within a trajectory have their own."""
        longest = longest_run_s(self.rollout.agent, rows, stops=stops)
        if longest is None or not starts:
            return longest
        return longest + self.rollout.server.max_start_wait_time

    def _start(self, number: int) -> Any:
        options = {"num_cpus": 0, "runtime_env": {"env_vars": self._env_vars}}
        return ray.remote(AgentLoopWorker).options(**options).remote(name=f"agents{number}", **self._arguments)

    def shutdown(self) -> None:
        """End the processes."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers.clear()


class ServerRollout:
    """Answers batches with rollout servers and keeps their weights up to date.

    Args:
        group: the servers.
        slots: for each replica the ranks of ``trainers`` that share a place with its processes.
        trainers: worker group with ``send_weights``.
        config: the ``rollout`` section.
        seed: seed of the run.
        host: address under which the servers reach this process.
        device: ``"cpu"`` or ``"cuda"``.
        timeout_s: longest wait of one side of a weight sync for the other.
        agents: runs agent loops on the servers; None: every prompt gets one response.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        slots: Sequence[Sequence[int]],
        trainers: WorkerGroup,
        config: RolloutConfig,
        *,
        seed: int,
        host: str,
        device: str,
        timeout_s: float,
        agents: AgentLoopPool | None = None,
    ) -> None:
        self.agents = agents
        self.group = group
        self.slots = slots
        self.trainers = trainers
        self.config = config
        self.seed = seed
        self.host = host
        self.device = device
        self.timeout_s = timeout_s
        server = config.server
        #: asks the servers; may be sent to other Ray actors
        self.client: RolloutClient = group.client(
            timeout_s=server.timeout, max_attempts=server.max_attempts, retry_delay_s=server.retry_delay
        )
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._names = itertools.count()
        self._links: dict[int, tuple[WeightLink, list[object]]] | None = None
        self._directory: str | None = None
        self._version: int | None = None
        self._users = 0
        self._counts = EventCounts()

    # -- what a worker group that samples offers

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row; see :meth:`ActorRolloutRefWorker.generate_sequences`.

        When a process dies in the middle the batch is generated once more, by new processes. A sample depends on
        seeds alone and comes out the same.

        Raises:
            LostProcessError: it happened twice, or a process gave no answer.
        """
        answers = self._generate_twice(prompts)
        servers = run_blocking(self.client.health())
        counters = {str(number): server.counters for number, server in enumerate(servers) if server is not None}
        return self._counts.add_to(answers, counters)

    def _generate_twice(self, prompts: DataProto) -> DataProto:
        """The second time only where processes died in the first."""
        try:
            return self._generate(prompts)
        except NoAnswerError:
            raise
        except LostProcessError as error:
            logger.warning("%s\ngenerating the batch again with new processes", error)
        if self.agents is not None:
            self.agents.shutdown()  # those that live may work on rows of the failed attempt
        return self._generate(prompts)

    def _generate(self, prompts: DataProto) -> DataProto:
        meta, config = prompts.meta_info, self.config
        pad = self.group.replicas[0].infos[0].pad_token_id
        if self.agents is not None:
            with self.serving() as client:
                return self.agents.run(prompts, client, pad_token_id=pad)
        requests = requests_from_batch(
            prompts, config, seed=self.seed, step=meta["step"], validate=meta.get("validate", False)
        )
        with self.serving() as client:
            completions = run_blocking(client.generate_many(requests))
        return batch_from_completions(prompts, completions, config.response_length, pad)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the actor's weights to all servers as policy ``version``; returns the transfer's metrics.

        Raises:
            WeightSyncError, WorkerError, RolloutError: one side failed or died, or waited for too long.
        """
        if self.group.repair():  # they get the new weights with the others
            self._links = None  # a process that is new cannot read on where the one before it was
        reports = self._hand_over(self.group.live, version, again=False)
        self._version = version
        slowest = max(reports, key=lambda report: report.seconds)
        return slowest.metrics()

    # -- for callers of the client

    @contextlib.contextmanager
    def serving(self) -> Iterator[RolloutClient]:
        """Servers are alive, awake and have the current weights within the context; then they give memory back."""
        if not self._users:
            self._revive()
            if self.config.free_cache_engine:
                self.group.call("wake")
        self._users += 1
        try:
            yield self.client
        except KeyboardInterrupt:  # the run ends: processes that hold no state make way, and no server is waited for
            self._users -= 1
            if self.agents is not None:
                self.agents.shutdown()
            raise
        except BaseException:
            self._users -= 1
            with contextlib.suppress(RolloutError):  # the error in flight is the one to know
                self._rest()
            raise
        self._users -= 1
        self._rest()

    def _rest(self) -> None:
        """Let the servers sleep when nobody needs them."""
        if self._users or not self.config.free_cache_engine:
            return
        try:
            self.group.call("sleep")
        except RolloutError as error:  # one died while the others went on
            logger.warning("a rollout server did not go to sleep: %s", error)
            self._revive()
            self.group.call("sleep")

    def shutdown(self) -> None:
        """End the servers, and what runs agent loops on them."""
        if self.agents is not None:
            self.agents.shutdown()
        self.group.shutdown()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # -- weights

    def _revive(self) -> None:
        """Bring dead servers back with the current weights."""
        fresh = self.group.repair()
        if fresh and self._version is not None:
            self._hand_over(fresh, self._version, again=True)

    def _hand_over(self, replicas: Sequence[Replica], version: int, *, again: bool) -> list[SyncReport]:
        """Let the actor's workers send and the servers of ``replicas`` receive.

        Args:
            replicas: that receive.
            version: policy version.
            again: others have had this version already.
        """
        if again or self._links is None or _receivers(self._links) != _servers(replicas):
            self._links = self._connect(replicas)
        links, self._links = self._links, None  # how far they got is unknown when this fails
        calls: dict[object, str] = {}
        for link, servers in links.values():
            for number, server in enumerate(servers):
                calls[server.receive_weights.remote(link, number)] = f"update of a rollout server to version {version}"  # type: ignore[attr-defined]
        send = self.trainers.send_weights.options(blocking=False)
        apart = all(info.supports_lora_update for replica in replicas for info in replica.infos)
        sends = send(
            version=version, links={rank: link for rank, (link, _) in links.items()}, again=again, adapter_apart=apart
        )
        calls |= dict.fromkeys(sends, "sending the weights")
        values = wait_for(calls, self.timeout_s + _GRACE_S)
        if not again:
            self._links = links
        reports: list[SyncReport] = values[: len(calls) - len(sends)]
        # the senders read every weight, the receivers do not
        changed = next((sent.changed for sent in values[len(reports) :] if sent.changed is not None), None)
        return [replace(report, changed=changed) for report in reports]

    def _connect(self, replicas: Sequence[Replica]) -> dict[int, tuple[WeightLink, list[object]]]:
        """Sending rank -> its link and the servers at the other end, in their order."""
        wanted = self.config.checkpoint_engine.backend
        kind: LinkKind = "shared_memory" if wanted == "auto" else wanted  # type: ignore[assignment]
        ends: dict[int, list[object]] = {}
        for replica in replicas:
            for slot, server in zip(self.slots[replica.index], replica.servers, strict=True):
                ends.setdefault(slot if kind == "shared_memory" else 0, []).append(server)
        number = next(self._names)
        self._remove_directory()
        root = self.config.checkpoint_engine.directory
        if kind == "disk":
            # its own: a server that is new would take whatever version it finds
            folder = ensure_writable_dir(str(root), purpose=_PURPOSE)
            sweep([folder])
            also_sweep(folder)
            self._directory = str(make_owned_dir("weights", folder))
        return {
            rank: (
                WeightLink(
                    kind,
                    f"weights-{number}-{rank}",
                    len(servers),
                    self.host,
                    self._store.port,
                    bucket_bytes=self.config.update_weights_bucket_megabytes << 20,
                    directory=self._directory,
                    device=self.device if kind == "shared_memory" else "cpu",
                    timeout_s=self.timeout_s,
                ),
                servers,
            )
            for rank, servers in ends.items()
        }


def _receivers(links: Mapping[int, tuple[WeightLink, list[object]]]) -> set[object]:
    return {server for _, servers in links.values() for server in servers}


def _servers(replicas: Sequence[Replica]) -> set[object]:
    return {server for replica in replicas for server in replica.servers}

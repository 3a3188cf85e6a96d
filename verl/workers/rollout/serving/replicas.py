"""Lifecycle of rollout replicas (Ray actors): start, health checks, restart, shutdown."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl import envs
from verl.errors import LostProcessError, RolloutError, VerlError
from verl.single_controller.ray.base import LOOK_S, REPORT_S, rank_environments
from verl.single_controller.ray.resource_pool import Slot
from verl.utils.stopping import look
from verl.utils.timing import format_duration
from verl.workers.rollout.serving.client import RolloutClient
from verl.workers.rollout.serving.server import RolloutServer, ServerInfo, ServerSpec

logger = logging.getLogger(__name__)

#: calls that one server works on at the same time; most of them wait for the engine
_MAX_CONCURRENCY = 10_000
_POLL_S = 0.2
#: longest wait for a sign of life
_HEALTH_TIMEOUT_S = 30.0


class NoAnswerError(LostProcessError):
    """A call was not answered in time."""


@dataclass
class Replica:
    """One copy of the policy: one process, or several that share its weights.

    Attributes:
        index: its number.
        servers: handles in rank order; the first one is asked for completions.
        infos: where they run.
        lost: why it will not come back; None while it may.
    """

    index: int
    servers: list[Any]
    infos: list[ServerInfo] = field(default_factory=list)
    lost: str | None = None


class ReplicaGroup:
    """Starts replicas and keeps them alive.

    Ray restarts a process that dies, up to ``max_restarts`` times, under the same handle. It comes back without an
    engine; :meth:`repair` makes one, and whoever calls that has to sync the weights.

    Args:
        spec: what each replica hosts.
        places: for each replica the slots of its processes; None lets Ray choose.
        resources: Ray's ``num_cpus`` and ``num_gpus`` of a process.
        environment: environment variables that each process starts with.
        max_restarts: how often a process may be restarted.
        start_timeout_s: longest wait for a replica to start.
    """

    def __init__(
        self,
        spec: ServerSpec,
        places: Sequence[Sequence[Slot | None]],
        *,
        resources: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 3,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.spec = spec
        self.start_timeout_s = start_timeout_s
        options: dict[str, Any] = {
            "max_restarts": max_restarts,
            "max_concurrency": _MAX_CONCURRENCY,
            **(resources or {"num_cpus": 0}),
        }
        env_vars = {**envs.set_in_environment(), **(environment or {})}
        if env_vars:
            options["runtime_env"] = {"env_vars": env_vars}
        self._options = options
        self.replicas: list[Replica] = []
        try:
            for index, slots in enumerate(places):
                self.replicas.append(
                    Replica(index, [self._spawn(index, rank, slot) for rank, slot in enumerate(slots)])
                )
            deadline = time.monotonic() + start_timeout_s
            self._set_up(self.replicas, deadline)
        except BaseException:
            self.shutdown()
            raise

    def client(self, **limits: Any) -> RolloutClient:
        """A client of the replicas; ``limits`` as for :class:`RolloutClient`."""
        return RolloutClient([replica.servers[0] for replica in self.replicas], **limits)

    @property
    def live(self) -> list[Replica]:
        """Replicas that are there or may come back."""
        return [replica for replica in self.replicas if replica.lost is None]

    def call(
        self, method: str, *args: Any, leaders: bool = False, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on every process of every live replica and return the results.

        Args:
            method: of :class:`RolloutServer`.
            args, kwargs: its arguments.
            leaders: only on the first process of each replica, which ``pause``, ``resume`` and ``abort`` are for.
            timeout_s: longest wait for all answers; by default that for a start.

        Raises:
            LostProcessError: a process is gone, or did not answer within the time limit.
            VerlError: what the method raised.
        """
        calls = {}
        for replica in self.live:
            for server in replica.servers[: 1 if leaders else None]:
                calls[getattr(server, method).remote(*args, **kwargs)] = f"{method}() of replica {replica.index}"
        return wait_for(calls, self.start_timeout_s if timeout_s is None else timeout_s)

    def repair(self) -> list[Replica]:
        """Bring back replicas whose process died or whose ranks lost each other.

        Returns:
            Those that were restarted and have no weights yet.

        Raises:
            LostProcessError: no replica is left, or a restart took too long.
        """
        ill = [replica for replica in self.live if not self._is_well(replica)]
        for replica in ill:
            logger.warning("replica %d of the rollout does not work; restarting it", replica.index)
            self._await_restart(replica, time.monotonic() + self.start_timeout_s)
        if not self.live:
            raise LostProcessError(
                "no rollout replica is left: " + "; ".join(f"replica {r.index}: {r.lost}" for r in self.replicas)
            )
        fresh = [replica for replica in ill if replica.lost is None]
        self._set_up(fresh, time.monotonic() + self.start_timeout_s)
        return fresh

    def shutdown(self) -> None:
        """End all processes."""
        for replica in self.replicas:
            for server in replica.servers:
                ray.kill(server, no_restart=True)

    # -- starting

    def _spawn(self, index: int, rank: int, slot: Slot | None) -> Any:
        name = f"rollout server {index}" + (f" rank {rank}" if rank else "")
        options = dict(self._options)
        if slot is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                slot.group, placement_group_bundle_index=slot.bundle
            )
        return ray.remote(RolloutServer).options(**options).remote(self.spec, name)

    def _set_up(self, replicas: Sequence[Replica], deadline: float) -> None:
        """Make the engines; those of one replica meet each other."""
        starts: dict[Any, str] = {}
        for replica in replicas:
            environments: list[dict[str, str]] = [{}]
            if len(replica.servers) > 1:
                calls = {server.place.remote(): f"replica {replica.index}" for server in replica.servers}
                nodes, addresses = zip(*wait_for(calls, deadline - time.monotonic()), strict=True)
                port = {replica.servers[0].reserve_port.remote(): f"replica {replica.index}"}
                (number,) = wait_for(port, deadline - time.monotonic())
                environments = rank_environments(nodes, addresses[0], number)
            for rank, (server, environment) in enumerate(zip(replica.servers, environments, strict=True)):
                followers = [] if rank else replica.servers[1:]
                starts[server.start.remote(environment, followers)] = f"start of replica {replica.index}"
        infos = iter(wait_for(starts, deadline - time.monotonic()))
        for replica in replicas:
            replica.infos = [next(infos) for _ in replica.servers]
            if url := replica.infos[0].url:
                logger.info("rollout replica %d: OpenAI-compatible endpoint at %s", replica.index, url)

    # -- watching

    def _is_well(self, replica: Replica) -> bool:
        calls = [server.health.remote() for server in replica.servers]
        try:
            answers = ray.get(calls, timeout=_HEALTH_TIMEOUT_S)
        except (RayActorError, GetTimeoutError):
            return False
        return all(answer.state not in ("new", "broken") for answer in answers)

    def _await_restart(self, replica: Replica, deadline: float) -> None:
        """Until every process of a replica is new; marks the replica as lost where one does not come back."""
        killed: set[int] = set()
        for rank, server in enumerate(replica.servers):
            while True:
                state, why = self._state_of(server)
                if state == "new":
                    break
                if state == "lost":
                    replica.lost = why
                    return
                if state == "up" and rank not in killed:  # its partner died, or it does not answer
                    killed.add(rank)
                    ray.kill(server, no_restart=False)
                if time.monotonic() > deadline:
                    raise LostProcessError(
                        f"replica {replica.index} of the rollout did not restart within {self.start_timeout_s:g} s "
                        "(rollout.server.max_start_wait_time)"
                    )
                time.sleep(_POLL_S)

    def _state_of(self, server: Any) -> tuple[str, str]:
        try:
            answer = ray.get(server.health.remote(), timeout=_HEALTH_TIMEOUT_S)
        except ActorUnavailableError:
            return "restarting", ""
        except ActorDiedError as error:
            return "lost", f"its process died and may not be restarted again: {error}"
        except (RayActorError, GetTimeoutError):
            return "up", ""
        return ("new" if answer.state == "new" else "up"), ""


def wait_for(calls: Mapping[Any, str], timeout_s: float | None) -> list[Any]:
    """Results of remote calls, as soon as all are there or one has failed.

    Args:
        calls: reference -> what it is, for messages.
        timeout_s: longest wait; None waits for ever, where every call has a limit of its own.

    Raises:
        NoAnswerError: the time is over.
        LostProcessError: a process died.
        VerlError: what a call raised.
    """
    started = time.monotonic()
    report = started + REPORT_S
    deadline = None if timeout_s is None else started + timeout_s
    pending = list(calls)
    values: dict[Any, Any] = {}
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        patience = min(LOOK_S, max(0.0, report - time.monotonic()))
        ready, pending = ray.wait(pending, timeout=patience if left is None else min(patience, left))
        look()
        if not ready and (left is None or left > patience):
            if time.monotonic() >= report:
                waiting = sorted({calls[reference] for reference in pending})
                spent = format_duration(time.monotonic() - started)
                logger.warning("waiting for %s for %s now", ", ".join(waiting), spent)
                report = time.monotonic() + REPORT_S
            continue
        if not ready:
            late = sorted({calls[reference] for reference in pending})
            raise NoAnswerError(f"no answer within {timeout_s:.3g} s to: {', '.join(late)}")
        for reference in ready:
            values[reference] = _result(reference, calls[reference])
    return [values[reference] for reference in calls]


def _result(reference: Any, what: str) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, VerlError):
            raise cause from None
        raise RolloutError(f"{what} failed: {error}") from error
    except RayError as error:
        raise LostProcessError(f"{what} failed: its process died ({type(error).__name__}: {error})") from error

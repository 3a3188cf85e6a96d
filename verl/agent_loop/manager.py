"""Agent loops beside rollout servers: rows are spread over processes, which ask the servers for tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from verl.agent_loop.runner import build_runner
from verl.errors import RolloutError, VerlError
from verl.models.loading import import_external_lib
from verl.protocol import DataProto

if TYPE_CHECKING:
    from verl.config import ActorRolloutRefConfig

logger = logging.getLogger(__name__)


class Servers(Protocol):
    """What agent loops need of the rollout servers, see :class:`verl.trainer.ppo.servers.ServerRollout`."""

    client: Any

    def serving(self) -> AbstractContextManager[Any]:
        """The servers are awake within the context."""

    def sync_weights(self, version: int) -> Any:
        """Hand the policy's weights over."""

    def shutdown(self) -> None:
        """End the servers."""


class AgentLoopWorker:
    """A process that runs agent loops; made a Ray actor by the manager.

    Args:
        section: the ``actor_rollout_ref`` section.
        client: asks the rollout servers.
        seed: seed of the run.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        number: of the worker.
    """

    def __init__(
        self,
        section: ActorRolloutRefConfig,
        client: Any,
        *,
        seed: int,
        template_kwargs: Mapping[str, Any],
        number: int,
    ) -> None:
        import_external_lib(section.model.external_lib)
        self.client = client
        self.seed = seed
        self.runner = build_runner(section, template_kwargs, name=f"worker{number}")

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run one trajectory for each row."""
        pad = int(self.runner.tokenizer.pad_token_id)  # type: ignore[arg-type]
        return asyncio.run(self.runner.respond(prompts, self.client, seed=self.seed, pad_token_id=pad))

    def ready(self) -> bool:
        """Whether it was made; waiting for it waits for the constructor."""
        return True


class AgentLoopManager:
    """Answers batches by agent loops in ``rollout.agent.num_workers`` processes, on rollout servers.

    A worker that dies is replaced for the next batch; the batch that it was working on is an error.

    Args:
        section: the ``actor_rollout_ref`` section.
        servers: the rollout servers.
        seed: seed of the run.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        environment: environment variables of the workers.
        timeout_s: longest time for a batch; None sets no limit besides those of trajectories and servers.

    Raises:
        RolloutError: a worker could not be started.
    """

    def __init__(
        self,
        section: ActorRolloutRefConfig,
        servers: Servers,
        *,
        seed: int,
        template_kwargs: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.section = section
        self.servers = servers
        self.seed = seed
        self.template_kwargs = dict(template_kwargs or {})
        self.environment = dict(environment or {})
        self.timeout_s = timeout_s
        self.workers = [self._spawn(number) for number in range(section.rollout.agent.num_workers)]
        self._get([worker.ready.remote() for worker in self.workers], "to start")

    def _spawn(self, number: int) -> Any:
        import ray

        from verl import envs

        env_vars = {**envs.set_in_environment(), **self.environment}
        # they wait most of the time, for servers and tools
        actor = ray.remote(AgentLoopWorker).options(num_cpus=0, runtime_env={"env_vars": env_vars})
        return actor.remote(
            self.section, self.servers.client, seed=self.seed, template_kwargs=self.template_kwargs, number=number
        )

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run one trajectory for each row.

        Rows next to each other, samples of one prompt, go to one worker.

        Raises:
            RolloutError: a worker died or did not finish in time.
        """
        parts = [part for part in np.array_split(np.arange(len(prompts)), len(self.workers)) if len(part)]
        with self.servers.serving():
            calls = [
                worker.generate_sequences.remote(prompts.select_idxs(part))
                for worker, part in zip(self.workers, parts, strict=False)
            ]
            return DataProto.concat(self._get(calls, "to finish its trajectories"))

    def sync_weights(self, version: int) -> Any:
        """Hand the policy's weights to the servers."""
        return self.servers.sync_weights(version)

    def shutdown(self) -> None:
        """End the workers and the servers."""
        import ray

        for worker in self.workers:
            ray.kill(worker)
        self.servers.shutdown()

    def _get(self, calls: list[Any], what: str) -> list[Any]:
        """The results of one call of each of the first workers."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return list(ray.get(calls, timeout=self.timeout_s))
        except GetTimeoutError as error:
            late = len(ray.wait(calls, num_returns=len(calls), timeout=0)[1])
            raise RolloutError(
                f"{late} agent loop worker(s) took longer than {self.timeout_s:g} s {what}; limit trajectories with "
                "rollout.agent.timeout_s, and calls of tools with rollout.multi_turn.tool_timeout_s"
            ) from error
        except RayActorError as error:
            self._replace_dead()
            raise RolloutError(f"an agent loop worker died: {error}") from error
        except RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, VerlError):
                raise cause from None
            raise RolloutError(f"an agent loop worker failed: {error}") from None

    def _replace_dead(self) -> None:
        import ray
        from ray.exceptions import RayError

        for number, worker in enumerate(self.workers):
            try:
                ray.get(worker.ready.remote(), timeout=10.0)
            except RayError:
                logger.warning("agent loop worker %d does not answer; it is replaced", number)
                ray.kill(worker)
                self.workers[number] = self._spawn(number)

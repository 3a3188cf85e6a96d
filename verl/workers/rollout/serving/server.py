"""A rollout engine in a process of its own: request serving, weight updates, health reporting.

:class:`RolloutServer` is a plain class with coroutines; :mod:`verl.workers.rollout.serving.replicas` runs it as a Ray
actor and :mod:`verl.workers.rollout.serving.client` talks to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from verl import envs
from verl.errors import ReplicaError, RolloutError, WeightSyncError
from verl.utils.device import set_device
from verl.utils.seeding import use_deterministic_algorithms
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.serving.packed_requests import PackedCompletions, PackedRequests
from verl.workers.rollout.types import MEMORY_PARTS, Completion, GenerationRequest, MemoryPart, RolloutMemory

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

logger = logging.getLogger(__name__)

#: see :meth:`RolloutServer.pause`
PauseMode = Literal["keep", "wait", "abort"]
ServerState = Literal["new", "no weights", "ready", "asleep", "paused", "updating", "broken"]

#: seconds in which the failure of a rank that shares the weights shows after another rank's
_GRACE_S = 2.0


@dataclass(frozen=True)
class ServerSpec:
    """What a server hosts.

    Attributes:
        model: the ``model`` section.
        rollout: the ``rollout`` section; its ``name`` chooses the engine.
        device: ``"cpu"`` or ``"cuda"``.
        quiet_timeout_s: longest wait for the requests in flight before an update, and of a request before a server
            that is paused.
        http_host: address on which an OpenAI-compatible endpoint listens; None: there is none.
        deterministic: use only algorithms whose result depends on nothing but their input.
    """

    model: ModelConfig
    rollout: RolloutConfig
    device: str
    quiet_timeout_s: float = 600.0
    http_host: str | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class ServerInfo:
    """Where a server runs and what one must know to use it.

    Attributes:
        node_id, address, pid: where it runs.
        pad_token_id: what right-padding of responses should use.
        url: of its OpenAI-compatible endpoint.
        supports_lora_update: see :class:`RolloutEngine`.
    """

    node_id: str
    address: str
    pid: int
    pad_token_id: int
    url: str | None = None
    supports_lora_update: bool = False


@dataclass(frozen=True)
class ServerHealth:
    """What a server says about itself.

    Attributes:
        state: what it does; only a ready one serves, the others refuse or let wait.
        policy_version: version of its weights; -1 without.
        in_flight: requests that it works on.
        waiting: requests that wait until it serves again.
        requests, prompt_tokens, tokens: completed requests, and the tokens they had and got.
        busy_s: seconds with a request in flight since it was started.
        idle_s: seconds without one.
        memory: bytes that it holds.
        counters: of its engine, see :meth:`RolloutEngine.counters`.
    """

    state: ServerState
    policy_version: int
    in_flight: int
    waiting: int
    requests: int
    prompt_tokens: int
    tokens: int
    busy_s: float
    idle_s: float
    memory: RolloutMemory
    counters: dict[str, int]


class WeightReceiving(Protocol):
    """Loads what a trainer sends; :class:`verl.workers.sharding_manager.WeightReceiver` is one."""

    def receive(self) -> Any: ...


class WeightAddress(Protocol):
    """Where weights come from; :class:`verl.workers.sharding_manager.weight_link.WeightLink` is one."""

    @property
    def name(self) -> str: ...

    def receiver(self, index: int, sink: RolloutEngine) -> WeightReceiving: ...


@dataclass
class _Load:
    """Counts requests and the time with and without them."""

    in_flight: int = 0
    waiting: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def change(self, by: int) -> None:
        self.account()
        self.in_flight += by

    def account(self) -> None:
        now = time.monotonic()
        if self.in_flight:
            self.busy_s += now - self._since
        else:
            self.idle_s += now - self._since
        self._since = now

    def finished(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> None:
        self.requests += len(requests)
        self.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        self.tokens += sum(len(completion.token_ids) for completion in completions)


class RolloutServer:
    """Hosts one engine, or one rank of an engine whose weights are split over several.

    Calls run in one event loop; concurrent ones are batched by the engine. Between calls a server may be paused, put to
    sleep or given new weights; requests that arrive meanwhile wait, except while it sleeps or has no weights.

    The constructor is cheap, so that a process that was restarted comes up at once and says that it is new;
    :meth:`start` makes the engine.

    Args:
        spec: what to host.
        name: for messages.
    """

    def __init__(self, spec: ServerSpec, name: str = "rollout server") -> None:
        self.spec = spec
        self.name = name
        self.engine: RolloutEngine | None = None
        self._load = _Load()
        self._closed_by: set[str] = set()  # reasons not to admit requests
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._has_weights = False
        self._asleep = False
        self._receiver: tuple[str, WeightReceiving] | None = None
        self._followers: list[Any] = []
        self._round: list[Any] = []  # what the followers were last asked
        self._broken: str | None = None
        self._port: socket.socket | None = None
        self._endpoint: Any = None

    # -- life

    async def start(self, environment: Mapping[str, str], followers: Sequence[Any] = ()) -> ServerInfo:
        """Make the engine.

        Args:
            environment: rank, world size and meeting point, where the weights are split over several servers.
            followers: handles of the other servers with a part of the same weights, given to the first one, which is
                the only one to be asked for completions.

        Raises:
            ConfigError: the engine cannot serve the model or the settings.
        """
        from verl.models.loading import import_external_lib
        from verl.workers.rollout import get_rollout_class

        if self.engine is not None:
            raise RolloutError(f"{self.name} has been started already")
        os.environ.update(environment)
        spec = self.spec
        if spec.deterministic:
            use_deterministic_algorithms()
        import_external_lib(spec.model.external_lib)
        engine = get_rollout_class(spec.rollout.name)(spec.model, spec.rollout, device=spec.device)
        if followers:
            engine.on_tp_work = self._call_followers
        self._followers = list(followers)
        self.engine = engine
        self._load = _Load()
        self._asleep = False
        leads = environment.get("RANK", "0") == "0"
        url = await self._start_endpoint(spec.http_host) if spec.http_host is not None and leads else None
        return ServerInfo(*_place(), os.getpid(), engine.pad_token_id, url, engine.supports_lora_update)

    async def _start_endpoint(self, host: str) -> str:
        from verl.utils.tokenizer import load_tokenizer
        from verl.workers.rollout.serving.openai_api import ApiSettings, OpenAIEndpoint

        model, rollout = self.spec.model, self.spec.rollout
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        limit = getattr(self.engine, "max_model_len", None)
        settings = ApiSettings(
            str(model.path),
            rollout.response_length,
            limit,
            rollout.multi_turn.format,
            envs.get("VERL_SERVER_API_KEY"),
        )
        self._endpoint = OpenAIEndpoint(self, tokenizer, settings)
        return await self._endpoint.start(host)

    async def place(self) -> tuple[str, str]:
        """Node and address, also before :meth:`start`."""
        return _place()

    async def reserve_port(self) -> int:
        """A port of this node that nobody else is given while this process lives."""
        if self._port is not None:
            self._port.close()
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))  # bound, never listening: who meets here sets the same option
        return int(self._port.getsockname()[1])

    async def health(self) -> ServerHealth:
        """State and counters; answered between two steps of the engine."""
        self._load.account()
        load, engine = self._load, self.engine
        return ServerHealth(
            state=self._state(),
            policy_version=-1 if engine is None else engine.policy_version,
            in_flight=load.in_flight,
            waiting=load.waiting,
            requests=load.requests,
            prompt_tokens=load.prompt_tokens,
            tokens=load.tokens,
            busy_s=load.busy_s,
            idle_s=load.idle_s,
            memory=RolloutMemory(0, 0, 0) if engine is None or "update" in self._closed_by else engine.memory(),
            counters={} if engine is None else engine.counters(),
        )

    def _state(self) -> ServerState:
        if self._broken is not None:
            return "broken"
        if self.engine is None:
            return "new"
        if "update" in self._closed_by:
            return "updating"
        if not self._has_weights:
            return "no weights"
        if self._asleep:
            return "asleep"
        return "paused" if self._closed_by else "ready"

    # -- serving

    async def generate_packed(self, packed: PackedRequests) -> PackedCompletions:
        """Serve requests together.

        Raises:
            ReplicaError: the server has no weights, is paused for too long, or another rank of it is gone.
            RolloutError: a request is invalid, the server sleeps, or generation failed.
        """
        return PackedCompletions.pack(await self.generate_many(packed.unpack()))

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        """Serve one request of this process; there is one server, so the session makes no difference."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """:meth:`generate_packed` for callers in this process."""
        async with self._admitted(len(requests)) as engine:
            try:
                completions = await engine.generate_many(requests)
            except RolloutError as error:
                await self._explain(error)
                raise
            if not self._has_weights:  # stopped for an update, which failed
                raise ReplicaError(f"{self.name} lost its weights while it served")
            self._load.finished(requests, completions)
        return completions

    @contextlib.asynccontextmanager
    async def _admitted(self, count: int) -> AsyncIterator[RolloutEngine]:
        if not self._open.is_set():
            self._load.waiting += count
            try:
                await asyncio.wait_for(self._open.wait(), self.spec.quiet_timeout_s)
            except TimeoutError:
                raise ReplicaError(
                    f"{self.name} was closed ({', '.join(sorted(self._closed_by))}) for "
                    f"{self.spec.quiet_timeout_s:g} s while requests waited; resume() it"
                ) from None
            finally:
                self._load.waiting -= count
        if self._broken is not None:
            raise ReplicaError(f"{self.name} is broken: {self._broken}")
        if self.engine is None or not self._has_weights:
            raise ReplicaError(f"{self.name} has no weights; sync the policy's (sync_weights) first")
        self._start_work(count)
        try:
            yield self.engine
        finally:
            self._end_work(count)

    def _start_work(self, count: int) -> None:
        self._load.change(count)
        self._idle.clear()

    def _end_work(self, count: int) -> None:
        self._load.change(-count)
        if not self._load.in_flight:
            self._idle.set()

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now (all when None); they complete with the tokens so far and reason ``"abort"``."""
        await self._engine().abort(request_ids)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Let requests wait until :meth:`resume`.

        Args:
            mode: what becomes of those in flight. ``"keep"``: they stop where they are and go on later, with the
                weights that there are then; ``"wait"``: they are completed first; ``"abort"``: they end with what they
                have.

        Raises:
            RolloutError: they did not end in time; the server goes on.
        """
        engine = self._engine()
        if mode not in get_args(PauseMode):
            raise RolloutError(f"pause: mode={mode!r}; use one of {', '.join(get_args(PauseMode))}")
        self._close("pause")
        if mode == "keep":
            await engine.pause()
            return
        if mode == "abort":
            await engine.abort()
        try:
            await self._wait_until_idle("pause", RolloutError)
        except RolloutError:
            self._reopen("pause")
            raise

    async def resume(self) -> None:
        """Serve again: what was stopped, then the requests that wait."""
        await self._engine().resume()
        self._reopen("pause")

    def _engine(self) -> RolloutEngine:
        if self.engine is None:
            raise ReplicaError(f"{self.name} is new: start() it first")
        return self.engine

    def _close(self, reason: str) -> None:
        self._closed_by.add(reason)
        self._open.clear()

    def _reopen(self, reason: str) -> None:
        self._closed_by.discard(reason)
        if not self._closed_by:
            self._open.set()

    async def _wait_until_idle(self, what: str, error: Callable[[str], Exception]) -> None:
        try:
            await asyncio.wait_for(self._idle.wait(), self.spec.quiet_timeout_s)
        except TimeoutError:
            raise error(
                f"{what} of {self.name}: {self._load.in_flight} requests were still in flight after "
                f"{self.spec.quiet_timeout_s:g} s; abort() them first"
            ) from None

    # -- ranks that share the weights

    def _call_followers(self) -> None:
        self._round = [follower.follow.remote() for follower in self._followers]

    async def follow(self) -> None:
        """Take part in serving until nothing is left; the first of the servers that share the weights calls it."""
        self._start_work(1)
        try:
            await self._engine().tp_step()
        finally:
            self._end_work(1)

    async def _explain(self, error: RolloutError) -> None:
        """Whether generation failed for a reason that is the server's: its weights, or a rank that shares them.

        Raises:
            ReplicaError: so it is.
        """
        if not self._has_weights:
            raise ReplicaError(f"{self.name} lost its weights: {error}") from error
        if not self._round or self._broken:
            return
        futures = [asyncio.wrap_future(reference.future()) for reference in self._round]
        done, _ = await asyncio.wait(futures, timeout=_GRACE_S)
        causes = [cause for future in done if (cause := future.exception()) is not None]
        if causes:
            self._broken = f"a process that shares its weights failed: {causes[0]}"
            raise ReplicaError(f"{self.name} is broken: {self._broken}") from error

    # -- memory and weights

    async def sleep(self) -> None:
        """Give back the memory of the cache and of the weights; requests are refused until :meth:`wake`.

        Raises:
            RolloutError: the requests in flight did not end in time.
        """
        if not self._engine().pauses.paused:
            await self._wait_until_idle("sleep", RolloutError)
        await self._engine().sleep()
        self._asleep = True

    async def wake(self, parts: Iterable[MemoryPart] = MEMORY_PARTS) -> None:
        """Make ready to serve again."""
        await self._engine().wake(parts)
        self._asleep = self._asleep and set(parts) != set(MEMORY_PARTS)

    async def receive_weights(self, link: WeightAddress, index: int, *, interrupt: bool = False) -> Any:
        """Load the weights that the trainer sends now; new requests wait.

        Args:
            link: where they come from.
            index: which of the link's receivers this is.
            interrupt: stop the requests in flight, which go on with the new weights; otherwise they end first.

        Returns:
            The :class:`~verl.workers.sharding_manager.SyncReport`.

        Raises:
            WeightSyncError: nothing came in time, the sender failed, or the weights do not fit; the server then
                refuses requests until a complete update.
        """
        engine = self._engine()
        if "update" in self._closed_by:
            raise WeightSyncError(f"{self.name} is receiving weights already")
        self._close("update")
        stopped = interrupt and not engine.pauses.paused
        try:
            if stopped:
                await engine.pause()
            elif not engine.pauses.paused:
                await self._wait_until_idle("an update", WeightSyncError)
            if self._receiver is None or self._receiver[0] != link.name:
                self._receiver = (link.name, await self._in_thread(link.receiver, index, engine))
            self._has_weights = False
            report = await self._in_thread(self._receiver[1].receive)
            self._has_weights = True
        finally:
            if not self._has_weights:
                self._receiver = None  # how far it got is unknown
            if stopped:
                await engine.resume()
            self._reopen("update")
        return report

    async def checksums(self, source: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Digest per weight name; see :meth:`RolloutEngine.checksums`."""
        return await self._engine().checksums(source)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what blocks beside the event loop, which answers questions meanwhile."""
        device = getattr(self.engine, "device", None)

        def run() -> Any:
            if device is not None:
                set_device(device)  # which is a thread's own
            return function(*arguments)

        return await asyncio.to_thread(run)


def _place() -> tuple[str, str]:
    """(node, address) of this process."""
    import ray

    if not ray.is_initialized():
        return "", "127.0.0.1"
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

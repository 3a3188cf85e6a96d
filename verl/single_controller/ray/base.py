"""Worker groups whose workers are Ray actors."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl import envs
from verl.errors import ConfigError, WorkerError
from verl.protocol import Completed, DataProto, DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs, ColocatedClasses, WorkerGroup
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.single_controller.base.futures import is_ray_reference
from verl.single_controller.ray.fields import FieldStore, Shard, Traffic
from verl.single_controller.ray.resource_pool import RayResourcePool
from verl.single_controller.ray.worker_process import HostInfo, host_class
from verl.utils.timing import format_duration
from verl.utils.transport import pack

logger = logging.getLogger(__name__)

#: Ray namespace of detached workers, so that another program finds them whatever namespace it runs in
DETACHED_NAMESPACE = "verl"
#: seconds to wait, after one rank failed, for the failure that may have caused it on another
GRACE_S = 1.0
#: poll interval for completed results, in seconds
LOOK_S = 1.0
#: seconds of waiting after which, again and again, the log says for whom
REPORT_S = 600.0
#: types that cost nothing to send to every rank separately
_SMALL = (type(None), bool, int, float, complex)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its constructor's arguments, to be run as a Ray actor.

    Args:
        cls: the class, plain or wrapped by ``ray.remote``.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_plain_class(cls), *args, **kwargs)
        self.ray_options: dict[str, Any] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add options of the Ray actor, such as ``max_concurrency`` or ``runtime_env``."""
        self.ray_options.update(options)


class _RayColocatedClasses(ColocatedClasses):
    """Several roles in one Ray actor; the actor options of all of them together."""

    @property
    def ray_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for class_with_args in self.class_dict.values():
            options.update(getattr(class_with_args, "ray_options", {}))
        return options


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Put several roles into the same processes.

    .. code-block:: python

        both = create_colocated_worker_cls({"actor": RayClassWithInitArgs(Actor, ...), "critic": ...})
        groups = RayWorkerGroup(pool, both).spawn({"actor", "critic"})
        groups["critic"].compute_values(batch)

    Args:
        class_dict: role -> class with arguments; each process constructs them in this order.
    """
    return _RayColocatedClasses(class_dict)


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """The same as :func:`create_colocated_worker_cls`; roles are attributes of the group: ``group.actor.update()``."""
    return _RayColocatedClasses(class_dict)


@dataclass
class _Processes:
    """The actors of a group, shared by the groups of all roles in them."""

    handles: list[Any]
    names: list[str]
    infos: list[HostInfo]
    roles: dict[str, type]
    pool: RayResourcePool | None
    tenant: str
    fields: FieldStore = field(default_factory=FieldStore)

    def end(self) -> None:
        """Kill the actors of this group and give up its share of the pool."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
        if self.pool is not None:
            self.pool.unclaim(self.tenant)


class RayWorkerGroup(WorkerGroup):
    """A group of Ray actors, one per rank, called like one object.

    Args:
        resource_pool: where the actors run, one per process of the pool.
        ray_cls_with_init: what they hold: a class with arguments, or several from
            :func:`create_colocated_worker_cls`.
        bin_pack: keep the processes of a node's entry on one node.
        name_prefix: start of the actors' names; random by default.
        detached: the actors outlive the program that made them; find them with :meth:`from_detached`.
        worker_names: names of running detached actors to attach to, instead of starting some.
        worker_handles: handles of running actors to attach to.
        ray_wait_register_center_timeout: longest wait for all actors to start and construct their roles, in seconds.
        device_name: ``"cpu"`` or ``"cuda"``; only checked against the pool.
        worker_env: environment variables that each process starts with, before it imports anything.
        role: name in errors; by default made from the class's name.
        timeout_s: longest wait for the result of a call.
        timeout_key: the configuration key behind ``timeout_s``, for the message of a call that takes longer.

    Raises:
        ConfigError: the cluster cannot hold the group.
        WorkerError: a process did not start, or a constructor raised; all processes of the group are ended then.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float = 300.0,
        *,
        device_name: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        role: str | None = None,
        timeout_s: float | None = None,
        timeout_key: str | None = None,
        _processes: _Processes | None = None,
    ) -> None:
        if _processes is None:
            if worker_names is not None or worker_handles is not None:
                _processes = _attach(worker_names, worker_handles, ray_wait_register_center_timeout)
            else:
                if resource_pool is None or ray_cls_with_init is None:
                    raise ConfigError("a new worker group needs a resource_pool and a ray_cls_with_init")
                if device_name is not None and (device_name != "cpu") != resource_pool.use_gpu:
                    raise ConfigError(f"device_name={device_name!r} but the pool has use_gpu={resource_pool.use_gpu}")
                _processes = _start(
                    resource_pool,
                    ray_cls_with_init,
                    role=role,
                    strategy="STRICT_PACK" if bin_pack else "PACK",
                    name_prefix=name_prefix,
                    detached=detached,
                    worker_env=worker_env,
                    timeout_s=ray_wait_register_center_timeout,
                )
        self._processes = _processes
        self._timeout_key = timeout_key
        self._role_names = tuple(_processes.roles)
        if len(_processes.roles) == 1:
            role = self._role_names[0]
        super().__init__(
            role or "_".join(self._role_names), _processes.roles.get(role or ""), len(_processes.handles), timeout_s
        )

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Attach to the running processes of a detached group.

        Args:
            name_prefix: prefix that the group was made with; finds all its workers.
            worker_names: or the workers' names (:attr:`worker_names` of the group that was made).
            worker_handles: or their actor handles.
            ray_cls_with_init: not needed, the workers know their classes; checked when given.
            kwargs: ``role`` and ``timeout_s`` as for the constructor.

        Raises:
            ConfigError: no such workers, or some of them are missing.
        """
        if worker_names is None and worker_handles is None:
            if name_prefix is None:
                raise ConfigError("from_detached needs a name_prefix, worker_names or worker_handles")
            named = ray.util.list_named_actors(all_namespaces=True)
            found = [actor["name"] for actor in named if actor["namespace"] == DETACHED_NAMESPACE]
            worker_names = [name for name in found if name.rpartition(":")[0] == name_prefix]
            if not worker_names:
                raise ConfigError(f"no detached workers with prefix {name_prefix!r}; running are {sorted(found)}")
        group = cls(worker_names=worker_names, worker_handles=worker_handles, **kwargs)
        if ray_cls_with_init is not None:
            wanted = {name: item.cls.__name__ for name, item in ray_cls_with_init.roles(None).items()}
            held = {name: user_cls.__name__ for name, user_cls in group._processes.roles.items()}
            if sorted(wanted.values()) != sorted(held.values()):
                raise ConfigError(f"the detached workers hold {held}, not {wanted}")
        return group

    # ---- looking at it --------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Any]:
        """The actor handles in rank order."""
        return list(self._processes.handles)

    @property
    def worker_names(self) -> list[str]:
        """The actors' names in rank order."""
        return list(self._processes.names)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that live in the processes."""
        return tuple(self._processes.roles)

    @property
    def process_ids(self) -> list[int]:
        """Process id of each rank, on its own node."""
        return [info.pid for info in self._processes.infos]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """A worker group for each named role; all of them call the same processes."""
        return {
            role: RayWorkerGroup(
                _processes=self._processes, role=role, timeout_s=self.timeout_s, timeout_key=self._timeout_key
            )
            for role in self._check_roles(prefix_set)
        }

    def shutdown(self) -> None:
        """Kill the processes of this group, whatever they do; groups that share them end too."""
        self._processes.end()

    # ---- calls ----------------------------------------------------------------------------------------------

    def _submit(
        self,
        ranks: Sequence[int],
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]],
        used: Container[int] | None = None,
    ) -> list[Any]:
        if self.role not in self._processes.roles:
            raise ConfigError(f"this group holds the roles {list(self.roles)}; call one of them through spawn()")
        rule = getattr(getattr(self._user_cls, method, None), MAGIC_ATTR, None)
        sent = _Sender(
            rule is not None and not rule.materialize_futures,
            [*(value for row in args for value in row), *(v for kw in kwargs for v in kw.values())],
            self._processes.fields,
            reuse=rule is not None and rule.reuse_fields,
        )
        references = []
        for index, rank in enumerate(ranks):
            leaves: list[Any] = []
            rank_args = [sent.form_of(value, leaves) for value in args[index]]
            rank_kwargs = {name: sent.form_of(value, leaves) for name, value in kwargs[index].items()}
            call = (self.role, method, used is None or rank in used)
            handle = self._processes.handles[rank]
            if leaves:
                made = handle.verl_call_with.remote(len(leaves), *call, *leaves, *rank_args, **rank_kwargs)
            else:
                made = handle.verl_call.remote(*call, *rank_args, **rank_kwargs)
            references.append(made)
        return references

    @property
    def traffic(self) -> Traffic:
        """What went to the workers so far, and what did not have to."""
        return self._processes.fields.traffic

    def _remember(self, result: DataProto, shards: Sequence[DataProto], references: Sequence[Any]) -> None:
        self._processes.fields.remember_results(result, shards, references)

    def _fetch(
        self,
        references: Sequence[Any],
        method: str,
        timeout_s: float | None,
        watch: Sequence[Any] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        watched = list(references if watch is None else watch)
        numbered = dict(zip(watched, ranks or range(len(watched)), strict=False))
        key = self._timeout_key if timeout_s == self.timeout_s else None  # a single call may have a limit of its own
        try:
            return _wait(references, numbered, self.role, method, timeout_s, key)
        except KeyboardInterrupt:
            for reference in watched:  # a long generation looks, and makes way for the save
                with contextlib.suppress(RayError, ValueError, TypeError):
                    ray.cancel(reference)
            raise


class _Sender:
    """Turns the arguments of one call into what is sent: each object goes into the object store once."""

    def __init__(self, keep_futures: bool, values: Sequence[Any], fields: FieldStore, *, reuse: bool) -> None:
        self._keep_futures = keep_futures
        self._fields = fields
        self._reuse = reuse
        self._times = Counter(id(value) for value in values)
        self._forms: dict[int, Any] = {}

    def form_of(self, value: Any, leaves: list[Any]) -> Any:
        """What to pass to Ray for ``value``; objects that hold its fields are added to ``leaves``."""
        if isinstance(value, _SMALL) or (isinstance(value, str | bytes) and len(value) < 1024):
            return value
        key = id(value)
        if key not in self._forms:
            self._forms[key] = self._make(value, shared=self._times[key] > 1)
        form = self._forms[key]
        return form.for_call(leaves) if isinstance(form, Shard) else form

    def _make(self, value: Any, shared: bool) -> Any:
        if isinstance(value, Completed):
            value = value.value
        if isinstance(value, DataProtoFuture) and not self._keep_futures:
            only = value.single_reference
            if is_ray_reference(only):
                return only  # Ray hands the shard to the worker, from wherever it lies
            if isinstance(only, Completed):
                value = only.value
        if is_ray_reference(value):
            return value
        if isinstance(value, DataProto) and value.batch is not None and len(value):
            if self._reuse:
                return self._fields.place(value)
            shard = self._fields.place_inside(value)
            if shard.inside:
                return shard
        packed = pack(value)
        return ray.put(packed) if shared else packed


def _wait(
    references: Sequence[Any],
    ranks: Mapping[Any, int],
    role: str,
    method: str,
    timeout_s: float | None,
    timeout_key: str | None = None,
) -> list[Any]:
    """Values of ``references``; raises soon after anything among ``ranks`` or ``references`` failed."""
    started = time.monotonic()
    deadline = math.inf if timeout_s is None else started + timeout_s
    report = started + REPORT_S
    needed = set(references)
    pending = list(dict.fromkeys([*references, *ranks]))
    values: dict[Any, Any] = {}
    while needed - values.keys():
        # for all that is needed, so that this process, which shares cores with workers, wakes when there is work
        count = len(needed.intersection(pending))
        patience = min(LOOK_S, min(deadline, report) - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=count, timeout=max(0.0, patience))
        got, failures = _read(ready)
        values.update(got)
        if failures:
            raise _first_cause(failures, pending, ranks, role, method) from None
        now = time.monotonic()
        if now < min(deadline, report) or not needed - values.keys():
            continue
        late = sorted(ranks.get(reference, -1) for reference in pending)
        if now >= deadline:
            advice = f"; if they are only slow, raise {timeout_key}" if timeout_key else ""
            raise WorkerError(
                role, late[0], method, f"no result from ranks {late} within {timeout_s:g} s; they still run{advice}"
            )
        logger.warning("%s: ranks %s are in %s() for %s now", role, late, method, format_duration(now - started))
        report = now + REPORT_S
    return [values[reference] for reference in references]


def _read(ready: Sequence[Any]) -> tuple[dict[Any, Any], dict[Any, RayError]]:
    """Values and errors of finished calls."""
    try:
        return dict(zip(ready, ray.get(list(ready)), strict=True)), {}  # at once: half the cost of one by one
    except RayError:
        values, failures = {}, {}
    for reference in ready:
        try:
            values[reference] = ray.get(reference)
        except RayError as error:
            failures[reference] = error
    return values, failures


def _first_cause(
    failures: dict[Any, RayError], pending: Sequence[Any], ranks: Mapping[Any, int], role: str, method: str
) -> WorkerError:
    """The failure to report: a death before an exception, because ranks that talk to a dead one raise."""
    stuck: list[Any] = []
    if pending and not any(isinstance(error, RayActorError) for error in failures.values()):
        late, stuck = ray.wait(list(pending), num_returns=len(pending), timeout=GRACE_S)
        failures.update(_read(late)[1])
    chosen = next((ref for ref, error in failures.items() if isinstance(error, RayActorError)), next(iter(failures)))
    main = _as_worker_error(failures.pop(chosen), role, ranks.get(chosen, -1), method)
    if failures:
        others = [_as_worker_error(error, role, ranks.get(ref, -1), method) for ref, error in failures.items()]
        # each thing once, however many ranks say it
        different = {o.remote_traceback: o for o in others if o.remote_traceback != main.remote_traceback}
        lines = [f"  rank {other.rank}: {_last_line(text)}" for text, other in different.items()]
        if lines:
            text = "\n".join([main.remote_traceback.rstrip(), "other ranks failed too:", *lines])
            main = type(main)(main.role, main.rank, main.method, text)
    if silent := sorted(ranks[reference] for reference in stuck if reference in ranks):
        # where a collective ran out of time, these are the ranks that the others waited for
        main = type(main)(
            main.role,
            main.rank,
            main.method,
            f"{main.remote_traceback.rstrip()}\nranks {silent} are still in {method}() after {GRACE_S:g} s more",
        )
    return main


def _as_worker_error(error: RayError, role: str, rank: int, method: str) -> WorkerError:
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkerError):
            return cause
        return WorkerError(role, rank, method, error.traceback_str or str(error))
    if isinstance(error, RayActorError):
        return WorkerError(role, rank, method, f"the worker process died: {error}")
    return WorkerError(role, rank, method, f"{type(error).__name__}: {error}")


def _last_line(text: str) -> str:
    lines = [line for line in text.split("\n") if line.strip()]
    return lines[-1].strip() if lines else ""


# ---- starting and finding processes ----------------------------------------------------------------------------


def _start(
    pool: RayResourcePool,
    cls_with_init: ClassWithInitArgs,
    *,
    role: str | None,
    strategy: str,
    name_prefix: str | None,
    detached: bool,
    worker_env: Mapping[str, str] | None,
    timeout_s: float,
) -> _Processes:
    if detached and not pool.detached:
        if pool.placed:
            raise ConfigError("a detached worker group needs RayResourcePool(detached=True): its resources end with us")
        pool.detached = True
    roles = cls_with_init.roles(role)
    pool.slots(strategy)
    prefix = name_prefix or f"{'_'.join(roles)}_{secrets.token_hex(3)}"
    slots = pool.claim(prefix)
    options = dict(getattr(cls_with_init, "ray_options", {}))
    runtime_env = dict(options.pop("runtime_env", None) or {})
    environment = {**envs.set_in_environment(), **runtime_env.get("env_vars", {}), **(worker_env or {})}
    if environment:
        runtime_env["env_vars"] = {name: str(value) for name, value in environment.items()}
    options = {**pool.actor_resources(), **options}
    if detached:
        options |= {"lifetime": "detached", "namespace": DETACHED_NAMESPACE}
    actor_cls = ray.remote(host_class(roles))
    names = [f"{prefix}:{rank}" for rank in range(len(slots))]
    processes = _Processes([], names, [], {name: item.cls for name, item in roles.items()}, pool, prefix)
    try:
        for name, slot in zip(names, slots, strict=True):
            place = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
            processes.handles.append(
                actor_cls.options(name=name, scheduling_strategy=place, runtime_env=runtime_env, **options).remote()
            )
        label = "_".join(roles)
        deadline = time.monotonic() + timeout_s
        processes.infos = _ask(processes.handles, "verl_info", label, timeout_s)
        address, port = _ask(processes.handles[:1], "verl_reserve_port", label, deadline - time.monotonic())[0]
        places = rank_environments([info.node_id for info in processes.infos], address, port)
        payload = ray.put(pack(roles))
        setups = [
            handle.verl_setup.remote(place, payload) for handle, place in zip(processes.handles, places, strict=True)
        ]
        ranks = {reference: rank for rank, reference in enumerate(setups)}
        _wait(setups, ranks, label, "__init__", max(0.0, deadline - time.monotonic()))
    except BaseException:
        processes.end()
        raise
    return processes


def rank_environments(node_ids: Sequence[str], master_addr: str, master_port: int) -> list[dict[str, str]]:
    """Environment of each rank, given the node of each; local ranks count the group's processes on a node."""
    on_node = Counter(node_ids)
    seen: Counter[str] = Counter()
    environments = []
    for rank, node in enumerate(node_ids):
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(node_ids)),
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(on_node[node]),
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(master_port),
            }
        )
        seen[node] += 1
    return environments


def _attach(worker_names: Sequence[str] | None, worker_handles: Sequence[Any] | None, timeout_s: float) -> _Processes:
    handles = list(worker_handles or ())
    for name in worker_names or ():
        try:
            handles.append(ray.get_actor(name, namespace=DETACHED_NAMESPACE))
        except ValueError:
            raise ConfigError(f"no detached worker named {name!r} is running; it ended, or the name is wrong") from None
    answers = _ask(handles, "verl_classes", "detached", timeout_s)
    order = sorted(range(len(handles)), key=lambda index: answers[index][0])
    if [answers[index][0] for index in order] != list(range(len(handles))):
        raise ConfigError(f"these workers have the ranks {sorted(rank for rank, _ in answers)}; name all of a group")
    handles = [handles[index] for index in order]
    names = [worker_names[index] for index in order] if worker_names else [""] * len(handles)
    infos = _ask(handles, "verl_info", "detached", timeout_s)
    return _Processes(handles, names, infos, answers[0][1], None, "")


def _ask(handles: Sequence[Any], question: str, role: str, timeout_s: float) -> list[Any]:
    """Ask every process something about itself; part of starting, and reported as such."""
    references = [getattr(handle, question).remote() for handle in handles]
    ranks = {reference: rank for rank, reference in enumerate(references)}
    return _wait(references, ranks, role, "__init__", max(0.0, timeout_s))


def _plain_class(cls: Any) -> type:
    """The class behind a ``ray.remote`` wrapper."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class.__mro__[1]

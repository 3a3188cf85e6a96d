"""The controller's side of a group of workers: call it like one object.

Subclasses say how a call reaches the ranks (:meth:`WorkerGroup._submit`) and how results come back
(:meth:`WorkerGroup._fetch`); everything else is the same for every controller.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError, DataError
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import MAGIC_ATTR, CallRule
from verl.single_controller.base.mesh import Mesh


class WorkerGroup(ABC):
    """A group of workers that hold one role.

    Args:
        role: the role's name, in errors and logs.
        user_cls: the workers' class; its registered methods become methods of the group.
        world_size: number of workers.
        timeout_s: longest wait for the result of a call; None waits for ever (a dead worker ends the wait at once).
    """

    def __init__(self, role: str, user_cls: type | None, world_size: int, timeout_s: float | None = None) -> None:
        self.role = role
        self.timeout_s = timeout_s
        self._world_size = world_size
        self._user_cls = user_cls
        self._meshes: dict[str, Mesh] = {}
        if user_cls is not None:
            self._bind_methods(user_cls)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._world_size

    # ---- calls on chosen ranks ------------------------------------------------------------------------------

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every rank and return the references of the results.

        When *every* argument is a list with one entry per rank, each rank gets its entry; otherwise every rank gets
        the arguments as they are.
        """
        values = [*args, *kwargs.values()]
        per_rank = bool(values) and all(isinstance(v, list) and len(v) == self.world_size for v in values)
        if not per_rank:
            args = tuple([value] * self.world_size for value in args)
            kwargs = {name: [value] * self.world_size for name, value in kwargs.items()}
        return self._submit_split(range(self.world_size), method_name, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:meth:`execute_all_async`, waiting for the results."""
        return self._fetch(self.execute_all_async(method_name, *args, **kwargs), method_name, self.timeout_s)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same as :meth:`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 and return the reference of the result."""
        return self._submit([0], method_name, [args], [kwargs])[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """:meth:`execute_rank_zero_async`, waiting for the result."""
        reference = self.execute_rank_zero_async(method_name, *args, **kwargs)
        return self._fetch([reference], method_name, self.timeout_s)[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The same as :meth:`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    # ---- meshes ---------------------------------------------------------------------------------------------

    def mesh(self, name: str) -> Mesh:
        """The ranks' places in a mesh; asked of the workers once.

        Raises:
            WorkerError: a rank has not registered the mesh.
            ConfigError: the ranks' answers do not fit together.
        """
        if name not in self._meshes:
            places = self.execute_all_sync("_query_dispatch_collect_info", name)
            self._meshes[name] = Mesh.of_ranks(name, places)
        return self._meshes[name]

    def dp_size(self, mesh_name: str) -> int:
        """Into how many shards a batch is split over a mesh."""
        return self.mesh(mesh_name).dp_size

    # ---- roles ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def roles(self) -> tuple[str, ...]:
        """Roles that live in the processes."""

    @abstractmethod
    def spawn(self, prefix_set: Iterable[str]) -> Mapping[str, WorkerGroup]:
        """A worker group for each named role; all of them call the same processes."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes of this group, whatever they do. Later calls fail."""

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make each named role an attribute: ``group.actor.update(...)``."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)

    def _check_roles(self, names: Iterable[str]) -> list[str]:
        wanted = list(names)
        if unknown := [name for name in wanted if name not in self.roles]:
            raise ConfigError(f"no role {', '.join(map(repr, unknown))} in this group; there are {list(self.roles)}")
        return wanted

    # ---- what a controller implements -----------------------------------------------------------------------

    @abstractmethod
    def _submit(
        self,
        ranks: Sequence[int],
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]],
        used: Container[int] | None = None,
    ) -> list[Any]:
        """Start ``method`` on ``ranks``.

        Args:
            ranks: who runs.
            method: what they run.
            args: each rank's own positional arguments.
            kwargs: each rank's own keyword arguments.
            used: ranks whose results are used; the others' may be None. None uses all.

        Returns:
            References in the order of ``ranks``.
        """

    @abstractmethod
    def _fetch(
        self,
        references: Sequence[Any],
        method: str,
        timeout_s: float | None,
        watch: Sequence[Any] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Wait for results.

        Args:
            references: what is wanted.
            method: for messages.
            timeout_s: None waits for ever.
            watch: references whose failure ends the wait too, because other ranks may be waiting for that one.
            ranks: the rank of each of ``watch``, or of ``references`` without it.

        Raises:
            WorkerError: as soon as a rank fails, dies or is too slow.
        """

    @abstractmethod
    def _remember(self, result: DataProto, shards: Sequence[DataProto], references: Sequence[Any]) -> None:
        """Note where the rows of a joined result lie, for methods with ``reuse_fields``.

        Args:
            result: what the caller gets.
            shards: the workers' parts of it, in order.
            references: of these parts.
        """

    # ---- binding --------------------------------------------------------------------------------------------

    def _bind_methods(self, user_cls: type) -> None:
        for name in dir(user_cls):
            function = getattr(user_cls, name, None)
            rule = getattr(function, MAGIC_ATTR, None)
            if isinstance(rule, CallRule) and callable(function):
                if hasattr(type(self), name):
                    raise ConfigError(
                        f"{user_cls.__name__}.{name} has the name of a method of {type(self).__name__}; rename it"
                    )
                setattr(self, name, BoundMethod(self, name, function, rule))

    def _submit_split(
        self,
        ranks: Iterable[int],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        used: Container[int] | None = None,
    ) -> list[Any]:
        """:meth:`_submit` for arguments that hold one value per rank of the whole group."""
        for name, values in [*enumerate(args), *kwargs.items()]:
            if not isinstance(values, list | tuple) or len(values) != self.world_size:
                got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
                raise DataError(
                    f"{method}(): dispatch gave {got} for argument {name!r}; it must give one for each of the "
                    f"{self.world_size} ranks"
                )
        ranks = list(ranks)
        return self._submit(
            ranks,
            method,
            [[values[rank] for values in args] for rank in ranks],
            [{name: values[rank] for name, values in kwargs.items()} for rank in ranks],
            used,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        roles = self.__dict__.get("_role_names", ())
        bound = [key for key, value in self.__dict__.items() if isinstance(value, BoundMethod)]
        user_cls = self.__dict__.get("_user_cls")
        if name in roles and len(roles) > 1:
            group = self.spawn([name])[name]
            setattr(self, name, group)
            return group
        near = difflib.get_close_matches(name, [*bound, *roles], 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        if user_cls is not None and callable(getattr(user_cls, name, None)):
            hint = f": {user_cls.__name__}.{name} is not decorated with @register"
        elif len(roles) > 1:
            hint += f" (the group holds the roles {', '.join(roles)}; use spawn() to call one)"
        raise AttributeError(f"worker group {self.__dict__.get('role', '?')!r} has no method {name!r}{hint}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.role!r}, world_size={self.world_size})"


class BoundMethod:
    """A worker's method as a method of the group: checks the arguments, dispatches, runs, collects.

    ``method.options(blocking=False, timeout_s=30)(batch)`` changes how one call is made.
    """

    def __init__(self, group: WorkerGroup, name: str, function: Callable[..., Any], rule: CallRule) -> None:
        functools.update_wrapper(self, function)
        signature = inspect.signature(function)
        # without self, and without what ray.remote adds to the methods of a class that it wraps
        visible = [p for p in list(signature.parameters.values())[1:] if not p.name.startswith("_ray_")]
        self.__signature__ = signature.replace(parameters=visible)
        self._group = group
        self._name = name
        self._function = function
        self._rule = rule
        self._dispatch, self._collect, self._collect_ranks = rule.functions()
        self._blocking = rule.blocking
        self._timeout_s: float | None = None

    def options(self, *, blocking: bool | None = None, timeout_s: float | None = None) -> BoundMethod:
        """The same method with another way to wait.

        Args:
            blocking: wait for the result, or return a future.
            timeout_s: longest wait for the result in seconds.
        """
        other = BoundMethod(self._group, self._name, self._function, self._rule)
        other._blocking = self._blocking if blocking is None else blocking
        other._timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.start(*args, **kwargs)
        if self._blocking:
            return call.get()
        output: Any = call.references[0] if self._rule.rank_zero_only else call.references
        result = self._collect(self._group, output)
        if isinstance(result, DataProtoFuture):
            result.fetch_with(functools.partial(call.fetch, watch=call.references))
        return result

    def start(self, *args: Any, **kwargs: Any) -> StartedCall:
        """Begin a call; ``.get()`` of what this gives waits for the ranks and returns what the call would have.

        For calls that do not need each other's results: start them all, then get them. A group with a process of its
        own then works beside the others, and a shared one finds its next call waiting. The local controller computes
        here and now.
        """
        group = self._group
        try:
            self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{group.role}.{self._name}{self.__signature__}: {error}") from None
        split_args, split_kwargs = self._dispatch(group, *args, **kwargs)
        ranks = [0] if self._rule.rank_zero_only else list(range(group.world_size))
        used = None if self._collect_ranks is None else frozenset(self._collect_ranks(group))
        references = group._submit_split(ranks, self._name, split_args, split_kwargs, used)
        timeout_s = group.timeout_s if self._timeout_s is None else self._timeout_s
        fetch = functools.partial(group._fetch, method=self._name, timeout_s=timeout_s, ranks=ranks)
        return StartedCall(references, fetch, functools.partial(self._join, references))

    def _join(self, references: Sequence[Any], output: list[Any]) -> Any:
        """What the caller gets, from the ranks' results."""
        group = self._group
        result = self._collect(group, output[0] if self._rule.rank_zero_only else output)
        if self._rule.reuse_fields and isinstance(result, DataProto):
            order = range(len(output)) if self._collect_ranks is None else self._collect_ranks(group)
            group._remember(result, [output[rank] for rank in order], [references[rank] for rank in order])
        return result

    def __repr__(self) -> str:
        return f"<{self._group.role}.{self._name}{self.__signature__} on {self._group.world_size} ranks>"


@dataclass(frozen=True)
class StartedCall:
    """A call that runs.

    Attributes:
        references: of the ranks' results.
        fetch: waits for results of this call.
        join: makes of the ranks' results what the caller gets.
    """

    references: list[Any]
    fetch: Callable[..., list[Any]]
    join: Callable[[list[Any]], Any]

    def get(self) -> Any:
        """Wait for the result.

        Raises:
            WorkerError: a rank failed, died or was too slow; the time counts from here.
        """
        return self.join(self.fetch(self.references))

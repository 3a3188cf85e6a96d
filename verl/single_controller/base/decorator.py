"""``register``: says of a worker's method how the controller calls it on the whole group.

.. code-block:: python

    class Critic(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_values(self, data: DataProto) -> DataProto: ...

    values = critic_group.compute_values(batch)  # split over the ranks, run, joined
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from verl.errors import ConfigError, DataError
from verl.protocol import PADDING_ROWS_KEY, DataProto, DataProtoFuture
from verl.single_controller.base.dispatch import (
    CollectFn,
    DispatchFn,
    collect_all,
    collect_dp_data_proto,
    collect_first,
    dispatch_direct,
    dispatch_dp_data_proto,
    dispatch_dp_data_proto_with_func,
    dispatch_one_to_all,
    dispatch_per_rank,
    make_nd_compute_dataproto_dispatch_fn,
)

__all__ = [
    "MAGIC_ATTR",
    "CallRule",
    "Dispatch",
    "Execute",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

#: attribute of a registered method that holds its :class:`CallRule`
MAGIC_ATTR = "_verl_call_rule"

F = TypeVar("F", bound=Callable[..., Any])


class _Mode:
    """A member of an open enumeration; equal by name, so it survives pickling."""

    def __init__(self, owner: str, name: str) -> None:
        self.owner = owner
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mode) and (self.owner, self.name) == (other.owner, other.name)

    def __hash__(self) -> int:
        return hash((self.owner, self.name))

    def __repr__(self) -> str:
        return f"{self.owner}.{self.name}"


class _OpenEnum(type):
    """An enumeration that plug-ins can extend: ``Dispatch.register("MY_MODE")``, then ``Dispatch.MY_MODE``."""

    _members: dict[str, _Mode]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _OpenEnum:
        cls = super().__new__(mcs, name, bases, namespace)
        cls._members = {}
        for member in namespace.get("_names", ()):
            cls.register(member)
        return cls

    def register(cls, name: str) -> _Mode:
        """Add a member."""
        if name in cls._members:
            raise ConfigError(f"{cls.__name__}.{name} exists already")
        cls._members[name] = _Mode(cls.__name__, name)
        return cls._members[name]

    def __getattr__(cls, name: str) -> _Mode:
        members: dict[str, _Mode] = cls.__dict__.get("_members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"{cls.__name__} has no member {name!r}; there are {', '.join(members)}")

    def __getitem__(cls, name: str) -> _Mode:
        return cls._members[name]

    def __iter__(cls) -> Iterator[_Mode]:
        return iter(cls._members.values())

    def __contains__(cls, item: object) -> bool:
        return item in cls._members.values()


class Dispatch(metaclass=_OpenEnum):
    """How arguments are split over the ranks and results joined.

    - ``RANK_ZERO``: rank 0 alone runs; its result is returned.
    - ``ONE_TO_ALL``: all ranks get the same arguments; a list of results.
    - ``ALL_TO_ALL``, ``DP_COMPUTE``: every argument is a list with one value per rank; a list of results.
    - ``DP_COMPUTE_PROTO``: batches are split and joined, padded where they do not divide.
    - ``DP_COMPUTE_PROTO_WITH_FUNC``: the same, with a function for all ranks as first argument.
    - ``DP_COMPUTE_METRIC``: batches are split; a list of the ranks' results.
    - ``DIRECT_ROLLOUT_METHOD``: not called through the group but on one worker.
    """

    _names = (
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    )


class Execute(metaclass=_OpenEnum):
    """Which ranks run: ``ALL``, or ``RANK_ZERO``, whose result is returned alone."""

    _names = ("ALL", "RANK_ZERO")


_DISPATCH_FNS: dict[_Mode, dict[str, Any]] = {
    Dispatch.RANK_ZERO: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_first},
    Dispatch.ONE_TO_ALL: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all},
    Dispatch.ALL_TO_ALL: {"dispatch_fn": dispatch_per_rank, "collect_fn": collect_all},
    Dispatch.DP_COMPUTE: {"dispatch_fn": dispatch_per_rank, "collect_fn": collect_all},
    Dispatch.DP_COMPUTE_PROTO: {"dispatch_fn": dispatch_dp_data_proto, "collect_fn": collect_dp_data_proto},
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: {
        "dispatch_fn": dispatch_dp_data_proto_with_func,
        "collect_fn": collect_dp_data_proto,
    },
    Dispatch.DP_COMPUTE_METRIC: {"dispatch_fn": dispatch_dp_data_proto, "collect_fn": collect_all},
    Dispatch.DIRECT_ROLLOUT_METHOD: {"dispatch_fn": dispatch_direct, "collect_fn": collect_all},
}
_WHOLE_BATCH = (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL)


def get_predefined_dispatch_fn(dispatch_mode: Any) -> dict[str, Any]:
    """``{"dispatch_fn": ..., "collect_fn": ...}`` of a mode."""
    if dispatch_mode not in _DISPATCH_FNS:
        raise ConfigError(f"unknown dispatch mode {dispatch_mode!r}; there are {', '.join(map(str, _DISPATCH_FNS))}")
    return dict(_DISPATCH_FNS[dispatch_mode])


def get_predefined_execute_fn(execute_mode: Any) -> dict[str, str]:
    """``{"execute_fn_name": ...}``: the worker group's method that runs this mode."""
    if execute_mode not in Execute:
        raise ConfigError(f"unknown execute mode {execute_mode!r}; there are {', '.join(map(str, Execute))}")
    return {"execute_fn_name": "execute_rank_zero" if execute_mode == Execute.RANK_ZERO else "execute_all"}


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> _Mode:
    """Add ``Dispatch.<dispatch_mode_name>``.

    Args:
        dispatch_mode_name: its name.
        dispatch_fn: ``(worker_group, *args, **kwargs) -> (args, kwargs)`` with one value per rank in each.
        collect_fn: ``(worker_group, output) -> result``, where ``output`` lists the ranks' results.
    """
    mode = Dispatch.register(dispatch_mode_name)
    _DISPATCH_FNS[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return mode


def update_dispatch_mode(dispatch_mode: Any, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replace the functions of a mode for worker groups made from now on."""
    get_predefined_dispatch_fn(dispatch_mode)
    _DISPATCH_FNS[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


@dataclass(frozen=True)
class CallRule:
    """What :func:`register` was told about a method."""

    dispatch_mode: Any
    execute_mode: Any
    blocking: bool
    materialize_futures: bool
    auto_padding: bool | None
    reuse_fields: bool = False

    def functions(self) -> tuple[DispatchFn, CollectFn, Callable[..., Sequence[int]] | None]:
        """The dispatch and the collect function, and the one that says whose results are used; None uses all."""
        mode = self.dispatch_mode
        functions = mode if isinstance(mode, Mapping) else get_predefined_dispatch_fn(mode)
        dispatch_fn, collect_fn = functions["dispatch_fn"], functions["collect_fn"]
        if getattr(dispatch_fn, "takes_padding", False):
            dispatch_fn = functools.partial(dispatch_fn, _auto_padding=self.auto_padding)
        return dispatch_fn, collect_fn, functions.get("collect_ranks")

    @property
    def rank_zero_only(self) -> bool:
        """Whether rank 0 alone runs."""
        return bool(self.execute_mode == Execute.RANK_ZERO or self.dispatch_mode == Dispatch.RANK_ZERO)


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Any = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    auto_padding: bool | None = None,
    reuse_fields: bool = False,
) -> Callable[[F], F]:
    """Make a worker's method callable on its worker group.

    Args:
        dispatch_mode: a member of :class:`Dispatch`, or ``{"dispatch_fn": ..., "collect_fn": ...}``.
        execute_mode: a member of :class:`Execute`.
        blocking: wait for the result. Otherwise the call returns at once: a
            :class:`~verl.protocol.DataProtoFuture` where batches are joined, references elsewhere.
        materialize_futures: give the method values where the caller passed futures; they are fetched in the worker.
        auto_padding: whether a batch that does not divide over the ranks is padded with copies of rows, which are
            removed from the result. None leaves it to the batch and ``DataProtoConfig``. Say False where copies
            change the result (a training step): such a batch is an error then. A method that gets padding keeps
            the order of the rows and returns the same number for each, or no batch at all; it can read in
            ``data.meta_info["_padding_rows"]`` how many of its last rows are copies.
        reuse_fields: tensors that went to this group before, or came from it, are not sent again, where workers are
            other processes. A tensor that has been sent must then be changed through torch only, not through a
            NumPy view of it.

    Raises:
        ConfigError: the modes do not fit together or are unknown.
    """
    if isinstance(dispatch_mode, Mapping):
        if missing := {"dispatch_fn", "collect_fn"} - dispatch_mode.keys():
            raise ConfigError(f"dispatch_mode lacks {', '.join(sorted(missing))}")
    elif dispatch_mode not in _DISPATCH_FNS:
        get_predefined_dispatch_fn(dispatch_mode)
    get_predefined_execute_fn(execute_mode)
    split = not isinstance(dispatch_mode, Mapping) and dispatch_mode in Dispatch and dispatch_mode not in _WHOLE_BATCH
    if execute_mode == Execute.RANK_ZERO and split and "DP_COMPUTE" in dispatch_mode.name:
        raise ConfigError(f"{dispatch_mode} splits over all ranks but execute_mode runs rank 0 only; use ONE_TO_ALL")
    rule = CallRule(dispatch_mode, execute_mode, blocking, materialize_futures, auto_padding, reuse_fields)

    def decorate(function: F) -> F:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return _materialize(args, kwargs) if materialize_futures else (args, kwargs)

        wrapper: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
                args, kwargs = before(args, kwargs)
                padding = _padding_of(args, kwargs)
                return _mark_padding(await function(self, *args, **kwargs), padding, function.__name__)

            wrapper = run_async
        else:

            @functools.wraps(function)
            def run(self: Any, *args: Any, **kwargs: Any) -> Any:
                args, kwargs = before(args, kwargs)
                padding = _padding_of(args, kwargs)
                return _mark_padding(function(self, *args, **kwargs), padding, function.__name__)

            wrapper = run
        setattr(wrapper, MAGIC_ATTR, rule)
        return wrapper  # type: ignore[return-value]

    return decorate


def _materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def value_of(argument: Any) -> Any:
        return argument.get() if isinstance(argument, DataProtoFuture) else argument

    return tuple(map(value_of, args)), {name: value_of(argument) for name, argument in kwargs.items()}


def _padding_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """``(rows, trailing copies)`` of the shard that this rank got, or None when it holds no padding."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, DataProto) and (copies := value.meta_info.get(PADDING_ROWS_KEY)):
            return len(value), copies
    return None


def _mark_padding(result: Any, padding: tuple[int, int] | None, method: str) -> Any:
    """Say in the result which of its rows come from padding, or drop them where nothing can be said."""
    if padding is None:
        return result
    rows_in, copies_in = padding
    if isinstance(result, DataProto):
        meta = {name: value for name, value in result.meta_info.items() if name != PADDING_ROWS_KEY}
        if len(result):
            meta[PADDING_ROWS_KEY] = _copies_out(len(result), rows_in, copies_in, method)
        result.meta_info = meta
    elif isinstance(result, TensorDictBase) or (isinstance(result, torch.Tensor) and result.dim() > 0):
        result = result[: len(result) - _copies_out(len(result), rows_in, copies_in, method)]
    return result


def _copies_out(rows_out: int, rows_in: int, copies_in: int, method: str) -> int:
    if rows_out % rows_in:
        raise DataError(
            f"{method}() returned {rows_out} rows for {rows_in} rows, {copies_in} of them padding, which cannot be "
            "taken out again; give a batch that divides over the ranks, or register(auto_padding=False)"
        )
    return copies_in * (rows_out // rows_in)

"""How the arguments of one call are split over ranks, and how the ranks' results are joined.

A dispatch function takes the worker group and the caller's arguments and returns, for each argument, one value per
rank. A collect function takes the worker group and the ranks' results: values after a blocking call, references
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDictBase

from verl.errors import DataError
from verl.protocol import DataProto, DataProtoFuture, collect_shards, split_with_padding
from verl.single_controller.base.futures import is_reference
from verl.single_controller.base.mesh import Mesh


class Ranks(Protocol):
    """What a dispatch function asks of a worker group."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh: ...


#: per positional argument, and per keyword, one value for each rank
PerRank = tuple[tuple[Any, ...], dict[str, Any]]
DispatchFn = Callable[..., PerRank]
CollectFn = Callable[[Ranks, Any], Any]
F = TypeVar("F", bound=Callable[..., Any])


def takes_padding(function: F) -> F:
    """Mark a dispatch function that has an ``_auto_padding`` argument, filled from ``register(auto_padding=...)``."""
    function.takes_padding = True  # type: ignore[attr-defined]
    return function


# ---- dispatch --------------------------------------------------------------------------------------------------


def dispatch_one_to_all(worker_group: Ranks, *args: Any, **kwargs: Any) -> PerRank:
    """Every rank gets the same arguments."""
    ranks = worker_group.world_size
    return tuple([arg] * ranks for arg in args), {name: [value] * ranks for name, value in kwargs.items()}


def dispatch_per_rank(worker_group: Ranks, *args: Any, **kwargs: Any) -> PerRank:
    """Every argument is a list with one value per rank already."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != worker_group.world_size:
            got = f"{len(value)} values" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise DataError(
                f"argument {name!r}: this method takes a list with one value for each of the "
                f"{worker_group.world_size} ranks, got {got}"
            )
    return args, kwargs


@takes_padding
def dispatch_dp_data_proto(
    worker_group: Ranks, *args: Any, _auto_padding: bool | None = None, **kwargs: Any
) -> PerRank:
    """Batches are split into one shard per rank; every other argument goes to all ranks."""
    return split_batches(worker_group.world_size, args, kwargs, _auto_padding)


@takes_padding
def dispatch_dp_data_proto_with_func(
    worker_group: Ranks, *args: Any, _auto_padding: bool | None = None, **kwargs: Any
) -> PerRank:
    """The first argument is a function for all ranks; the rest as in :func:`dispatch_dp_data_proto`."""
    if not args or not callable(args[0]):
        got = type(args[0]).__name__ if args else "nothing"
        raise DataError(f"the first argument of this method is a function, got {got}")
    return split_batches(worker_group.world_size, args, kwargs, _auto_padding)


def dispatch_direct(worker_group: Ranks, *args: Any, **kwargs: Any) -> PerRank:
    """Refuse: methods of this mode are called on one worker, not on the group."""
    raise DataError(
        "this method is for direct calls to one worker: use group.workers[rank].<method>.remote(...) under Ray"
    )


def split_batches(
    chunks: int, args: Sequence[Any], kwargs: dict[str, Any], auto_padding: bool | None
) -> tuple[tuple[list[Any], ...], dict[str, list[Any]]]:
    """Split every batch among the arguments into ``chunks`` shards and give everything else to all of them.

    Raises:
        DataError: a batch does not divide where padding is off, or several batches differ in their rows and one
            would need padding, so that the result's padding could not be told.
    """
    batches = [value for value in [*args, *kwargs.values()] if isinstance(value, DataProto) and len(value)]
    rows = {len(batch) for batch in batches}
    if len(rows) > 1 and any(count % chunks for count in rows):
        raise DataError(f"batches of {sorted(rows)} rows in one call do not divide over {chunks} ranks")

    def split(value: Any) -> list[Any]:
        if isinstance(value, DataProto):
            return list(split_with_padding(value, chunks, auto_padding))
        if isinstance(value, DataProtoFuture):
            return list(value.chunk(chunks, auto_padding))
        if isinstance(value, TensorDictBase):
            if len(value) % chunks:
                raise DataError(f"a TensorDict of {len(value)} rows does not divide over {chunks} ranks; use DataProto")
            size = len(value) // chunks
            return [value[i * size : (i + 1) * size] for i in range(chunks)]
        return [value] * chunks

    return tuple(split(arg) for arg in args), {name: split(value) for name, value in kwargs.items()}


# ---- collect ---------------------------------------------------------------------------------------------------


def collect_all(worker_group: Ranks, output: Any) -> Any:
    """The ranks' results as they are."""
    return output


def collect_first(worker_group: Ranks, output: Any) -> Any:
    """The result of the only rank that ran."""
    return output[0] if isinstance(output, list) and len(output) == 1 else output


def collect_dp_data_proto(worker_group: Ranks, output: list[Any]) -> Any:
    """Shards joined in rank order, without the padding that dispatch added."""
    return join(output)


def join(output: Sequence[Any]) -> Any:
    """Join results of shards: batches and tensors along their rows; references to a future; others as a list."""
    if not output:
        raise DataError("there is no result to join: no rank ran")
    first = output[0]
    if is_reference(first):
        return DataProtoFuture.concat(output)
    if all(isinstance(item, DataProto) for item in output):
        return collect_shards(output)
    if all(isinstance(item, torch.Tensor) and item.dim() > 0 for item in output):
        return torch.cat(list(output))
    if all(isinstance(item, TensorDictBase) for item in output):
        return torch.cat(list(output))
    return list(output)


# ---- meshes ----------------------------------------------------------------------------------------------------


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Dispatch over one axis of a mesh of ranks, for models that are split in more ways than by data.

    The ranks of one data-parallel group get the same shard; the shard's result comes from the rank that said
    ``is_collect``. The workers tell their places with
    ``self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)``.

    Args:
        mesh_name: name of the mesh; one role may register several.

    Returns:
        What ``register(dispatch_mode=...)`` takes. ``collect_ranks`` in it tells which ranks' results are used; the
        others' stay where they are.
    """

    @takes_padding
    def dispatch(worker_group: Ranks, *args: Any, _auto_padding: bool | None = None, **kwargs: Any) -> PerRank:
        mesh = worker_group.mesh(mesh_name)
        by_shard, by_shard_kw = split_batches(mesh.dp_size, args, kwargs, _auto_padding)

        def to_ranks(shards: list[Any]) -> list[Any]:
            return [shards[dp_rank] for dp_rank in mesh.dp_ranks]

        return tuple(map(to_ranks, by_shard)), {name: to_ranks(shards) for name, shards in by_shard_kw.items()}

    def collect_ranks(worker_group: Ranks) -> tuple[int, ...]:
        return worker_group.mesh(mesh_name).collect_ranks

    def collect(worker_group: Ranks, output: list[Any]) -> Any:
        # in the order of the shards, which need not be the order of the ranks
        return join([output[rank] for rank in collect_ranks(worker_group)])

    return {"dispatch_fn": dispatch, "collect_fn": collect, "collect_ranks": collect_ranks}

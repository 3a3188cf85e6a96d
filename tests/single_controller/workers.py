"""Workers that the tests run in other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from verl import DataProto
from verl.errors import ConfigError
from verl.protocol import DataProtoFuture, all_gather_data_proto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def one_value_each(group, *values):
    """A user's own dispatch: rank i gets ``value * i``."""
    return tuple([value * rank for rank in range(group.world_size)] for value in values), {}


def total(group, output):
    """A user's own collect: the sum over the ranks."""
    return sum(output)


SCALED = register_dispatch_mode("SCALED_FOR_TESTS", one_value_each, total)


class Sums(Worker):
    """Answers about itself and does small sums."""

    def __init__(self, offset: float = 0.0) -> None:
        # no super().__init__(): the identity must be there all the same
        self.env_at_init = {name: os.environ.get(name) for name in ENVIRONMENT}
        self.rank_at_init = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        self.offset = offset
        self.unpickled: list[int] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self) -> dict:
        """Rank, process and environment."""
        return {
            "rank": self.rank_at_init,
            "env": self.env_at_init,
            "pid": os.getpid(),
            "threads": (os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shapes(self, value: object, *, key: str = "a") -> tuple:
        """What arrived, and the address of the store it lies in."""
        return type(value).__name__, key, self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_first(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def also_only_first(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own_value(self, value: int, *, more: int = 0) -> tuple[int, int]:
        return self.rank, value + more

    @register(dispatch_mode=SCALED)
    def scaled(self, value: int) -> int:
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto, amount: float = 1.0) -> DataProto:
        """``y = x + amount + offset`` and who computed each row."""
        x = data.batch["x"]
        return DataProto.from_dict(
            {"y": x + amount + self.offset, "rank": torch.full((len(x),), self.rank)},
            {"by": np.array([f"rank {self.rank}"] * len(x), dtype=object)},
            {"metrics": {"rows": len(x)}, "step": data.meta_info.get("step")},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice(self, data: DataProto) -> DataProto:
        return data.repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def squares(self, data: DataProto) -> torch.Tensor:
        return data.batch["x"] ** 2

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def first_row_only(self, data: DataProto) -> DataProto:
        return data[:1]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, auto_padding=False)
    def train(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(data)}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, data: DataProto) -> DataProto:
        return function(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> dict[str, int]:
        return {"rows": len(data), "padding": data.meta_info.get("_padding_rows", 0)}

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, value: int) -> int:
        return value + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        """``x + 1``, as a future."""
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_later(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def takes_a_future(self, data: DataProto) -> DataProto:
        assert isinstance(data, DataProtoFuture)
        return data.get()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def slept(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def writes_into(self, tensor: torch.Tensor, tree: dict) -> tuple[float, float]:
        """In-place writes into what arrived from the object store."""
        tensor += 1
        tree["t"] *= 2
        return float(tensor.sum()), float(tree["t"].sum())

    def not_registered(self) -> int:
        """Callable on the worker, not on the group."""
        return self.rank


class Counted:
    """Counts in the environment of the process how often it was unpickled there."""

    def __reduce__(self):
        return _count, ()


def _count() -> Counted:
    os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", "0")) + 1)
    return Counted()


class Producer(Worker):
    """Makes batches that count where they are unpickled."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce(self, data: DataProto) -> DataProto:
        rows = [(Counted(), os.getpid()) for _ in range(len(data))]
        return DataProto.from_dict({"x": data.batch["x"] + 100}, {"counted": rows})


class Consumer(Worker):
    """Reads such batches."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def consume(self, data: DataProto) -> DataProto:
        count = int(os.environ.get("COUNTED", "0"))
        return DataProto.from_dict(
            {"x": data.batch["x"]}, {"count": [count] * len(data), "pid": [os.getpid()] * len(data)}
        )


class Mesh2x2(Worker):
    """Four ranks as 2 data-parallel shards × 2 ranks each; the mesh's order is not the ranks' order."""

    def __init__(self) -> None:
        # ranks 0 and 2 hold shard 1, ranks 1 and 3 shard 0; the later rank of each gives the result
        self._register_dispatch_collect_info("train", dp_rank=1 - self.rank % 2, is_collect=self.rank >= 2)
        self._register_dispatch_collect_info("flat", dp_rank=self.rank, is_collect=True)
        self._register_dispatch_collect_info("deaf", dp_rank=self.rank % 2, is_collect=False)

    def where(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def train(self, data: DataProto, scale: float = 1.0) -> DataProto:
        rank = torch.full((len(data),), self.rank)
        return DataProto.from_dict({"y": data.batch["x"] * scale, "rank": rank})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"), blocking=False)
    def train_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("flat"))
    def flat(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("deaf"))
    def deaf(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def nowhere(self, data: DataProto) -> DataProto:
        return data


class Actor(Worker):
    """One of two roles in a process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def act(self) -> str:
        return f"actor {self.rank}"


class Critic(Worker):
    """The other of two roles in a process."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def value(self) -> float:
        return self.gamma


class Unpicklable(Exception):
    """An exception that cannot leave its process."""

    def __init__(self, a, b) -> None:
        super().__init__("cannot be pickled")
        self.lock = __import__("threading").Lock()


class Trouble(Worker):
    """Fails on demand."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, failing_rank: int, sleep_s: float, how: str) -> str:
        """One rank fails while the others sleep, as if they waited for it in a collective."""
        if self.rank != failing_rank:
            time.sleep(sleep_s)
            return "slept"
        if how == "raise":
            raise ValueError("the reward model is on fire")
        if how == "unpicklable":
            raise Unpicklable(1, 2)
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
        return "unreachable"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_then_die(self) -> None:
        """Rank 1 dies a moment after rank 0 noticed that something is wrong."""
        if self.rank == 0:
            raise ConnectionError("connection closed by peer")
        time.sleep(0.3)
        os._exit(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_refuse(self) -> None:
        """Every rank finds the same mistake in what it was given."""
        raise ConfigError("model.path=here: is no model")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, data: DataProto) -> DataProto:
        raise KeyError("no such key")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def pass_on(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fine(self) -> int:
        return self.rank


class BadConstructor(Worker):
    """Rank 1 cannot be constructed."""

    def __init__(self) -> None:
        if self.rank == 1:
            raise RuntimeError("weights not found")


class Collective(Worker):
    """Joins a gloo group from the environment alone."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", init_method="env://")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce_without_rank_1(self) -> None:
        group = dist.new_group(timeout=timedelta(seconds=1))
        if self.rank == 1:
            time.sleep(8)
        else:
            dist.all_reduce(torch.zeros(1), group=group)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value)
        return float(value)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def gather(self, data: DataProto) -> DataProto:
        all_gather_data_proto(data, dist.group.WORLD)
        return data

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def gather_error(self, data: DataProto) -> str:
        try:
            all_gather_data_proto(data, dist.group.WORLD)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


class Reader(Worker):
    """Reads batches whose fields are not sent twice; writes into what it got, which nobody else may see."""

    def __init__(self) -> None:
        # the last two ranks work on the first shard, the others on the second
        self._register_dispatch_collect_info("pairs", dp_rank=int(self.rank < 2), is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"), reuse_fields=True)
    def double(self, data: DataProto) -> DataProto:
        doubled = {f"{name}2": value * 2 for name, value in data.batch.items()}
        for value in data.batch.values():
            value.fill_(7)
        return DataProto.from_dict(doubled, {"who": [self.rank] * len(data)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def look(self, data: DataProto) -> DataProto:
        """As :meth:`look_again`; its fields travel with the call."""
        return self.look_again(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"), reuse_fields=True)
    def look_again(self, data: DataProto) -> DataProto:
        """The sum of a row's picture and its id, and how many different pictures there are."""
        shown = list(data.non_tensor_batch["shown"])
        sums = [
            float(ids.sum())
            + (0.0 if one is None else float(torch.cat(one["pixels"]).sum()) + float(one["grid"].sum()))
            for ids, one in zip(data.batch["ids"], shown, strict=True)
        ]
        different = len({id(one) for one in shown if one is not None})
        return DataProto.from_dict({"sum": torch.tensor(sums)}, {"different": [different] * len(data)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"), reuse_fields=True)
    def total(self, data: DataProto, scale: float = 1.0) -> DataProto:
        fields = {name: str(value.dtype) for name, value in data.batch.items()}
        assert data.meta_info.get("note") == "kept"
        sums = sum(value.double() for value in data.batch.values()) * scale
        return DataProto.from_dict(
            {"sum": sums}, {"fields": [fields] * len(data), "tag": list(data.non_tensor_batch["tag"])}
        )

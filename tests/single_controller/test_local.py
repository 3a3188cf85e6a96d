"""The local worker group: the surface of the Ray one, in this process."""

from __future__ import annotations

import os
import traceback

import pytest
import torch

from tests.single_controller.workers import Actor, BadConstructor, Critic, Mesh2x2, Producer, Sums, Trouble
from verl import DataProto
from verl.errors import ConfigError, DataError, WorkerError
from verl.protocol import DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs, ColocatedClasses, resolve
from verl.single_controller.local import LocalWorkerGroup


def make(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(float(rows))}, {"uid": [f"u{i}" for i in range(rows)]})


@pytest.fixture
def sums() -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Sums, offset=10.0), role="adder")


#: calls that must give the same in this process and in a Ray process
CALLS = {
    "one_to_all": lambda group: group.shapes([1, 2], key="b"),
    "rank_zero": lambda group: group.only_first(5),
    "execute_rank_zero": lambda group: group.also_only_first(6),
    "all_to_all": lambda group: group.own_value([3], more=[4]),
    "own_mode": lambda group: group.scaled(7),
    "batch": lambda group: group.add(make(3), amount=2.0),
    "rows_multiplied": lambda group: group.twice(make(3)),
    "tensor": lambda group: group.squares(make(3)),
    "function": lambda group: group.apply(lambda data: data.select(batch_keys=["x"]), make(2)),
    "metric": lambda group: group.count(make(3)),
    "only_meta_info": lambda group: group.train(make(3)),
    "future": lambda group: resolve(group.add_later(group.add_later(make(3)))),
    "future_as_such": lambda group: group.takes_a_future(group.add_later(make(3))),
    "not_waiting": lambda group: resolve(group.add.options(blocking=False)(make(2))),
    "started": lambda group: group.add.start(make(3), amount=2.0).get(),
    "started_rank_zero": lambda group: group.only_first.start(5).get(),
    "references": lambda group: resolve(group.rank_later()),
    "coroutine": lambda group: group.slept(0.0),
    "writes": lambda group: group.writes_into(torch.ones(3), {"t": torch.ones(2)}),
    "execute_all": lambda group: resolve(group.execute_all_async("own_value", 5)),
    "execute_sync": lambda group: group.execute_all_sync("not_registered"),
    "rank_zero_sync": lambda group: group.execute_rank_zero_sync("own_value", 9, more=1),
}


def plain(value: object) -> object:
    """A result as comparable Python values."""
    if isinstance(value, DataProto):
        tensors = {} if value.batch is None else {name: tensor.tolist() for name, tensor in value.batch.items()}
        return tensors, {name: list(values) for name, values in value.non_tensor_batch.items()}, value.meta_info
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_the_same_results_as_a_ray_group(sums, ray_local):
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([1], use_gpu=False)
    remote = RayWorkerGroup(pool, RayClassWithInitArgs(Sums, offset=10.0), role="adder")
    try:
        local_results = {name: plain(call(sums)) for name, call in CALLS.items()}
        assert local_results == {name: plain(call(remote)) for name, call in CALLS.items()}
        assert local_results["batch"] == (
            {"y": [12, 13, 14], "rank": [0, 0, 0]},
            {"by": ["rank 0"] * 3},
            {"metrics": {"rows": [3]}, "step": None},
        )
        for wrong in (lambda group: group.ad, lambda group: group.not_registered()):
            messages = []
            for group in (sums, remote):
                with pytest.raises(AttributeError) as info:
                    wrong(group)
                messages.append(str(info.value))
            assert messages[0] == messages[1]
        # what is computed here can go there, and back
        assert remote.add(sums.add_later(make(2))).batch["y"].tolist() == [12, 13]
        assert sums.add(remote.add_later(make(2))).batch["y"].tolist() == [12, 13]
    finally:
        remote.shutdown()
        pool.release()


def test_runs_in_this_process_with_an_environment_of_its_own(sums):
    before = dict(os.environ)
    (answer,) = sums.whoami()
    assert answer["pid"] == os.getpid()
    assert answer["rank"] == (0, 1, 0, 1)
    assert answer["env"]["RANK"] == "0"
    assert answer["env"]["WORLD_SIZE"] == "1"
    assert dict(os.environ) == before


def test_worker_env_while_the_worker_runs():
    group = LocalWorkerGroup(ClassWithInitArgs(Sums), worker_env={"MASTER_PORT": "123"})
    assert group.whoami()[0]["env"]["MASTER_PORT"] == "123"
    assert "MASTER_PORT" not in os.environ


def test_the_original_exception_is_the_cause():
    group = LocalWorkerGroup(ClassWithInitArgs(Trouble))
    with pytest.raises(WorkerError) as info:
        group.fail(0, 0.0, "raise")
    error = info.value
    assert (error.role, error.rank, error.method) == ("trouble", 0, "fail")
    assert isinstance(error.__cause__, ValueError)
    assert traceback.extract_tb(error.__cause__.__traceback__)[-1].name == "fail"  # where a post-mortem lands
    assert "the reward model is on fire" in error.remote_traceback


def test_a_failing_constructor(monkeypatch):
    monkeypatch.setattr(BadConstructor, "rank", 1)
    with pytest.raises(WorkerError) as info:
        LocalWorkerGroup(ClassWithInitArgs(BadConstructor))
    assert info.value.method == "__init__"
    assert isinstance(info.value.__cause__, RuntimeError)


def test_roles_share_the_process():
    both = LocalWorkerGroup(
        ColocatedClasses({"actor": ClassWithInitArgs(Actor), "critic": ClassWithInitArgs(Critic, gamma=0.5)})
    )
    groups = both.spawn({"actor", "critic"})
    assert groups["actor"].pid() == groups["critic"].pid() == [os.getpid()]
    assert both.critic.value() == [0.5]
    assert groups["actor"].workers == [both.workers[0]]
    with pytest.raises(ConfigError, match=r"no role 'reward' in this group; there are \['actor', 'critic'\]"):
        both.spawn(["reward"])
    with pytest.raises(ConfigError, match="through spawn"):
        both.execute_all_sync("act")


def test_meshes_of_one():
    group = LocalWorkerGroup(ClassWithInitArgs(Mesh2x2))
    assert group.flat(make(3)).batch["x"].tolist() == [0, 1, 2]
    assert group.dp_size("flat") == 1
    with pytest.raises(WorkerError, match="mesh 'nowhere' is not registered on rank 0"):
        group.nowhere(make(1))


def test_fields_that_a_worker_adds_stay_with_the_worker():
    data = make(2)
    group = LocalWorkerGroup(ClassWithInitArgs(Producer))
    future = group.produce(data)
    assert isinstance(future, DataProtoFuture)
    assert set(data.batch.keys()) == {"x"}
    assert future.get().batch["x"].tolist() == [100, 101]


def test_direct_methods(sums):
    with pytest.raises(DataError, match="direct calls"):
        sums.direct(1)
    assert sums.workers[0].direct(5) == 5


def test_after_shutdown(sums):
    sums.shutdown()
    with pytest.raises(WorkerError, match="the worker group was shut down"):
        sums.whoami()


def test_not_under_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="the local controller is a single process, but WORLD_SIZE=2"):
        LocalWorkerGroup(ClassWithInitArgs(Sums))


def test_a_name_that_the_group_needs_itself():
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register

    class Clash(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def shutdown(self) -> None:
            """The group has one, too."""

    with pytest.raises(ConfigError, match=r"Clash\.shutdown has the name of a method of LocalWorkerGroup; rename it"):
        LocalWorkerGroup(ClassWithInitArgs(Clash))

"""Registering methods, meshes and pools, without any process."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from tests.single_controller.workers import Sums
from verl import DataProto
from verl.errors import ConfigError
from verl.protocol import Completed, DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs, ColocatedClasses, ResourcePool, Worker, resolve
from verl.single_controller.base.classes import snake_case
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.base.mesh import Mesh
from verl.single_controller.ray.base import rank_environments


def test_base_imports_no_ray():
    code = "import sys, verl.single_controller.base.decorator; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=".")


class TestModes:
    def test_known_names(self):
        names = {mode.name for mode in Dispatch}
        assert names >= {
            "RANK_ZERO",
            "ONE_TO_ALL",
            "ALL_TO_ALL",
            "DP_COMPUTE",
            "DP_COMPUTE_PROTO",
            "DP_COMPUTE_PROTO_WITH_FUNC",
            "DP_COMPUTE_METRIC",
            "DIRECT_ROLLOUT_METHOD",
        }
        assert {mode.name for mode in Execute} == {"ALL", "RANK_ZERO"}
        assert Dispatch["ONE_TO_ALL"] == Dispatch.ONE_TO_ALL != Execute.ALL
        assert pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL)) == Dispatch.ONE_TO_ALL
        with pytest.raises(AttributeError, match="Dispatch has no member 'ONE_TO_MANY'; there are RANK_ZERO"):
            Dispatch.ONE_TO_MANY  # noqa: B018

    def test_execute_functions(self):
        assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
        assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
        with pytest.raises(ConfigError, match="unknown execute mode 'all'"):
            get_predefined_execute_fn("all")

    def test_own_modes(self):
        mode = register_dispatch_mode("OWN_FOR_TEST", dispatch_fn=max, collect_fn=min)
        assert get_predefined_dispatch_fn(Dispatch.OWN_FOR_TEST) == {"dispatch_fn": max, "collect_fn": min}
        update_dispatch_mode(mode, dispatch_fn=min, collect_fn=max)
        assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": min, "collect_fn": max}
        with pytest.raises(ConfigError, match=r"Dispatch\.OWN_FOR_TEST exists already"):
            register_dispatch_mode("OWN_FOR_TEST", max, min)
        with pytest.raises(ConfigError, match="unknown dispatch mode 'nothing'"):
            update_dispatch_mode("nothing", max, min)


class TestRegister:
    def test_keeps_name_docstring_and_signature(self):
        assert Sums.add.__name__ == "add"
        assert Sums.add.__doc__ == "``y = x + amount + offset`` and who computed each row."
        assert getattr(Sums.add, MAGIC_ATTR).dispatch_mode == Dispatch.DP_COMPUTE_PROTO

    def test_the_method_works_on_its_own(self):
        worker = Sums(offset=1.0)
        out = worker.add(DataProto.from_dict({"x": torch.zeros(2)}))
        assert out.batch["y"].tolist() == [2, 2]
        future = DataProtoFuture.concat([Completed(DataProto.from_dict({"x": torch.ones(2)}))])
        assert worker.add(future, amount=3).batch["y"].tolist() == [5, 5]

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"dispatch_mode": "ONE_TO_ALL"}, "unknown dispatch mode 'ONE_TO_ALL'"),
            ({"dispatch_mode": {"dispatch_fn": max}}, "dispatch_mode lacks collect_fn"),
            ({"execute_mode": "ALL"}, "unknown execute mode"),
            (
                {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO, "execute_mode": Execute.RANK_ZERO},
                "splits over all ranks but execute_mode runs rank 0 only",
            ),
        ],
    )
    def test_mistakes(self, arguments, text):
        with pytest.raises(ConfigError, match=text):
            register(**arguments)


class TestMesh:
    def test_collects_in_the_order_of_shards(self):
        mesh = Mesh.of_ranks("m", [(1, False), (0, False), (1, True), (0, True)])
        assert mesh == Mesh(dp_ranks=(1, 0, 1, 0), collect_ranks=(3, 2))
        assert mesh.dp_size == 2

    @pytest.mark.parametrize(
        ("places", "text"),
        [
            ([(0, True), (2, True)], r"data-parallel ranks \[0, 2\] do not count from 0"),
            ([(0, True), (0, True)], r"\(shard: ranks\) \{0: \[0, 1\]\}"),
            ([(0, True), (1, False)], r"\(shard: ranks\) \{1: \[\]\}"),
        ],
    )
    def test_mistakes(self, places, text):
        with pytest.raises(ConfigError, match=text):
            Mesh.of_ranks("m", places)

    def test_registering_twice(self):
        worker = Sums()
        worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
        worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
        with pytest.raises(ConfigError, match=r"registered \(0, True\) before and now \(1, True\)"):
            worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)


class TestPools:
    def test_ranks(self):
        pool = ResourcePool([2, 3])
        assert pool.world_size == 5
        assert pool.local_rank_list() == [0, 1, 0, 1, 2]
        assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
        pool.add_node(1)
        assert pool.store == [2, 3, 1]

    def test_environments_count_local_ranks_by_node(self):
        envs = rank_environments(["n1", "n2", "n1", "n2", "n2"], "10.0.0.1", 29500)
        assert [env["RANK"] for env in envs] == list("01234")
        assert [env["LOCAL_RANK"] for env in envs] == list("00112")
        assert [env["LOCAL_WORLD_SIZE"] for env in envs] == list("23233")
        assert {env["WORLD_SIZE"] for env in envs} == {"5"}
        assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in envs} == {("10.0.0.1", "29500")}


class TestClasses:
    def test_a_class_is_one_role_named_after_it(self):
        item = ClassWithInitArgs(Sums, offset=2.0)
        assert item.roles() == {"sums": item}
        assert item.roles("actor") == {"actor": item}
        assert item().offset == 2.0

    @pytest.mark.parametrize(
        ("name", "role"),
        [
            ("ActorRolloutRefWorker", "actor_rollout_ref"),
            ("Critic", "critic"),
            ("RMWorker", "rm"),
            ("Worker", "worker"),
        ],
    )
    def test_role_names(self, name, role):
        assert snake_case(name) == role

    def test_no_roles(self):
        with pytest.raises(ConfigError, match="class_dict is empty"):
            ColocatedClasses({})

    def test_a_worker_alone_is_rank_zero_of_one(self, monkeypatch):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        worker = Worker()
        assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)


def test_resolve_takes_anything():
    assert resolve(5) == 5
    assert resolve([1, 2]) == [1, 2]
    assert resolve([]) == []
    assert resolve(Completed(3)) == 3
    assert resolve([Completed(3), Completed(4)]) == [3, 4]
    data = DataProto.from_dict({"x": torch.zeros(1)})
    assert len(resolve(DataProtoFuture.concat([Completed(data), Completed(data)]))) == 2

"""Worker groups on real Ray: dispatch, futures, meshes, colocation, failures."""

from __future__ import annotations

import gc
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator

import pytest
import ray
import torch

from tests.single_controller.workers import (
    Actor,
    BadConstructor,
    Collective,
    Consumer,
    Counted,
    Critic,
    Mesh2x2,
    Producer,
    Sums,
    Trouble,
)
from verl import DataProto
from verl.errors import ConfigError, DataError, WorkerError
from verl.protocol import DataProtoFuture
from verl.single_controller.base import resolve
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    merge_resource_pool,
    split_resource_pool,
)

pytestmark = pytest.mark.usefixtures("ray_local")


def make(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(float(rows))}, {"uid": [f"u{i}" for i in range(rows)]})


def pool_of(*processes: int, **kwargs: object) -> RayResourcePool:
    return RayResourcePool(list(processes), use_gpu=False, **kwargs)


@pytest.fixture(scope="module")
def pool(ray_local: None) -> Iterator[RayResourcePool]:
    """Two processes' worth of resources, shared by most groups here."""
    pool = pool_of(2)
    yield pool
    pool.release()


@pytest.fixture(scope="module")
def everyone(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    """Two processes with a role for each subject, because starting processes is what takes the time here."""
    classes = {
        "adder": RayClassWithInitArgs(ray.remote(Sums), offset=10.0),
        "actor_rollout_ref": RayClassWithInitArgs(Trouble),
        "producer": RayClassWithInitArgs(Producer),
        "collective": RayClassWithInitArgs(Collective),
        "actor": RayClassWithInitArgs(Actor),
        "critic": RayClassWithInitArgs(Critic, gamma=0.5),
    }
    env = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(classes), worker_env=env)
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def sums(everyone: RayWorkerGroup) -> RayWorkerGroup:
    return everyone.spawn({"adder"})["adder"]


@pytest.fixture(scope="module")
def trouble(everyone: RayWorkerGroup) -> RayWorkerGroup:
    """A group whose workers raise but live on."""
    return everyone.spawn({"actor_rollout_ref"})["actor_rollout_ref"]


@pytest.fixture(scope="module")
def gloo(everyone: RayWorkerGroup) -> RayWorkerGroup:
    return everyone.spawn({"collective"})["collective"]


@pytest.fixture(scope="module")
def mesh(ray_local: None) -> Iterator[RayWorkerGroup]:
    """Four processes in a pool made of two."""
    pools = [pool_of(2), pool_of(2)]
    group = RayWorkerGroup(merge_resource_pool(*pools), RayClassWithInitArgs(Mesh2x2))
    yield group
    group.shutdown()
    for pool in pools:
        pool.release()


@pytest.fixture(scope="module")
def keeper(ray_local: None) -> Iterator[RayWorkerGroup]:
    """A detached group, attached to after the one that started it is gone."""
    pool = pool_of(2, detached=True)
    classes = {"sums": RayClassWithInitArgs(Sums, offset=1.0), "consumer": RayClassWithInitArgs(Consumer)}
    started = RayWorkerGroup(pool, create_colocated_worker_cls_fused(classes), detached=True, name_prefix="keeper")
    pids = started.process_ids
    del started
    gc.collect()
    group = RayWorkerGroup.from_detached(name_prefix="keeper")
    assert group.process_ids == pids
    yield group
    group.shutdown()
    pool.release()


@pytest.fixture
def doomed(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    """A group for one test, which kills it."""
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Trouble))
    yield group
    group.shutdown()


class TestEnvironment:
    def test_rank_and_meeting_point_are_known_to_the_constructor(self, sums):
        answers = sums.whoami()
        assert [answer["rank"] for answer in answers] == [(0, 2, 0, 2), (1, 2, 1, 2)]
        for rank, env in enumerate(answer["env"] for answer in answers):
            assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
            assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert answers[0]["env"]["MASTER_ADDR"] == answers[1]["env"]["MASTER_ADDR"]
        assert 1024 <= int(answers[0]["env"]["MASTER_PORT"]) == int(answers[1]["env"]["MASTER_PORT"])
        assert [answer["pid"] for answer in answers] == sums.process_ids
        assert os.getpid() not in sums.process_ids

    def test_worker_env_reaches_the_process_before_torch(self, sums):
        assert [answer["threads"] for answer in sums.whoami()] == [("2", 2)] * 2


class TestDispatch:
    def test_one_to_all(self, sums):
        assert sums.shapes([1, 2], key="b") == [("list", "b", 0), ("list", "b", 1)]

    def test_rank_zero(self, sums):
        assert sums.only_first(5) == (0, 5)
        assert sums.also_only_first(6) == (0, 6)

    def test_all_to_all(self, sums):
        assert sums.own_value([3, 4]) == [(0, 3), (1, 4)]
        assert sums.own_value([3, 4], more=[10, 20]) == [(0, 13), (1, 24)]
        with pytest.raises(DataError, match="a list with one value for each of the 2 ranks, got 3 values"):
            sums.own_value([1, 2, 3])

    def test_own_mode(self, sums):
        assert sums.scaled(7) == 7

    @pytest.mark.parametrize("rows", [2, 4, 5, 1])
    def test_batches_are_split_and_joined_with_invisible_padding(self, sums, rows):
        data = make(rows)
        data.meta_info["step"] = 3
        out = sums.add(data, amount=2.0)
        assert out.batch["y"].tolist() == [i + 12.0 for i in range(rows)]
        half = -(-rows // 2)
        assert out.batch["rank"].tolist() == [0] * half + [1] * (rows - half)
        assert list(out.non_tensor_batch["by"]) == ["rank 0"] * half + ["rank 1"] * (rows - half)
        assert out.meta_info == {"metrics": {"rows": [half, half]}, "step": 3}

    def test_padding_of_a_method_that_multiplies_rows(self, sums):
        assert sums.twice(make(3)).batch["x"].tolist() == [0, 0, 1, 1, 2, 2]

    def test_padding_of_a_method_that_returns_a_tensor(self, sums):
        assert sums.squares(make(3)).tolist() == [0, 1, 4]

    def test_padding_that_cannot_be_taken_out_is_an_error(self, sums):
        assert sums.first_row_only(make(4)).batch["x"].tolist() == [0, 2]
        with pytest.raises(WorkerError, match=r"first_row_only\(\) returned 1 rows for 2 rows, 1 of them padding"):
            sums.first_row_only(make(3))

    def test_training_methods_refuse_padding(self, sums):
        assert sums.train(make(4)).meta_info == {"metrics": {"rows": [2, 2]}}
        with pytest.raises(DataError, match="5 rows do not divide over 2 ranks and padding is off"):
            sums.train(make(5))

    def test_function_for_all(self, sums):
        assert sums.apply(lambda data: data.select(batch_keys=["x"]), make(3)).batch["x"].tolist() == [0, 1, 2]
        with pytest.raises(DataError, match="first argument of this method is a function"):
            sums.apply(3, make(2))

    def test_metrics_of_each_rank(self, sums):
        assert sums.count(make(3)) == [{"rows": 2, "padding": 0}, {"rows": 2, "padding": 1}]

    def test_direct_methods(self, sums):
        with pytest.raises(DataError, match="for direct calls to one worker"):
            sums.direct(1)
        assert resolve(sums.workers[1].verl_call.remote("adder", "direct", True, 5)) == 6

    def test_coroutines(self, sums):
        assert sums.slept(0.01) == [0, 1]

    def test_what_arrives_may_be_written_to(self, sums):
        ones, twos = torch.ones(1000, 1000), torch.full((1000, 1000), 2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sums.writes_into(ones, {"t": twos}) == [(2e6, 4e6)] * 2
        assert ones.sum() == 1e6

    def test_execute(self, sums):
        assert sums.execute_all_sync("not_registered") == [0, 1]
        assert sums.execute_all_sync("own_value", [5, 6]) == [(0, 5), (1, 6)]
        assert sums.execute_all_sync("own_value", 5) == [(0, 5), (1, 5)]
        assert ray.get(sums.execute_all_async("own_value", [1, 2], more=[3, 4])) == [(0, 4), (1, 6)]
        assert sums.execute_rank_zero_sync("own_value", 9, more=1) == (0, 10)
        assert ray.get(sums.execute_rank_zero_async("not_registered")) == 0

    def test_shared_arguments_go_into_the_store_once(self, sums, monkeypatch):
        put = ray.put
        stored = []
        monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
        sums.shapes(torch.zeros(10))
        assert len(stored) == 1
        sums.shapes("short text", key="k")
        sums.add(make(4))
        assert len(stored) == 1


class TestMethods:
    def test_look_like_the_workers_methods(self, sums):
        assert sums.add.__name__ == "add"
        assert sums.add.__doc__ == Sums.add.__doc__ == "``y = x + amount + offset`` and who computed each row."
        assert str(sums.add.__signature__) == "(data: 'DataProto', amount: 'float' = 1.0) -> 'DataProto'"
        assert repr(sums) == "RayWorkerGroup('adder', world_size=2)"

    def test_unknown_methods_name_close_ones(self, sums):
        with pytest.raises(AttributeError, match="'adder' has no method 'ad'; did you mean 'add'"):
            sums.ad  # noqa: B018
        with pytest.raises(AttributeError, match=r"Sums\.not_registered is not decorated with @register"):
            sums.not_registered()

    def test_wrong_arguments_are_refused_before_anything_is_sent(self, sums):
        with pytest.raises(TypeError, match=r"adder\.add\(data.*unexpected keyword argument 'amout'"):
            sums.add(make(2), amout=3)


class TestFutures:
    def test_a_blocking_method_can_be_called_without_waiting(self, sums):
        future = sums.add.options(blocking=False)(make(3))
        assert isinstance(future, DataProtoFuture)
        assert resolve(future).batch["y"].tolist() == [11, 12, 13]

    def test_started_calls_of_groups_with_processes_of_their_own_run_side_by_side(self, sums, keeper):
        sums.slept(0.0), keeper.sums.slept(0.0)
        begin = time.monotonic()
        calls = [sums.slept.start(1.0), keeper.sums.slept.start(1.0)]
        assert [call.get() for call in calls] == [[0, 1], [0, 1]]
        assert time.monotonic() - begin < 1.8

    def test_started_calls_may_be_waited_for_in_any_order(self, sums):
        first, second = sums.add.start(make(4)), sums.add.start(make(4), amount=2.0)
        assert second.get().batch["y"].tolist() == [12, 13, 14, 15]
        assert first.get().batch["y"].tolist() == [11, 12, 13, 14]

    def test_a_started_call_that_fails_says_so_when_it_is_waited_for(self, trouble):
        call = trouble.fail.start(1, 0.0, "raise")
        assert trouble.fine() == [0, 1]
        with pytest.raises(WorkerError, match="the reward model is on fire"):
            call.get()

    def test_references_of_all_ranks(self, sums):
        assert resolve(sums.rank_later()) == [0, 1]

    @pytest.mark.parametrize("rows", [4, 5])
    def test_chains(self, sums, rows):
        out = sums.add_later(sums.add_later(sums.add_later(make(rows)))).get()
        assert out.batch["x"].tolist() == [i + 3.0 for i in range(rows)]

    def test_a_method_may_take_the_future_itself(self, sums):
        assert sums.takes_a_future(sums.add_later(make(3))).batch["x"].tolist() == [1, 2, 3]

    def test_shards_go_from_worker_to_worker(self, everyone, keeper):
        os.environ.pop("COUNTED", None)
        future = everyone.producer.produce(make(4))
        out = keeper.consumer.consume(future)
        assert out.batch["x"].tolist() == [100, 101, 102, 103]
        # each consumer unpickled its own two rows, the controller none
        assert list(out.non_tensor_batch["count"]) == [2, 2, 2, 2]
        assert sorted(set(out.non_tensor_batch["pid"])) == sorted(keeper.process_ids)
        assert "COUNTED" not in os.environ
        rows = future.get().non_tensor_batch["counted"]
        assert os.environ.pop("COUNTED") == "4"
        assert all(isinstance(row[0], Counted) for row in rows)
        assert sorted({row[1] for row in rows}) == sorted(everyone.process_ids)


class TestMeshes:
    def test_each_shard_goes_to_its_ranks_and_comes_back_from_one(self, mesh):
        out = mesh.train(make(5), scale=2.0)
        assert out.batch["y"].tolist() == [0, 2, 4, 6, 8]
        assert out.batch["rank"].tolist() == [3, 3, 3, 2, 2]
        assert mesh.dp_size("train") == 2

    def test_results_that_nobody_uses_stay_in_their_process(self, mesh):
        assert mesh.dp_size("train") == 2  # asked once; the answers are no results
        results = []
        fetch = mesh._fetch
        mesh._fetch = lambda references, method, timeout_s, **kw: (
            results.extend(fetch(references, method, timeout_s, **kw)) or list(results)
        )
        try:
            mesh.train(make(4))
        finally:
            del mesh._fetch
        assert [result is None for result in results] == [True, True, False, False]

    def test_another_mesh_of_the_same_role(self, mesh):
        assert mesh.flat(make(4)).batch["rank"].tolist() == [0, 1, 2, 3]
        assert mesh.dp_size("flat") == 4

    def test_one_object_per_shard_in_the_store(self, mesh, monkeypatch):
        mesh.dp_size("train")
        put = ray.put
        stored = []
        monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
        mesh.train(make(4))
        assert [len(shard) for shard in stored] == [2, 2]

    @pytest.mark.parametrize("rows", [4, 5])
    def test_futures_between_meshes_of_different_sizes(self, mesh, rows):
        later = mesh.train_later(make(rows))
        assert len(later.futures) == 2
        assert mesh.train(later).batch["y"].tolist() == [i + 1.0 for i in range(rows)]
        assert mesh.flat(later).batch["x"].tolist() == [i + 1.0 for i in range(rows)]

    def test_a_mesh_that_nobody_registered(self, mesh):
        with pytest.raises(WorkerError, match="mesh 'nowhere' is not registered on rank"):
            mesh.nowhere(make(4))

    def test_a_mesh_without_a_collecting_rank(self, mesh):
        with pytest.raises(ConfigError, match=r"one rank with is_collect=True, found .* \{0: \[\], 1: \[\]\}"):
            mesh.deaf(make(4))


class TestColocation:
    def test_roles_share_processes(self, everyone):
        groups = everyone.spawn({"actor", "critic"})
        assert groups["actor"].pid() == groups["critic"].pid() == everyone.process_ids
        assert groups["actor"].act() == ["actor 0", "actor 1"]
        assert groups["critic"].value() == [0.5, 0.5]
        assert groups["critic"].role == "critic"

    def test_roles_are_attributes(self, everyone, keeper):
        assert everyone.actor.act() == ["actor 0", "actor 1"]
        keeper.fuse(["sums"])
        assert keeper.sums.own_value([1, 2]) == [(0, 1), (1, 2)]

    def test_mistakes(self, everyone):
        with pytest.raises(ConfigError, match=r"no role 'reward' in this group; there are \['adder'"):
            everyone.spawn({"reward"})
        with pytest.raises(AttributeError, match="holds the roles adder, .*; use spawn"):
            everyone.act()
        with pytest.raises(AttributeError, match="'critic' has no method 'act'"):
            everyone.critic.act()
        with pytest.raises(ConfigError, match="call one of them through spawn"):
            everyone.execute_all_sync("act")


class TestDetached:
    def test_found_again(self, keeper):
        assert keeper.sums.add(make(3)).batch["y"].tolist() == [2, 3, 4]
        names = keeper.worker_names
        assert RayWorkerGroup.from_detached(worker_names=names[::-1]).worker_names == names
        with pytest.raises(ConfigError, match=r"have the ranks \[1\]; name all of a group"):
            RayWorkerGroup.from_detached(worker_names=names[1:])
        with pytest.raises(ConfigError, match="the detached workers hold"):
            RayWorkerGroup.from_detached(name_prefix="keeper", ray_cls_with_init=RayClassWithInitArgs(Actor))

    def test_unknown(self):
        with pytest.raises(ConfigError, match="no detached worker named 'nobody:0'"):
            RayWorkerGroup.from_detached(worker_names=["nobody:0"])
        with pytest.raises(ConfigError, match="no detached workers with prefix 'nobody'"):
            RayWorkerGroup.from_detached(name_prefix="nobody")

    def test_resources_that_end_with_us(self, pool, sums):
        with pytest.raises(ConfigError, match=r"RayResourcePool\(detached=True\)"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Sums), detached=True)


class TestFailures:
    def test_wrong_input_is_one_sentence_however_many_ranks_say_it(self, trouble):
        with pytest.raises(ConfigError) as info:
            trouble.all_refuse()
        assert re.fullmatch(
            r"model.path=here: is no model \(told by worker 'actor_rollout_ref' rank [01] in all_refuse\(\)\)",
            str(info.value),
        )

    def test_a_raising_worker_is_reported_while_others_are_busy(self, trouble):
        start = time.monotonic()
        with pytest.raises(WorkerError) as info:
            trouble.fail(1, 10.0, "raise")
        assert time.monotonic() - start < 8
        error = info.value
        assert (error.role, error.rank, error.method) == ("actor_rollout_ref", 1, "fail")
        assert "ValueError: the reward model is on fire" in error.remote_traceback
        assert "workers.py" in error.remote_traceback
        assert "rank 1 failed in fail()" in str(error)

    def test_a_dying_worker_is_reported_while_others_are_busy(self, doomed):
        pids = doomed.process_ids
        start = time.monotonic()
        with pytest.raises(WorkerError) as info:
            doomed.fail(1, 60.0, "kill")
        assert time.monotonic() - start < 10
        assert (info.value.role, info.value.rank, info.value.method) == ("trouble", 1, "fail")
        assert "the worker process died" in info.value.remote_traceback
        assert "Worker exit" in info.value.remote_traceback
        with pytest.raises(WorkerError, match="rank 1 failed in fine"):
            doomed.fine()
        # rank 0 is asleep for a minute: shutdown does not wait for it
        doomed.shutdown()
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    def test_the_death_is_reported_before_what_it_caused(self, doomed):
        assert resolve(doomed.workers[1].fine.remote()) == 1  # a single role's methods are the actor's own
        with pytest.raises(WorkerError) as info:
            doomed.raise_then_die()
        assert info.value.rank == 1
        assert "the worker process died" in str(info.value)
        assert "rank 0: ConnectionError: connection closed by peer" in str(info.value)

    def test_a_group_goes_on_after_an_exception(self, trouble):
        with pytest.raises(WorkerError, match="cannot be pickled"):
            trouble.fail(0, 0.0, "unpicklable")
        assert trouble.fine() == [0, 1]

    def test_a_time_limit(self, trouble):
        with pytest.raises(WorkerError, match=r"no result from ranks \[0, 1\] within 0.5 s; they still run"):
            trouble.fail.options(timeout_s=0.5)(5, 3.0, "raise")
        assert trouble.fine() == [0, 1]

    def test_the_limit_of_all_calls_names_its_key(self, trouble):
        limited = RayWorkerGroup(
            _processes=trouble._processes, role=trouble.role, timeout_s=0.5, timeout_key="trainer.worker_timeout_s"
        )
        limited = limited.spawn([trouble.role])[trouble.role]
        with pytest.raises(WorkerError) as info:
            limited.fail(5, 3.0, "raise")
        assert str(info.value) == (
            "worker 'actor_rollout_ref' rank 0 failed in fail():\nno result from ranks [0, 1] within 0.5 s; they still "
            "run; if they are only slow, raise trainer.worker_timeout_s"
        )
        with pytest.raises(WorkerError, match=r"within 0.25 s; they still run$"):  # another limit, which no key set
            limited.fail.options(timeout_s=0.25)(5, 0.0, "raise")
        assert trouble.fine() == [0, 1]

    def test_a_long_wait_says_for_whom(self, trouble, caplog, monkeypatch):
        monkeypatch.setattr("verl.single_controller.ray.base.REPORT_S", 0.3)
        with caplog.at_level(logging.WARNING, logger="verl"), pytest.raises(WorkerError, match="within 1 s"):
            trouble.fail.options(timeout_s=1.0)(5, 2.0, "raise")
        reports = [record for record in caplog.messages if "ranks [0, 1] are in fail() for 0:0" in record]
        assert len(reports) >= 2
        assert trouble.fine() == [0, 1]

    def test_failures_of_futures(self, trouble):
        failed = trouble.fail_later(make(2))
        with pytest.raises(WorkerError) as info:
            failed.get()
        assert info.value.rank in (0, 1)  # both fail; the first to arrive is reported
        assert info.value.method == "fail_later"
        with pytest.raises(WorkerError, match="no such key") as info:
            trouble.pass_on(trouble.fail_later(make(2))).get()
        assert info.value.method == "fail_later"  # where it began, not where it arrived
        assert trouble.fine() == [0, 1]

    def test_a_failing_constructor(self, pool):
        # processes start slowly on a busy machine; whoever only waits until time is up waits 300 s, for another error
        start = time.monotonic()
        with pytest.raises(WorkerError) as info:
            RayWorkerGroup(pool, RayClassWithInitArgs(BadConstructor))
        assert time.monotonic() - start < 120
        assert (info.value.role, info.value.rank, info.value.method) == ("bad_constructor", 1, "__init__")
        assert "RuntimeError: weights not found" in info.value.remote_traceback


class TestResources:
    @pytest.mark.parametrize(
        ("pool", "text"),
        [
            (RayResourcePool([2]), r"process_on_nodes=\[2\] asks for 2 GPUs, the Ray cluster has 0"),
            (pool_of(1, 1), r"asks for 2 nodes, the Ray cluster has 1; set trainer\.nnodes"),
            (RayResourcePool([1], accelerator_type="H100"), "asks for 1 nodes with H100 GPUs, the Ray cluster has 0"),
            (RayResourcePool([]), "the resource pool is empty"),
        ],
    )
    def test_what_cannot_come_is_refused_at_once(self, pool, text):
        start = time.monotonic()
        with pytest.raises(ConfigError, match=text):
            RayWorkerGroup(pool, RayClassWithInitArgs(Sums))
        assert time.monotonic() - start < 2

    def test_what_is_in_use_is_waited_for_and_then_named(self):
        greedy = pool_of(1, max_colocate_count=100_000, placement_timeout_s=0.5)
        with pytest.raises(ConfigError, match=r"no place for node 0 .* within 0\.5 s: each process asks for .* CPU 8"):
            greedy.get_placement_groups()

    def test_more_processes_than_cores(self):
        many = pool_of(64)
        assert len(many.get_placement_groups()) == 1
        assert many.world_size == 64
        many.release()

    def test_too_many_groups_in_a_pool(self):
        small = pool_of(1, max_colocate_count=1)
        small.claim("the first")
        with pytest.raises(ConfigError, match="shared by max_colocate_count=1 worker groups already"):
            RayWorkerGroup(small, RayClassWithInitArgs(Actor))
        small.unclaim("the first")
        small.claim("the next")
        small.release()

    def test_split_and_merge(self, mesh):
        whole = pool_of(3)
        one, two = split_resource_pool(whole, [1, 2])
        assert (one.world_size, two.world_size) == (1, 2)
        assert one.slots() + two.slots() == whole.slots()
        assert [part.world_size for part in split_resource_pool(whole, 1)] == [1, 1, 1]
        with pytest.raises(ConfigError, match="split_size=2 does not divide a pool of 3 processes"):
            split_resource_pool(whole, 2)
        assert merge_resource_pool(two, one).slots() == two.slots() + one.slots()
        with pytest.raises(ConfigError, match="differ in max_colocate_count: 10 and 2"):
            merge_resource_pool(whole, pool_of(1, max_colocate_count=2))
        whole.release()
        # ranks of merged pools on one node still have local ranks of their own
        assert mesh.execute_all_sync("where") == [(rank, 4, rank, 4) for rank in range(4)]

    @pytest.mark.parametrize("counts", [[0], [-1], [True]])
    def test_empty_nodes(self, counts):
        with pytest.raises(ConfigError, match="each node needs at least one process"):
            pool_of(*counts)

    def test_a_new_group_needs_a_pool_and_a_class(self):
        with pytest.raises(ConfigError, match="needs a resource_pool and a ray_cls_with_init"):
            RayWorkerGroup()

    def test_device_and_pool_disagree(self, pool):
        with pytest.raises(ConfigError, match="device_name='cuda' but the pool has use_gpu=False"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Sums), device_name="cuda")


class TestCollectives:
    def test_a_process_group_from_the_environment(self, gloo):
        assert gloo.all_reduce() == [3.0, 3.0]

    def test_a_stuck_collective_names_the_call_and_the_ranks_that_are_late(self, gloo):
        with pytest.raises(WorkerError, match=r"(?s)rank 0 failed in all_reduce_without_rank_1.*Timed out.*") as caught:
            gloo.all_reduce_without_rank_1()
        assert "ranks [1] are still in all_reduce_without_rank_1()" in str(caught.value)

    def test_all_gather(self, gloo):
        data = make(5)
        data.batch["m"] = torch.arange(5, dtype=torch.bfloat16)
        parts = [data[:2], data[2:]]
        for out in gloo.gather(parts):
            assert out.batch["x"].tolist() == [0, 1, 2, 3, 4]
            assert out.batch["m"].tolist() == [0, 1, 2, 3, 4]
            assert list(out.non_tensor_batch["uid"]) == ["u0", "u1", "u2", "u3", "u4"]

    def test_all_gather_of_different_fields_fails_everywhere(self, gloo):
        errors = gloo.gather_error([make(2), make(2).select(batch_keys=[])])
        assert all(error.startswith("SchemaError: all_gather: rank") for error in errors)

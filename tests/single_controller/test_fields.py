"""Fields go to the workers once, whatever reads them later, in this process and in others."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator

import pytest
import torch

from tests.single_controller.workers import Reader
from verl import DataProto
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.transport import compact, nbytes


def make(rows: int = 8) -> DataProto:
    tensors = {"ids": torch.arange(rows * 3).reshape(rows, 3) * 100, "mask": torch.ones(rows, 3, dtype=torch.int64)}
    return DataProto.from_dict(tensors, {"tag": [f"t{i}" for i in range(rows)]}, {"note": "kept"})


@pytest.fixture(scope="module")
def readers(ray_local: None) -> Iterator[RayWorkerGroup]:
    """Four processes, two shards."""
    pool = RayResourcePool([4], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Reader))
    yield group
    group.shutdown()
    pool.release()


def sums(group: WorkerGroup, batch: DataProto, *names: str, **kwargs: float) -> torch.Tensor:
    out = group.total(batch.select(batch_keys=names), **kwargs)
    assert list(out.non_tensor_batch["tag"]) == list(batch.non_tensor_batch["tag"])
    return out.batch["sum"]


def test_every_field_is_put_once_and_results_never(readers: RayWorkerGroup) -> None:
    batch, before = make(), vars(readers.traffic).copy()
    result = readers.double(batch)
    assert list(result.non_tensor_batch["who"]) == [2, 2, 2, 2, 0, 0, 0, 0]
    traffic = readers.traffic
    # two fields of two shards, one object for each shard, whatever the number of its ranks
    assert (traffic.fields - before["fields"], traffic.objects - before["objects"]) == (4, 2)
    # ids to 2,300 in 16 bits and a mask in 8: 3 bytes a place instead of 16
    assert traffic.sent_bytes - before["sent_bytes"] == 8 * 3 * 3
    batch.union(DataProto.from_dict(dict(result.batch.items())))

    sent, reused = traffic.fields, traffic.reused_bytes
    ids, mask = batch.batch["ids"].double(), batch.batch["mask"].double()
    assert torch.equal(sums(readers, batch, "ids", "mask"), ids + mask)  # not the 7s that the workers wrote
    assert torch.equal(sums(readers, batch, "mask2", "ids2", scale=0.5), ids + mask)
    assert traffic.fields == sent
    assert traffic.reused_bytes - reused == 4 * 8 * 3 * 8
    batch.batch["more"] = torch.rand(8, 3)
    assert torch.equal(sums(readers, batch, "more", "ids"), batch.batch["more"].double() + ids)
    assert traffic.fields == sent + 2


def test_results_of_started_calls_are_not_sent_again(readers: RayWorkerGroup) -> None:
    batch, traffic = make(), readers.traffic
    batch.union(readers.double.start(batch).get())
    sent = traffic.fields
    assert torch.equal(sums(readers, batch, "ids2"), batch.batch["ids"].double() * 2)
    assert traffic.fields == sent


def test_what_changed_is_sent_again(readers: RayWorkerGroup) -> None:
    batch = make()
    first = sums(readers, batch, "mask")
    batch.batch["mask"][5] = 0
    assert torch.equal(sums(readers, batch, "mask"), first * torch.tensor([1] * 5 + [0] + [1] * 2)[:, None])
    # other rows, other tensors
    assert torch.equal(sums(readers, batch.select_idxs([1, 0, 3, 2]), "ids"), batch.batch["ids"][[1, 0, 3, 2]].double())
    assert torch.equal(sums(readers, batch.slice(2, 6), "ids"), batch.batch["ids"][2:6].double())
    del batch
    gc.collect()
    for value in range(5):  # memory that is used again is not taken for what lay there before
        fresh = DataProto.from_dict({"x": torch.full((8, 3), value)}, {"tag": [""] * 8}, {"note": "kept"})
        assert torch.equal(sums(readers, fresh, "x"), torch.full((8, 3), float(value)).double())


def test_references_end_with_the_batch(readers: RayWorkerGroup) -> None:
    places = readers._processes.fields._places
    gc.collect()
    before = len(places)
    batch = make()
    readers.double(batch)
    assert len(places) == before + 2
    del batch
    gc.collect()
    assert len(places) == before


def test_rows_that_do_not_divide_are_padded_and_right(readers: RayWorkerGroup) -> None:
    batch = make(7)
    batch.meta_info["_auto_padding"] = True
    out = readers.double(batch)
    assert torch.equal(out.batch["ids2"], batch.batch["ids"] * 2)
    batch.union(DataProto.from_dict(dict(out.batch.items())))
    assert torch.equal(sums(readers, batch, "ids2"), batch.batch["ids"].double() * 2)


def test_a_picture_is_put_once_whatever_reads_it_and_in_whatever_order(readers: RayWorkerGroup) -> None:
    small, first, second, more = torch.ones(4), torch.rand(5000), torch.rand(6000), torch.rand(7000)
    one = {"pixels": [first], "grid": torch.tensor([1])}
    two = {"pixels": [second, small], "grid": torch.tensor([2])}
    three = {"pixels": [first, more], "grid": torch.tensor([3])}
    column = [one, one, two, None, two, one, one, three]
    batch = DataProto.from_dict({"ids": torch.arange(8)[:, None]}, {"shown": column})
    totals = [0.0 if x is None else float(torch.cat(x["pixels"]).sum()) + float(x["grid"].sum()) for x in column]
    want = torch.tensor(totals) + torch.arange(8)
    traffic, before = readers.traffic, vars(readers.traffic).copy()

    out = readers.look(batch)  # a method that takes fields with the call
    torch.testing.assert_close(out.batch["sum"], want)
    assert list(out.non_tensor_batch["different"]) == [2] * 4 + [3] * 4  # rows share them as before
    pictures = 4 * (5000 + 6000 + 7000)
    assert (traffic.fields - before["fields"], traffic.sent_bytes - before["sent_bytes"]) == (3, pictures)

    order = torch.tensor([7, 2, 0, 3, 5, 4, 1, 6])
    mixed = batch.select_idxs(order)
    torch.testing.assert_close(readers.look_again(mixed).batch["sum"], want[order])
    torch.testing.assert_close(readers.look_again(mixed).batch["sum"], want[order])
    assert traffic.sent_bytes - before["sent_bytes"] == pictures + 8  # the ids in a byte each
    first.add_(1.0)  # what changed is sent again
    torch.testing.assert_close(readers.look(batch).batch["sum"][0], want[0] + 5000)
    assert traffic.sent_bytes - before["sent_bytes"] == pictures + 8 + 4 * 5000


def test_dtypes_arrive_as_they_were(readers: RayWorkerGroup) -> None:
    tensors = {
        "int64": torch.tensor([[0, 2**40]] * 4),
        "int32": torch.tensor([[-5, 300]] * 4, dtype=torch.int32),
        "uint8": torch.tensor([[1, 255]] * 4, dtype=torch.uint8),
        "bool": torch.tensor([[True, False]] * 4),
        "half": torch.tensor([[0.5, -1.0]] * 4, dtype=torch.bfloat16),
    }
    batch = DataProto.from_dict(tensors, {"tag": [""] * 4}, {"note": "kept"})
    out = readers.total(batch)
    assert out.non_tensor_batch["fields"][0] == {name: str(value.dtype) for name, value in tensors.items()}
    assert torch.equal(out.batch["sum"], sum(value.double() for value in tensors.values()))


def test_in_one_process_nothing_is_copied() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(LocalReader))
    batch = make()
    assert group.pointers(batch) == [{name: value.data_ptr() for name, value in batch.batch.items()}]


class LocalReader(Reader):
    """The same alone."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("pairs", dp_rank=0, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"), reuse_fields=True)
    def pointers(self, data: DataProto) -> dict[str, int]:
        return {name: value.data_ptr() for name, value in data.batch.items()}


@pytest.mark.parametrize(
    ("values", "size"),
    [([0, 255], 1), ([0, 256], 2), ([-1, 3], 2), ([-(2**15) - 1, 0], 4), ([2**31, 0], 8), ([2**31 - 1, -(2**31)], 4)],
)
def test_integers_travel_in_the_smallest_type(values: list[int], size: int) -> None:
    tensor = torch.tensor(values)
    packed = compact(tensor)
    assert nbytes(packed) == 2 * size
    back = pickle.loads(pickle.dumps(packed))
    assert back.dtype == torch.int64
    assert torch.equal(back, tensor)
    back.zero_()  # writable


def test_views_and_odd_tensors_travel_whole() -> None:
    whole = torch.arange(12).reshape(3, 4)
    for tensor in (whole[:, 1:3], whole.t(), torch.zeros(0, 4, dtype=torch.int64), torch.tensor(3), torch.rand(2)[::2]):
        assert torch.equal(pickle.loads(pickle.dumps(compact(tensor))), tensor)

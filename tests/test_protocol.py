"""The batch: rows, fields, pickles, and the laws that splitting and joining obey."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl import DataProto
from verl.errors import DataError, SchemaError
from verl.protocol import (
    Completed,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    collect_shards,
    deserialize_tensordict,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    serialize_tensordict,
    split_with_padding,
    strip_padding,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from verl.utils.metrics import MetricSet, mmax, mmean


def make(rows: int = 6, **meta: object) -> DataProto:
    """``x`` (B,2) counts up, ``m`` is bfloat16, ``uid`` is a text."""
    return DataProto.from_dict(
        {"x": torch.arange(rows * 2).reshape(rows, 2), "m": torch.arange(rows, dtype=torch.bfloat16)},
        {"uid": [f"u{i}" for i in range(rows)]},
        dict(meta),
    )


def uids(data: DataProto) -> list[str]:
    return list(data.non_tensor_batch["uid"])


def assert_rows(data: DataProto, numbers: list[int]) -> None:
    """``data`` holds these rows of :func:`make` in this order."""
    assert uids(data) == [f"u{i}" for i in numbers]
    assert data.batch["x"].tolist() == [[2 * i, 2 * i + 1] for i in numbers]
    assert data.batch["m"].tolist() == [float(i) for i in numbers]
    assert len(data) == len(numbers)


class TestConstruction:
    def test_a_light_import(self):
        code = "import sys, verl; assert not {'torch', 'ray'} & sys.modules.keys(); assert verl.__version__"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "."})

    def test_lists_become_object_arrays_of_rows_not_of_columns(self):
        data = DataProto.from_dict(non_tensors={"ids": [[1, 2], [3, 4], [5, 6]]})
        assert data.non_tensor_batch["ids"].shape == (3,)
        assert data.non_tensor_batch["ids"][1] == [3, 4]

    def test_fixed_width_strings_become_objects_so_that_longer_ones_fit(self):
        data = DataProto.from_dict(non_tensors={"uid": np.array(["a", "b"])})
        data.non_tensor_batch["uid"][0] = "longer"
        assert uids(data) == ["longer", "b"]

    def test_from_single_dict_sorts_values_by_kind(self):
        data = DataProto.from_single_dict({"x": torch.zeros(2, 3), "uid": ["a", "b"]}, meta_info={"step": 4})
        assert set(data.batch.keys()) == {"x"}
        assert uids(data) == ["a", "b"]
        assert data.meta_info == {"step": 4}

    @pytest.mark.parametrize(
        ("tensors", "non_tensors", "text"),
        [
            ({"x": torch.zeros(2), "y": torch.zeros(3)}, {}, r"batch size: x=\(2,\), y=\(3,\)"),
            ({"x": torch.zeros(2)}, {"uid": ["a"]}, "rows: batch=2, uid=1"),
            ({"x": [1, 2]}, {}, "not tensors: x=list"),
            ({"x": torch.tensor(1.0)}, {}, r"without 1 batch dimension\(s\): x=\(\)"),
            ({"x": torch.zeros(1)}, {"x": ["a"]}, "both in batch and in non_tensor_batch: x"),
            ({}, {"x": torch.zeros(1)}, "'x' is a tensor; put it into batch"),
            ({}, {"x": "abc"}, "'x' is a str"),
            ({}, {"x": np.array(3)}, "'x' is a scalar array"),
        ],
    )
    def test_inconsistent_fields_are_named(self, tensors, non_tensors, text):
        with pytest.raises(SchemaError, match=text):
            DataProto.from_dict(tensors, non_tensors)

    def test_batch_must_be_a_tensordict(self):
        with pytest.raises(SchemaError, match="batch is a dict"):
            DataProto(batch={"x": torch.zeros(2)})

    def test_two_batch_dimensions(self):
        data = DataProto.from_dict({"x": torch.zeros(2, 3, 4), "y": torch.zeros(2, 3)}, num_batch_dims=2)
        assert data.batch.batch_size == (2, 3)
        assert len(data) == 2
        with pytest.raises(DataError, match="num_batch_dims"):
            DataProto.from_dict({"x": torch.zeros(2, 3)}, {"u": ["a", "b"]}, num_batch_dims=2)

    def test_without_fields(self):
        data = DataProto(meta_info={"metrics": {"loss": 1.0}})
        assert len(data) == 0
        assert pickle.loads(pickle.dumps(data)).meta_info == {"metrics": {"loss": 1.0}}

    def test_only_non_tensors(self):
        data = DataProto.from_dict(non_tensors={"uid": ["a", "b", "c", "d"]})
        assert len(data) == 4
        assert [uids(part) for part in data.chunk(2)] == [["a", "b"], ["c", "d"]]
        assert uids(DataProto.concat(data.chunk(2))) == ["a", "b", "c", "d"]
        assert uids(data.repeat(2)) == list("aabbccdd")
        assert data[1].non_tensor_batch == {"uid": "b"}
        assert data[1].batch is None
        assert uids(pickle.loads(pickle.dumps(data))) == ["a", "b", "c", "d"]

    def test_tensordict_round_trip(self):
        data = make(3, step=7)
        flat = data.to_tensordict()
        assert flat["uid"] == ["u0", "u1", "u2"]
        assert flat["step"] == 7
        back = DataProto.from_tensordict(flat)
        assert_rows(back, [0, 1, 2])
        assert back.meta_info == {"step": 7}

    def test_tensordict_refuses_a_name_twice(self):
        with pytest.raises(SchemaError, match="names used twice: x"):
            make(2, x=1).to_tensordict()


class TestRows:
    def test_int_gives_an_item(self):
        item = make(4, step=1)[-1]
        assert isinstance(item, DataProtoItem)
        assert item.batch["x"].tolist() == [6, 7]
        assert item.non_tensor_batch == {"uid": "u3"}
        assert item.meta_info == {"step": 1}
        assert make(2)[np.int64(1)].non_tensor_batch["uid"] == "u1"

    def test_iterating_gives_each_row_once(self):
        assert [item.non_tensor_batch["uid"] for item in make(3)] == ["u0", "u1", "u2"]

    @pytest.mark.parametrize(
        "index",
        [
            [0, 3, 1],
            np.array([0, 3, 1]),
            torch.tensor([0, -1, 1]),
            (0, 3, 1),
        ],
    )
    def test_index_lists(self, index):
        assert_rows(make(4)[index], [0, 3, 1])

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    def test_masks(self, kind):
        assert_rows(make(4)[kind([True, False, False, True])], [0, 3])

    def test_slices(self):
        data = make(6)
        assert_rows(data[1:3], [1, 2])
        assert_rows(data[::2], [0, 2, 4])
        assert_rows(data[-2:], [4, 5])
        assert_rows(data.slice(4, 100), [4, 5])
        assert_rows(data[3:3], [])
        assert_rows(data[[]], [])

    @pytest.mark.parametrize(
        ("index", "error", "text"),
        [
            (4, IndexError, "row 4 of a batch of 4 rows"),
            ([0, 4], IndexError, "rows 0 to 4 of a batch of 4 rows"),
            ([True, False], IndexError, "a mask of 2 entries for a batch of 4 rows"),
            ([0.5], DataError, "integers or booleans, got float64"),
            (np.zeros((2, 2), int), DataError, r"shape \(2, 2\)"),
            ("x", TypeError, "cannot index a DataProto with str"),
            (slice(None, None, -1), DataError, "slice step -1"),
        ],
    )
    def test_bad_indices(self, index, error, text):
        with pytest.raises(error, match=text):
            make(4)[index]

    def test_reorder_in_place(self):
        data = make(4)
        data.reorder(torch.tensor([2, 0, 3, 1]))
        assert_rows(data, [2, 0, 3, 1])
        with pytest.raises(DataError, match="not a permutation of 4 rows"):
            data.reorder([0, 0, 1, 2])

    def test_repeat(self):
        assert_rows(make(2).repeat(3), [0, 0, 0, 1, 1, 1])
        assert_rows(make(2).repeat(3, interleave=False), [0, 1, 0, 1, 0, 1])
        assert_rows(make(2).repeat(0), [])
        with pytest.raises(DataError, match="repeat_times=-1"):
            make(2).repeat(-1)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    def test_sample_level_repeat(self, kind):
        assert_rows(make(3).sample_level_repeat(kind([2, 0, 1])), [0, 0, 2])

    @pytest.mark.parametrize(
        ("counts", "text"), [([1], "one count for each of 3"), ([1, -1, 0], "negative"), ([1.0, 1, 1], "float64")]
    )
    def test_sample_level_repeat_refuses(self, counts, text):
        with pytest.raises(DataError, match=text):
            make(3).sample_level_repeat(counts)

    def test_unfold_column_chunks(self):
        data = DataProto.from_dict(
            {"pair": torch.arange(8).reshape(2, 4), "one": torch.tensor([5, 6])}, {"u": ["a", "b"]}
        )
        out = data.unfold_column_chunks(2, split_keys=["pair"])
        assert out.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert out.batch["one"].tolist() == [5, 5, 6, 6]
        assert list(out.non_tensor_batch["u"]) == ["a", "a", "b", "b"]
        with pytest.raises(SchemaError, match="no columns to split by 3"):
            data.unfold_column_chunks(3, split_keys=["pair"])
        with pytest.raises(SchemaError, match="no field 'nope'; there are one, pair, u"):
            data.unfold_column_chunks(2, split_keys=["nope"])

    def test_padding_in_place(self):
        first, last = make(3), make(3)
        first.padding(2, "first")
        last.padding(2)
        assert_rows(first, [0, 1, 2, 0, 0])
        assert_rows(last, [0, 1, 2, 2, 2])
        with pytest.raises(DataError, match="no row to copy"):
            make(0).padding(1)
        with pytest.raises(DataError, match="padding_candidate='middle'"):
            make(1).padding(1, "middle")


class TestFields:
    def test_select_keeps_all_of_a_kind_for_none_and_nothing_for_an_empty_list(self):
        data = make(2, step=3, lr=0.1)
        part = data.select(batch_keys=["x"], meta_info_keys=["lr"])
        assert set(part.batch.keys()) == {"x"}
        assert uids(part) == ["u0", "u1"]
        assert part.meta_info == {"lr": 0.1}
        none = data.select(batch_keys=[], non_tensor_batch_keys=[], meta_info_keys=[])
        assert len(none) == 0
        assert none.meta_info == {}

    def test_a_selection_has_its_own_meta_info_and_fields(self):
        data = make(2, step=3)
        part = data.select()
        part.meta_info["step"] = 4
        part.batch["new"] = torch.zeros(2)
        assert data.meta_info == {"step": 3}
        assert "new" not in data.select(batch_keys=["x"]).batch

    def test_deep_selection_shares_nothing(self):
        data = make(2, stats={"a": [1]})
        part = data.select(deepcopy=True)
        part.batch["x"][:] = -1
        part.meta_info["stats"]["a"].append(2)
        assert_rows(data, [0, 1])
        assert data.meta_info == {"stats": {"a": [1]}}

    @pytest.mark.parametrize(
        ("keys", "text"),
        [
            ({"batch_keys": ["y"]}, "batch: no field 'y'; there are m, x"),
            ({"non_tensor_batch_keys": ["y"]}, "non_tensor_batch: no field 'y'; there are uid"),
            ({"meta_info_keys": ["y"]}, "meta_info: no field 'y'; there are none"),
        ],
    )
    @pytest.mark.parametrize("method", ["select", "pop"])
    def test_missing_names(self, method, keys, text):
        with pytest.raises(SchemaError, match=text):
            getattr(make(2), method)(**keys)

    def test_pop_moves_or_leaves_all(self):
        data = make(2, step=3)
        out = data.pop(batch_keys=["x"], non_tensor_batch_keys=["uid"], meta_info_keys=["step"])
        assert set(out.batch.keys()) == {"x"}
        assert uids(out) == ["u0", "u1"]
        assert out.meta_info == {"step": 3}
        assert set(data.batch.keys()) == {"m"}
        assert data.non_tensor_batch == {}
        assert data.meta_info == {}
        with pytest.raises(SchemaError):
            data.pop(batch_keys=["m", "nope"])
        assert set(data.batch.keys()) == {"m"}

    def test_rename(self):
        data = make(2).rename("x", "y")
        assert set(data.batch.keys()) == {"y", "m"}
        data.rename(["y", "m"], ["m", "y"])
        assert data.batch["m"].shape == (2, 2)
        with pytest.raises(SchemaError, match="fields y exist already"):
            data.rename("m", "y")
        with pytest.raises(DataError, match="2 old names"):
            data.rename(["m", "y"], ["a"])

    def test_union_adds_fields(self):
        data = make(2, a=1)
        same = data.union(DataProto.from_dict({"y": torch.ones(2)}, {"tag": ["s", "t"]}, {"b": 2}))
        assert same is data
        assert set(data.batch.keys()) == {"x", "m", "y"}
        assert set(data.non_tensor_batch) == {"uid", "tag"}
        assert data.meta_info == {"a": 1, "b": 2}

    def test_union_accepts_equal_fields_where_nan_equals_nan(self):
        nan = float("nan")
        left = DataProto.from_dict(
            {"x": torch.tensor([nan, 1])}, {"o": [{"v": nan, "a": np.array([nan])}, 1]}, {"m": nan}
        )
        right = copy.deepcopy(left)
        assert torch.isnan(left.union(right).batch["x"][0])

    @pytest.mark.parametrize(
        ("other", "text"),
        [
            (DataProto.from_dict({"x": torch.zeros(2, 2).long()}), "'x' exist in both batches with different values"),
            (DataProto.from_dict(non_tensors={"uid": ["u0", "other"]}), "'uid' exist in both"),
            (DataProto(meta_info={"a": 2}), r"meta_info differs in 'a' \(1 and 2\)"),
            (DataProto.from_dict({"y": torch.zeros(3)}), "2 rows and 3 rows"),
            (DataProto.from_dict(non_tensors={"x": ["a", "b"]}), "both in batch and in non_tensor_batch: x"),
        ],
    )
    def test_union_never_rewrites(self, other, text):
        data = make(2, a=1)
        with pytest.raises(SchemaError, match=text):
            data.union(other)
        assert set(data.batch.keys()) == {"x", "m"}

    def test_union_of_a_batch_and_nothing(self):
        assert_rows(DataProto(meta_info={"a": 1}).union(make(2)), [0, 1])
        assert_rows(make(2).union(DataProto(meta_info={"a": 1})), [0, 1])

    def test_union_helpers(self):
        left = TensorDict({"a": torch.ones(2)}, [2])
        assert union_tensor_dict(left, TensorDict({"b": torch.zeros(2)}, [2])) is left
        assert set(left.keys()) == {"a", "b"}
        with pytest.raises(SchemaError, match=r"batch sizes differ: \(2,\) and \(3,\)"):
            union_tensor_dict(left, TensorDict({}, [3]))
        arrays = {"a": np.array([1, 2])}
        assert union_numpy_dict(arrays, {"b": np.array([3, 4])}) is arrays
        with pytest.raises(SchemaError, match="'a'"):
            union_numpy_dict(arrays, {"a": np.array([1, 3])})

    def test_to_returns_self(self):
        data = make(2)
        assert data.to("cpu") is data

    def test_descriptions(self):
        text = make(2, step=1).get_data_info()
        assert "batch.x: (2, 2) torch.int64 cpu" in text
        assert "non_tensor_batch.uid: (2,) object" in text
        assert "meta_info.step: int" in text
        big = DataProto.from_dict({"x": torch.zeros(2**20)})
        assert (
            big.print_size("rollout") == "rollout, size of batch: 0.003906 GiB, size of non_tensor_batch: 0.000000 GiB"
        )


class TestIterator:
    def test_in_order_without_shuffle(self):
        parts = list(make(4).make_iterator(2, epochs=2, seed=5))
        assert [uids(p) for p in parts] == [["u0", "u1"], ["u2", "u3"]] * 2

    def test_the_seed_alone_decides(self):
        def order(seed: int, global_seed: int) -> list[str]:
            torch.manual_seed(global_seed)
            np.random.seed(global_seed)
            options = {"shuffle": True}
            return [
                u
                for part in make(8).make_iterator(4, epochs=2, seed=seed, dataloader_kwargs=options)
                for u in uids(part)
            ]

        first = order(3, 0)
        assert first == order(3, 1)
        assert first != order(4, 0)
        assert sorted(first[:8]) == sorted(first[8:]) == [f"u{i}" for i in range(8)]
        assert first[:8] != first[8:]

    def test_global_random_state_is_untouched(self):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        list(make(8).make_iterator(4, epochs=1, seed=1, dataloader_kwargs={"shuffle": True}))
        assert torch.equal(before, torch.get_rng_state())

    def test_rest(self):
        with pytest.raises(DataError, match="5 rows do not divide into mini-batches of 2"):
            make(5).make_iterator(2, epochs=1)
        dropped = make(5).make_iterator(2, epochs=1, dataloader_kwargs={"drop_last": True})
        assert [len(p) for p in dropped] == [2, 2]
        kept = make(5).make_iterator(2, epochs=1, dataloader_kwargs={"drop_last": False})
        assert [len(p) for p in kept] == [2, 2, 1]

    def test_unknown_options(self):
        with pytest.raises(DataError, match=r"unknown options \['num_workers'\]"):
            make(4).make_iterator(2, epochs=1, dataloader_kwargs={"num_workers": 2})


class TestJoining:
    def test_chunk_needs_equal_parts(self):
        with pytest.raises(DataError, match="5 rows do not divide into 2 chunks"):
            make(5).chunk(2)

    def test_split_may_leave_a_rest(self):
        assert [len(part) for part in make(5).split(2)] == [2, 2, 1]

    @pytest.mark.parametrize(
        ("parts", "text"),
        [
            (
                [make(1), make(1).select(batch_keys=["x"])],
                "do not have the same fields; they differ in m",
            ),
            (
                [DataProto.from_dict({"x": torch.zeros(1, 2)}), DataProto.from_dict({"x": torch.zeros(1, 3)})],
                r"'x' is \(1, 2\) torch.float32 in part 0 but \(1, 3\) torch.float32 in part 1",
            ),
            (
                [DataProto.from_dict({"x": torch.zeros(1)}), DataProto.from_dict({"x": torch.zeros(1).double()})],
                "torch.float64 in part 1",
            ),
        ],
    )
    def test_concat_refuses_different_fields(self, parts, text):
        with pytest.raises(SchemaError, match=text):
            DataProto.concat(parts)

    def test_concat_of_nothing(self):
        with pytest.raises(DataError, match="no parts"):
            DataProto.concat([])

    def test_concat_keeps_equal_meta_info_and_refuses_different(self):
        assert DataProto.concat([make(1, step=3), make(1, step=3, more=1)]).meta_info == {"step": 3, "more": 1}
        with pytest.raises(DataError, match=r"meta_info\['step'\] differs between the parts: 3 and 4"):
            DataProto.concat([make(1, step=3), make(1, step=4)])

    def test_plain_metrics_become_lists_with_an_entry_for_each_part(self):
        parts = [make(1, metrics={"loss": 1.0}, timing={"gen": 5}), make(1, metrics={"loss": [2.0, 3.0], "lr": 1})]
        assert DataProto.concat(parts).meta_info == {
            "metrics": {"loss": [1.0, 2.0, 3.0], "lr": [1]},
            "timing": {"gen": [5]},
        }

    def test_lists_of_metrics_are_joined(self):
        parts = [make(1, metrics=[{"loss": 1.0}, {"loss": 2.0}]), make(1, metrics=[{"loss": 3.0}])]
        assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0]}}

    def test_mergeable_metrics_are_merged(self):
        parts = [
            make(1, metrics=MetricSet(loss=mmean(2.0, 1.0), memory=mmax(5))),
            make(1, metrics=MetricSet(loss=mmean(2.0, 3.0), memory=mmax(4))),
        ]
        metrics = DataProto.concat(parts).meta_info["metrics"]
        assert metrics.values_by_name() == {"loss": 1.0, "memory": 5.0}

    def test_parts_with_metrics_only(self):
        parts = [DataProto(meta_info={"metrics": {"loss": float(i)}}) for i in range(2)]
        assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [0.0, 1.0]}}

    def test_list_of_dict(self):
        assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": [1, 3], "b": [2, 4]}
        assert list_of_dict_to_dict_of_list([]) == {}
        with pytest.raises(DataError, match=r"dict 1 has keys \['b'\]"):
            list_of_dict_to_dict_of_list([{"a": 1}, {"b": 1}])


class TestPadding:
    def test_copies_of_real_rows_from_the_start(self):
        padded, size = pad_dataproto_to_divisor(make(5), 4)
        assert size == 3
        assert_rows(padded, [0, 1, 2, 3, 4, 0, 1, 2])
        assert_rows(unpad_dataproto(padded, size), [0, 1, 2, 3, 4])

    def test_more_padding_than_rows(self):
        padded, size = pad_dataproto_to_divisor(make(1), 4)
        assert size == 3
        assert_rows(padded, [0, 0, 0, 0])

    def test_nothing_to_do(self):
        data = make(4)
        assert pad_dataproto_to_divisor(data, 2) == (data, 0)
        assert unpad_dataproto(data, 0) is data
        with pytest.raises(DataError, match="pad_size=5 of a batch of 4 rows"):
            unpad_dataproto(data, 5)

    def test_shards_say_which_rows_are_copies(self):
        shards = split_with_padding(make(5), 4)
        assert [shard.meta_info.get("_padding_rows") for shard in shards] == [None, None, 1, 2]
        assert [len(strip_padding(shard)) for shard in shards] == [2, 2, 1, 0]
        joined = collect_shards(shards)
        assert_rows(joined, [0, 1, 2, 3, 4])
        assert joined.meta_info == {}

    def test_refusing(self):
        with pytest.raises(DataError, match="5 rows do not divide over 2 ranks and padding is off"):
            split_with_padding(make(5), 2, auto_padding=False)

    def test_the_switch(self, monkeypatch):
        assert DataProtoConfig.auto_padding is True
        monkeypatch.setenv("VERL_AUTO_PADDING", "0")
        assert DataProtoConfig.auto_padding is False
        with pytest.raises(DataError, match="padding is off"):
            split_with_padding(make(5), 2)
        own = DataProto.from_dict({"x": torch.zeros(5)}, auto_padding=True)
        assert [len(shard) for shard in split_with_padding(own, 2)] == [3, 3]
        try:
            DataProtoConfig.auto_padding = True
            assert [len(shard) for shard in split_with_padding(make(5), 2)] == [3, 3]
        finally:
            DataProtoConfig.auto_padding = None
        assert DataProtoConfig.auto_padding is False


class TestPickles:
    @pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn", "complex64"])
    def test_every_dtype_bit_for_bit(self, name):
        dtype = getattr(torch, name)
        tensor = (torch.arange(6).reshape(2, 3) % 2).to(dtype)
        back = pickle.loads(pickle.dumps(DataProto.from_dict({"x": tensor}), protocol=5))
        assert back.batch["x"].dtype == dtype
        assert torch.equal(back.batch["x"].view(torch.uint8), tensor.view(torch.uint8))

    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_a_slice_does_not_drag_its_parent_along(self, protocol):
        big = DataProto.from_dict({"x": torch.zeros(1000, 1000), "m": torch.zeros(1000, 1000, dtype=torch.bfloat16)})
        part = big[10:12]
        assert part.batch["x"].data_ptr() == big.batch["x"][10:].data_ptr()  # a view
        limit = 3 * 2 * 1000 * 6 if protocol == 2 else 2 * 1000 * 6 + 2000  # protocol 2 writes bytes as text
        assert len(pickle.dumps(part, protocol=protocol)) < limit

    def test_buffers_leave_and_arrive_without_a_copy(self):
        data = DataProto.from_dict({"x": torch.arange(1000.0), "m": torch.ones(1000, dtype=torch.bfloat16)})
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        assert len(stream) < 1500
        addresses = {np.frombuffer(b, dtype=np.uint8).ctypes.data for b in buffers}
        assert addresses == {data.batch["x"].data_ptr(), data.batch["m"].data_ptr()}
        back = pickle.loads(stream, buffers=buffers)
        assert back.batch["x"].data_ptr() == data.batch["x"].data_ptr()

    def test_whole_numbers_travel_narrow(self):
        mask = torch.ones(100, 100, dtype=torch.int64)
        data = DataProto.from_dict({"mask": mask, "ids": mask * 150_000, "same": mask})
        stream = pickle.dumps(data, protocol=5)
        assert len(stream) < 10_000 + 40_000 + 2000  # a byte and four; the mask once
        back = pickle.loads(stream)
        assert all(torch.equal(back.batch[name], tensor) for name, tensor in data.batch.items())
        assert back.batch["ids"].dtype == torch.int64

    def test_read_only_buffers_are_copied_once_so_that_writers_are_safe(self):
        data = DataProto.from_dict({"x": torch.arange(4.0)}, {"n": np.arange(4), "o": [np.arange(2)] * 4})
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        frozen = [memoryview(b).toreadonly() for b in buffers]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            back = pickle.loads(stream, buffers=frozen)
            back.batch["x"] += 1
            back.non_tensor_batch["n"][0] = 9
            back.non_tensor_batch["o"][0][0] = 9
        assert back.batch["x"].tolist() == [1, 2, 3, 4]
        assert data.batch["x"].tolist() == [0, 1, 2, 3]
        assert data.non_tensor_batch["n"][0] == 0

    def test_tensors_inside_objects_and_meta_info_travel_the_same_way(self):
        pixels = torch.zeros(1000, 1000)
        shared = {"pixels": pixels[:2]}
        data = DataProto.from_dict(non_tensors={"images": [shared, shared]}, meta_info={"stats": [torch.ones(3)]})
        stream = pickle.dumps(data, protocol=5)
        assert len(stream) < 2 * 1000 * 4 + 2000  # the shared one once, without its parent
        back = pickle.loads(stream)
        assert back.non_tensor_batch["images"][0] is back.non_tensor_batch["images"][1]
        assert back.non_tensor_batch["images"][0]["pixels"].shape == (2, 1000)
        assert back.meta_info["stats"][0].tolist() == [1, 1, 1]
        assert data.non_tensor_batch["images"][0]["pixels"] is shared["pixels"]  # the original is untouched

    def test_gradients_stay_behind(self):
        weight = torch.ones(2, requires_grad=True)
        back = pickle.loads(pickle.dumps(DataProto.from_dict({"x": weight * 2})))
        assert not back.batch["x"].requires_grad

    def test_nested_tensordicts(self):
        inner = TensorDict({"z": torch.arange(2)}, [2])
        back = pickle.loads(pickle.dumps(DataProto(TensorDict({"a": inner}, [2]))))
        assert back.batch["a", "z"].tolist() == [0, 1]

    def test_files(self, tmp_path):
        path = tmp_path / "batch.pkl"
        make(3, step=2).save_to_disk(path)
        back = DataProto.load_from_disk(path)
        assert_rows(back, [0, 1, 2])
        assert back.meta_info == {"step": 2}
        assert [p.name for p in tmp_path.iterdir()] == ["batch.pkl"]

    def test_files_hold_plain_values_of_every_kind(self, tmp_path):
        pixels = torch.zeros(3, 2)
        rows = [
            {"turns": [("user", "a"), ("model", "b")], "score": np.float32(0.5), "tags": {"x", "y"}, 3: None},
            {"image": pixels, "again": pixels, "raw": b"\x00", "ids": np.arange(4, dtype=np.int16)},
        ]
        data = DataProto.from_dict(
            {"x": torch.arange(10).reshape(5, 2)[:2]},
            {
                "rows": rows,
                "number": np.array([1, 2], np.int8),
                "day": np.array(["2024-01-01", "NaT"], "datetime64[D]"),
            },
            {"nested": {"k": [1.5, True, 1 + 2j]}, "frozen": frozenset({1}), "empty": np.zeros((0, 3)), "name": "n"},
        )
        data.save_to_disk(tmp_path / "batch")
        back = DataProto.load_from_disk(tmp_path / "batch")
        first, second = back.non_tensor_batch["rows"]
        assert first == rows[0]
        assert type(first["score"]) is np.float32
        assert type(first["turns"][0]) is tuple
        assert second["raw"] == b"\x00"
        assert second["image"] is second["again"]
        assert second["image"].tolist() == pixels.tolist()
        assert second["ids"].tolist() == [0, 1, 2, 3]
        assert second["ids"].dtype == np.int16
        second["ids"][0] = 9  # may be written to
        for name in ("number", "day"):
            assert back.non_tensor_batch[name].dtype == data.non_tensor_batch[name].dtype
        assert np.array_equal(back.non_tensor_batch["day"], data.non_tensor_batch["day"], equal_nan=True)
        assert back.meta_info["empty"].shape == (0, 3)
        assert {name: back.meta_info[name] for name in ("nested", "frozen", "name")} == {
            "nested": {"k": [1.5, True, 1 + 2j]},
            "frozen": frozenset({1}),
            "name": "n",
        }
        assert (tmp_path / "batch").stat().st_size < 8000

    def test_files_without_tensors_and_with_nested_ones(self, tmp_path):
        DataProto.from_dict(non_tensors={"uid": ["a"]}).save_to_disk(tmp_path / "a")
        assert DataProto.load_from_disk(tmp_path / "a").batch is None
        inner = TensorDict({"z": torch.arange(6).reshape(2, 3)}, [2])
        DataProto(TensorDict({"a": inner}, [2])).save_to_disk(tmp_path / "b")
        assert DataProto.load_from_disk(tmp_path / "b").batch["a", "z"].tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_objects_of_other_types_need_a_pickle_that_both_sides_ask_for(self, tmp_path):
        path = tmp_path / "batch"
        data = DataProto.from_dict(non_tensors={"odd": [Path("/a")]})
        with pytest.raises(DataError, match=r"non_tensor_batch\['odd'\] has a \w*Path, .* leave it out"):
            data.save_to_disk(path)
        endless: list[object] = []
        endless.append(endless)
        with pytest.raises(DataError, match=r"meta_info\['x'\] has a list that contains itself"):
            make(1, x=endless).save_to_disk(path)
        assert list(tmp_path.iterdir()) == []
        data.save_to_disk(path, allow_pickle=True)
        with pytest.raises(DataError, match="may run code: give load_from_disk allow_pickle=True if you trust"):
            DataProto.load_from_disk(path)
        assert DataProto.load_from_disk(path, allow_pickle=True).non_tensor_batch["odd"][0] == Path("/a")

    def test_a_file_that_would_run_code_is_refused(self, tmp_path):
        class Runs:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "ran"),)

        path = tmp_path / "batch"
        path.write_bytes(pickle.dumps(Runs()))
        with pytest.raises(DataError, match="allow_pickle"):
            DataProto.load_from_disk(path)
        for content in ({"kind": "DataProto", "content": {"batch": Runs()}}, Runs()):
            torch.save(content, path)
            for allowed in (False, True):  # what looks like a plain file is read as one
                with pytest.raises(DataError, match="holds more than tensors and plain values"):
                    DataProto.load_from_disk(path, allow_pickle=allowed)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "batch",
        [["nonsense"], [1], ["array", "O", [1], torch.zeros(8, dtype=torch.uint8)], ["tensors", [2], [["x", 3]]], {}],
    )
    def test_damaged_files_are_refused(self, tmp_path, batch):
        torch.save({"kind": "DataProto", "content": {"batch": batch}}, tmp_path / "batch")
        with pytest.raises(DataError, match="damaged"):
            DataProto.load_from_disk(tmp_path / "batch")

    def test_files_of_other_things_are_refused(self, tmp_path):
        path = tmp_path / "batch"
        torch.save({"kind": "Dream", "content": {}}, path)
        with pytest.raises(DataError, match="holds Dream, expected a DataProto"):
            DataProto.load_from_disk(path)
        torch.save([1], path)
        with pytest.raises(DataError, match="holds a list, expected a DataProto"):
            DataProto.load_from_disk(path)
        path.write_bytes(pickle.dumps([1]))
        with pytest.raises(DataError, match="holds a list, expected a DataProto"):
            DataProto.load_from_disk(path, allow_pickle=True)

    def test_a_failed_write_leaves_the_old_file(self, tmp_path):
        path = tmp_path / "batch.pkl"
        make(1).save_to_disk(path)
        with pytest.raises(DataError, match=r"meta_info\['bad'\] has a function"):
            make(2, bad=lambda: None).save_to_disk(path)
        with pytest.raises((AttributeError, pickle.PicklingError)):
            make(2, bad=lambda: None).save_to_disk(path, allow_pickle=True)
        assert len(DataProto.load_from_disk(path)) == 1
        assert [p.name for p in tmp_path.iterdir()] == ["batch.pkl"]

    def test_copies(self):
        data = make(2, step=[1])
        shallow, deep = copy.copy(data), copy.deepcopy(data)
        shallow.batch["new"] = torch.zeros(2)
        deep.batch["x"][:] = -1
        deep.meta_info["step"].append(2)
        assert set(data.batch.keys()) == {"x", "m"}
        assert_rows(data, [0, 1])
        assert data.meta_info == {"step": [1]}

    def test_serialize_tensordict(self):
        batch = TensorDict({"x": torch.arange(4.0), "m": torch.ones(4, 2, dtype=torch.bfloat16)}, [4])
        size, fields = serialize_tensordict(batch)
        assert size == (4,)
        assert fields["x"][0].ctypes.data == batch["x"].data_ptr()
        back = deserialize_tensordict((size, fields))
        assert back["m"].dtype == torch.bfloat16
        assert torch.equal(back["x"], batch["x"])


class TestFutures:
    def test_joins_completed_shards(self):
        shards = split_with_padding(make(5), 2)
        future = DataProtoFuture.concat([Completed(shard) for shard in shards])
        assert_rows(future.get(), [0, 1, 2, 3, 4])

    def test_as_many_receivers_as_shards_get_the_shard_itself(self):
        shards = [Completed(shard) for shard in split_with_padding(make(5), 2)]
        parts = DataProtoFuture.concat(shards).chunk(2)
        assert [part.single_reference for part in parts] == shards
        assert_rows(parts[1].get(), [3, 4, 0])  # the padding stays with the shard

    @pytest.mark.parametrize("receivers", [1, 3, 5])
    def test_other_numbers_of_receivers_get_their_part_of_the_whole(self, receivers):
        future = DataProtoFuture.concat([Completed(shard) for shard in split_with_padding(make(5), 2)])
        parts = [pickle.loads(pickle.dumps(part)).get() for part in future.chunk(receivers)]
        assert len({len(part) for part in parts}) == 1
        assert_rows(collect_shards(parts), [0, 1, 2, 3, 4])

    def test_padding_can_be_refused(self):
        future = DataProtoFuture.concat([Completed(make(5))])
        with pytest.raises(DataError, match="padding is off"):
            future.chunk(2, auto_padding=False)[0].get()


rows = st.integers(0, 12)
sizes = st.integers(1, 5)
fast = settings(max_examples=40, deadline=None)


class TestLaws:
    @fast
    @given(rows, sizes)
    def test_concat_undoes_chunk_and_split(self, n, size):
        data = make(n * size)
        assert_rows(DataProto.concat(data.chunk(size)), list(range(n * size)))
        if n:
            assert_rows(DataProto.concat(make(n).split(size)), list(range(n)))

    @fast
    @given(st.integers(1, 12), sizes)
    def test_unpad_undoes_pad(self, n, size):
        padded, added = pad_dataproto_to_divisor(make(n), size)
        assert len(padded) % size == 0
        assert 0 <= added < size
        assert_rows(unpad_dataproto(padded, added), list(range(n)))

    @fast
    @given(rows, sizes, st.integers(1, 3), st.booleans())
    def test_collect_undoes_dispatch_for_methods_that_multiply_rows(self, n, ranks, times, through_pickle):
        from verl.single_controller.base.decorator import Dispatch, register

        class Multiplier:
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def work(self, data):
                return data.repeat(times)

        shards = split_with_padding(make(n), ranks)
        if through_pickle:
            shards = pickle.loads(pickle.dumps(shards, protocol=5))
        assert_rows(
            collect_shards([Multiplier().work(shard) for shard in shards]), [i for i in range(n) for _ in range(times)]
        )

    @fast
    @given(st.permutations(range(7)))
    def test_the_inverse_permutation_undoes_reorder(self, order):
        data = make(7)
        data.reorder(order)
        assert_rows(data, list(order))
        data.reorder(np.argsort(order))
        assert_rows(data, list(range(7)))

    @fast
    @given(rows, st.integers(0, 4))
    def test_interleaved_repeat_is_a_reordered_repeat(self, n, times):
        blocks = make(n).repeat(times, interleave=False)
        assert_rows(make(n).repeat(times), [i for i in range(n) for _ in range(times)])
        assert_rows(blocks, list(range(n)) * times)
        assert_rows(make(n).sample_level_repeat([times] * n), [i for i in range(n) for _ in range(times)])

    @fast
    @given(rows)
    def test_pickling_changes_nothing(self, n):
        assert_rows(pickle.loads(pickle.dumps(make(n), protocol=5)), list(range(n)))

    @fast
    @given(st.lists(st.booleans(), max_size=10))
    def test_masks_select_like_numpy(self, mask):
        assert_rows(make(len(mask))[np.array(mask, dtype=bool)], list(np.flatnonzero(mask)))

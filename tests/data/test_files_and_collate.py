"""Rows with addresses, and batches of items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl.data.collate import collate_fn
from verl.data.files import Rows
from verl.errors import DataError


def write_parquet(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_rows_of_parquet_and_json_lines_follow_each_other(tmp_path: Path) -> None:
    first = write_parquet(tmp_path / "a.parquet", [{"x": 1, "deep": {"k": [1, 2]}}, {"x": 2, "deep": {"k": []}}])
    second = tmp_path / "b.jsonl"
    second.write_text('{"x": 3, "deep": {"k": [5]}}\n\n{"x": 4, "deep": null}\n')
    rows = Rows([first, str(second)], required=["x"])
    assert len(rows) == 4
    assert [rows[i]["x"] for i in range(4)] == [1, 2, 3, 4]
    assert rows[0]["deep"] == {"k": [1, 2]}
    assert list(rows.column("x")) == [1, 2, 3, 4]
    assert rows.place(1) == f"{first}, row 1"
    assert rows.place(3) == f"{second}, line 3"  # the empty line counts


def test_json_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"x": 1}, {"x": 2, "y": 5}]')
    rows = Rows(path)
    assert rows.columns == ("x", "y")
    assert rows[1] == {"x": 2, "y": 5}


def test_missing_column_names_it_the_file_and_what_there_is(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"question": "q", "answer": "a"}])
    with pytest.raises(DataError, match=r"a\.parquet has no column 'prompt'; it has 'question', 'answer'"):
        Rows(path, required=["prompt"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.parquet", None, "does not exist"),
        ("bad.parquet", "not parquet", "not a readable Parquet file"),
        ("bad.jsonl", '{"x": 1}\n{"x": \n', r"bad\.jsonl, line 2: not valid JSON"),
        ("list.jsonl", "[1]\n", r"line 1: expected a JSON object, got list"),
        ("data.csv", "a,b", r"unknown suffix '\.csv'; use one of \.parquet"),
        ("empty.jsonl", "\n", "no rows in"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        Rows(str(path))


def test_no_files() -> None:
    with pytest.raises(DataError, match="no data files given"):
        Rows([])


def test_collate_stacks_tensors_and_keeps_everything_else_as_objects() -> None:
    batch = collate_fn(
        [
            {"ids": torch.tensor([1, 2]), "messages": [1, 2], "name": "a"},
            {"ids": torch.tensor([3, 4]), "messages": [3, 4], "name": "b", "tools": {"t": 1}},
        ]
    )
    assert batch["ids"].tolist() == [[1, 2], [3, 4]]
    assert batch["messages"].shape == (2,)  # equal-length lists stay lists
    assert batch["messages"].dtype == np.dtype(object)
    assert batch["messages"][1] == [3, 4]
    assert batch["name"].tolist() == ["a", "b"]
    assert batch["tools"].tolist() == [None, {"t": 1}]


def test_collate_refuses_tensors_that_do_not_stack() -> None:
    with pytest.raises(DataError, match="differ in 'ids'"):
        collate_fn([{"ids": torch.zeros(2)}, {"ids": torch.zeros(3)}])
    with pytest.raises(DataError, match="differ in 'ids'"):
        collate_fn([{"ids": torch.zeros(2)}, {}])
    with pytest.raises(DataError, match="no items"):
        collate_fn([])

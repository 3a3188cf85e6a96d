"""Values of rows: the same from every format, and the digest that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import Subset

from tests.fixtures.tiny import make_tokenizer
from verl.config import DataConfig, SFTDataConfig
from verl.data import RLHFDataset, fingerprint_of
from verl.data.files import Rows
from verl.data.sft_dataset import SFTDataset

ROWS: list[dict[str, Any]] = [
    {"data_source": "a", "prompt": "x", "n": 1, "extra_info": {"index": 0, "deep": [{"a": 1}, {"b": {"c": None}}]}},
    {"data_source": "b", "prompt": "y\u2028", "n": 2.5, "extra_info": {"z": "\N{PILE OF POO}", "list": [1, None]}},
    {"data_source": "c", "prompt": "z", "extra_info": None, "only": {"here": True}},
]


def write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> str:
    if path.suffix == ".parquet":
        columns = list(dict.fromkeys(key for row in rows for key in row))
        whole = [{column: row.get(column) for column in columns} for row in rows]
        pq.write_table(pa.Table.from_pylist(whole, schema=schema), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_nested_values_are_the_same_from_every_format(tmp_path: Path) -> None:
    files = [Rows(write(tmp_path / f"rows{suffix}", ROWS)) for suffix in (".jsonl", ".json", ".parquet")]
    for number in range(3):
        assert len({json.dumps(rows[number]["extra_info"], sort_keys=True) for rows in files}) == 1
    for rows in files:
        assert rows[0]["extra_info"] == {"index": 0, "deep": [{"a": 1}, {"b": {}}]}
        assert rows[1]["extra_info"] == {"z": "\N{PILE OF POO}", "list": [1, None]}
        assert list(rows.column("extra_info")) == [rows[i]["extra_info"] for i in range(3)]
        assert list(rows.several([2, 0])) == [rows[2], rows[0]]


def test_arrow_maps_are_mappings_at_every_depth(tmp_path: Path) -> None:
    inner = pa.map_(pa.string(), pa.struct([("k", pa.int64()), ("other", pa.string())]))
    schema = pa.schema([("x", pa.list_(inner)), ("y", pa.large_list(pa.map_(pa.string(), pa.string())))])
    table = pa.table({"x": [[[("a", {"k": 1, "other": None})]], None], "y": [[], [[("q", "r")]]]}, schema=schema)
    pq.write_table(table, tmp_path / "maps.parquet")
    rows = Rows(tmp_path / "maps.parquet")
    assert [rows[0], rows[1]] == [{"x": [{"a": {"k": 1}}], "y": []}, {"x": None, "y": [{"q": "r"}]}]
    assert list(rows.several()) == [rows[0], rows[1]]


def test_a_fingerprint_is_of_values_not_of_files(tmp_path: Path) -> None:
    prints = {Rows(write(tmp_path / f"rows{s}", ROWS)).fingerprint() for s in (".jsonl", ".json", ".parquet")}
    prints.add(Rows([write(tmp_path / "1.parquet", ROWS[:1]), write(tmp_path / "2.jsonl", ROWS[1:])]).fingerprint())
    assert len(prints) == 1
    assert len(prints.pop()) == 64


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param([ROWS[1], ROWS[0], ROWS[2]], id="order"),
        pytest.param(ROWS[:2], id="fewer"),
        pytest.param([{**ROWS[0], "extra_info": {"index": 1}}, *ROWS[1:]], id="value inside"),
        pytest.param([{**ROWS[0], "more": "column"}, *ROWS[1:]], id="another column"),
        pytest.param([{**ROWS[0], "n": "1"}, *ROWS[1:]], id="type"),
    ],
)
def test_other_rows_have_another_fingerprint(tmp_path: Path, changed: list[dict[str, Any]]) -> None:
    before, after = write(tmp_path / "before.jsonl", ROWS), write(tmp_path / "after.jsonl", changed)
    assert Rows(before).fingerprint() != Rows(after).fingerprint()


def test_bytes_and_invalid_text_have_fingerprints(tmp_path: Path) -> None:
    images = [{"x": [{"bytes": b"one", "path": None}]}, {"x": [{"bytes": b"two", "path": None}]}]
    first, second = (Rows(write(tmp_path / f"{i}.parquet", [row])) for i, row in enumerate(images))
    assert first.fingerprint() != second.fingerprint()
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"x": "\\ud83d"}\n')
    assert len(Rows(odd).fingerprint()) == 64


def test_data_sets_name_the_rows_that_they_use(tmp_path: Path) -> None:
    rows = [{"data_source": "a", "prompt": text, "response": "a"} for text in ("q", "this one is too long", "r", "s")]
    path = write(tmp_path / "all.parquet", rows)
    config = DataConfig(max_prompt_length=8, filter_overlong_prompts=True)
    prompts = RLHFDataset(path, make_tokenizer(), config)
    assert prompts.fingerprint() == Rows(write(tmp_path / "used.jsonl", [rows[0], *rows[2:]])).fingerprint()
    assert fingerprint_of(Subset(prompts, range(2))) == Rows(path).fingerprint([0, 2])
    assert fingerprint_of(Subset(Subset(prompts, [2, 1]), [0])) == Rows(path).fingerprint([3])
    examples = SFTDataset(path, make_tokenizer(), SFTDataConfig())
    assert fingerprint_of(examples) == examples.fingerprint() == Rows(path).fingerprint()
    assert fingerprint_of(Subset(examples, range(2))) == Rows(path).fingerprint(range(2))
    assert fingerprint_of([1, 2]) is None

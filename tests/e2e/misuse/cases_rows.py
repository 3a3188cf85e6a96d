"""Rows that cannot be used: each is named with its file, its line, its column and its value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.misuse.case import Case, Outcome, Place

PROMPT = {
    "data_source": "x",
    "prompt": [{"role": "user", "content": "1"}],
    "reward_model": {"ground_truth": "1"},
    "extra_info": {"index": 0},
}
ANSWER = {"data_source": "x", "responses": ["1"], "reward_model": {"ground_truth": "1"}}
EXAMPLE = {"prompt": "1", "response": "1"}
PAIR = {"prompt": "1", "chosen": "1", "rejected": "2"}
FILE = "{tmp}/rows.jsonl"
TRAIN = [f"data.train_files={FILE}"]


def rows(good: dict[str, Any], *changes: dict[str, Any], first: int = 8) -> Callable[[Place], None]:
    """A file with good rows and then changed ones."""

    def prepare(place: Place) -> None:
        whole = [*([good] * first), *({**good, **change} for change in changes)]
        (place.tmp / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole))

    return prepare


def content(data: bytes, name: str = "rows.jsonl") -> Callable[[Place], None]:
    """A file with these bytes."""

    def prepare(place: Place) -> None:
        (place.tmp / name).write_bytes(data)

    return prepare


def invalid_parquet_text(place: Place) -> None:
    """Text whose bytes are no UTF-8."""
    text = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text, "data_source": ["x", "x"]}), place.tmp / "rows.parquet")


def twice(place: Place) -> None:
    """Two columns of one name."""
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array(["x"])], ["prompt", "prompt", "data_source"]
    )
    pq.write_table(table, place.tmp / "rows.parquet")


def empty_parquet(place: Place) -> None:
    """A file with columns and without rows."""
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), place.tmp / "rows.parquet")


def ten_shown(place: Place, done: Outcome) -> None:
    """Ten problems are listed, all are counted."""
    assert done.stderr.count("column 'prompt'") == 10, done.stderr


def nothing_written(place: Place, done: Outcome) -> None:
    """No batch of answers was begun."""
    assert not list(Path(place.tmp).rglob(".answers*")), done.stderr


CASES = [
    Case(
        "half a surrogate pair in a prompt",
        "train",
        TRAIN,
        words=["rows.jsonl, line 9, column 'prompt'[0]['content']", "no valid Unicode"],
        prepare=rows(PROMPT, {"prompt": [{"role": "user", "content": "a \ud83d"}]}),
    ),
    Case(
        "half a surrogate pair in a column that nothing reads",
        "train",
        TRAIN,
        words=["rows.jsonl, line 9, column 'note'", "no valid Unicode"],
        prepare=rows(PROMPT, {"note": {"deep": ["\udc00"]}}),
    ),
    Case(
        "extra_info that is no JSON text",
        "train",
        TRAIN,
        words=["line 9, column 'extra_info' is 'index=1'", "JSON text"],
        prepare=rows(PROMPT, {"extra_info": "index=1"}),
    ),
    Case(
        "reward_model that is no mapping",
        "train",
        TRAIN,
        words=["line 9, column 'reward_model' is 'rule'", "mapping"],
        prepare=rows(PROMPT, {"reward_model": "rule"}),
    ),
    Case(
        "tools_kwargs that is no mapping",
        "train",
        TRAIN,
        words=["line 9, column 'extra_info'", "'add' in 'tools_kwargs'"],
        prepare=rows(PROMPT, {"extra_info": {"tools_kwargs": {"add": 3}}}),
    ),
    Case(
        "prompt that is null",
        "train",
        TRAIN,
        words=["line 9", "'prompt' is null"],
        prepare=rows(PROMPT, {"prompt": None}),
    ),
    Case(
        "prompt without messages",
        "train",
        TRAIN,
        words=["line 9, column 'prompt'", "non-empty list"],
        prepare=rows(PROMPT, {"prompt": []}),
    ),
    Case(
        "message without a role",
        "train",
        TRAIN,
        words=["line 9, column 'prompt'", "message 0 has role None"],
        prepare=rows(PROMPT, {"prompt": [{"content": "1"}]}),
    ),
    Case(
        "prompt that is too long",
        "train",
        TRAIN,
        words=["line 9, column 'prompt'", "data.max_prompt_length=24", "data.truncation"],
        prepare=rows(PROMPT, {"prompt": "1" * 99}),
    ),
    Case(
        "twenty wrong rows",
        "train",
        TRAIN,
        words=["20 problems in rows; the first 10 are", "line 9"],
        prepare=rows(PROMPT, *[{"prompt": 1}] * 20),
        check=ten_shown,
    ),
    Case(
        "column with the name of a field",
        "train",
        TRAIN,
        words=["column 'responses' has the name of a field", "rename it"],
        prepare=rows(PROMPT, {"responses": "1"}),
    ),
    Case(
        "columns with private names",
        "train",
        TRAIN,
        words=["'__samples__'", "'reward_acc'", "'__mine__'", "rename them"],
        prepare=rows(PROMPT, {"__samples__": 1, "reward_acc": 1, "__mine__": 1}),
    ),
    Case(
        "name of a column that is not there",
        "train",
        [*TRAIN, "data.reward_fn_key=source"],
        words=["rows.jsonl has no column 'source'", "'data_source'"],
        prepare=rows(PROMPT),
    ),
    Case(
        "image column that is not there",
        "train",
        [*TRAIN, "data.image_key=pictures"],
        words=["data.image_key='pictures'"],
        prepare=rows(PROMPT),
    ),
    Case(
        "broken JSON",
        "train",
        TRAIN,
        words=["rows.jsonl, line 2: not valid JSON"],
        prepare=content(b'{"a": 1}\n{"a": \n'),
    ),
    Case(
        "lines that are no objects", "train", TRAIN, words=["line 1: expected a JSON object"], prepare=content(b"[1]\n")
    ),
    Case(
        "bytes that are no UTF-8",
        "train",
        TRAIN,
        words=["line 1: byte 7 is no valid UTF-8"],
        prepare=content(b'{"a": "\xff"}\n'),
    ),
    Case(
        "JSON of 100,000 levels",
        "train",
        TRAIN,
        words=["rows.jsonl, line 1", "nested too deeply"],
        prepare=content(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    ),
    Case("empty file", "train", TRAIN, words=["no rows in", "rows.jsonl"], prepare=content(b"\n")),
    Case(
        "unknown kind of file",
        "train",
        ["data.train_files={tmp}/rows.csv"],
        words=["rows.csv", "'.csv'", ".parquet"],
        prepare=content(b"a,b\n", "rows.csv"),
    ),
    Case(
        "Parquet file that is none",
        "train",
        ["data.train_files={tmp}/rows.parquet"],
        words=["rows.parquet: not a readable Parquet file"],
        prepare=content(b"PAR1", "rows.parquet"),
    ),
    Case(
        "Parquet text that is no UTF-8",
        "train",
        ["data.train_files={tmp}/rows.parquet"],
        words=["rows.parquet, row 1, column 'prompt'", "no valid UTF-8"],
        prepare=invalid_parquet_text,
    ),
    Case(
        "two columns of one name",
        "train",
        ["data.train_files={tmp}/rows.parquet"],
        words=["rows.parquet has several columns of the name 'prompt'"],
        prepare=twice,
    ),
    Case(
        "Parquet file without rows",
        "train",
        ["data.train_files={tmp}/rows.parquet"],
        words=["no rows in", "rows.parquet"],
        prepare=empty_parquet,
    ),
    Case(
        "demonstrations without answers",
        "sft",
        TRAIN,
        words=["2 problems", "line 9, column 'response' is null", "line 10, column 'prompt' is null"],
        prepare=rows(EXAMPLE, {"response": None}, {"prompt": None}),
    ),
    Case(
        "conversation without an answer",
        "sft",
        [*TRAIN, "data.multiturn.enable=True"],
        words=["line 1", "no assistant turn"],
        prepare=rows({"messages": [{"role": "user", "content": "1"}]}, first=1),
    ),
    Case(
        "tools that are no schemas",
        "sft",
        [*TRAIN, "data.multiturn.enable=True"],
        words=["line 1, column 'tools' is 'add'", "tool schemas"],
        prepare=rows({"messages": json.dumps([{"role": "assistant", "content": "1"}]), "tools": "add"}, first=1),
    ),
    Case(
        "pair without a rejected answer",
        "preference",
        TRAIN,
        words=["line 9, column 'rejected' is null"],
        prepare=rows(PAIR, {"rejected": None}),
    ),
    Case(
        "margin that is no number",
        "preference",
        [*TRAIN, "objective=reward_model", "data.margin_key=sure"],
        words=["line 9, column 'sure' is 'very'"],
        prepare=rows({**PAIR, "sure": 1}, {"sure": "very"}),
    ),
    Case(
        "prompts that cannot be generated for",
        "generate",
        [f"data.path={FILE}"],
        words=["2 problems", "line 9, column 'prompt'", "line 10, column 'prompt'", "data.max_prompt_length=24"],
        prepare=rows({"prompt": "1"}, {"prompt": 1}, {"prompt": "1" * 99}),
        check=nothing_written,
    ),
    Case(
        "responses that would replace a column",
        "generate",
        [f"data.path={FILE}"],
        words=["column 'responses' already", "data.response_key"],
        prepare=rows({"prompt": "1", "responses": ["kept"]}),
        check=nothing_written,
    ),
    Case(
        "answers without a reference",
        "eval",
        [f"data.path={FILE}"],
        words=["2 problems", "line 9, column 'reward_model' is null", "line 10, column 'responses' is []"],
        prepare=rows(ANSWER, {"reward_model": None}, {"responses": []}),
    ),
]

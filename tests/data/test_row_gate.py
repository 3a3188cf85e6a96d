"""The gate of rows: forms of columns, invalid text, reserved names, several problems in one message."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fixtures.tiny import make_tokenizer
from verl.config import DataConfig, SFTDataConfig
from verl.config.preference import PreferenceDataConfig
from verl.data import RLHFDataset, forms
from verl.data.files import Rows
from verl.data.preference_dataset import PreferenceDataset
from verl.data.row_gate import Column, RowError, RowGate, check_names
from verl.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, check_examples
from verl.errors import DataError
from verl.schema import FIELDS, PRIVATE

ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "tools_kwargs": {"add": {"create_kwargs": {"a": 1}}}},
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(path: str, **config: Any) -> RLHFDataset:
    return RLHFDataset(path, make_tokenizer(), DataConfig(**{"max_prompt_length": 16, **config}))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_json_text_of_mappings_is_read(tmp_path: Path, suffix: str) -> None:
    text = {name: json.dumps(ROW[name]) for name in ("prompt", "reward_model", "extra_info")}
    inner = {**ROW, "extra_info": {"index": 7, "tools_kwargs": json.dumps(ROW["extra_info"]["tools_kwargs"])}}
    plain = prompts(write(tmp_path / f"plain{suffix}", [ROW]))[0]
    for number, form in enumerate(({**ROW, **text}, inner)):
        item = prompts(write(tmp_path / f"{number}{suffix}", [form]))[0]
        assert item["raw_prompt_ids"] == plain["raw_prompt_ids"]
        for name in ("raw_prompt", "reward_model", "extra_info", "tools_kwargs", "index"):
            assert item[name] == plain[name] == (ROW | {"raw_prompt": ROW["prompt"]}).get(name, item[name])
        assert item["tools_kwargs"] == {"add": {"create_kwargs": {"a": 1}}}


def test_nulls_inside_json_text_are_the_users_own(tmp_path: Path) -> None:
    item = prompts(write(tmp_path / "a.jsonl", [{**ROW, "extra_info": '{"x": {"y": null}}'}]))[0]
    assert item["extra_info"] == {"x": {"y": None}}


def test_arrow_maps_are_mappings(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    maps = {"reward_model": [("ground_truth", "4")], "extra_info": [("split", "train"), ("tools_kwargs", '{"a": {}}')]}
    columns = {**{name: pa.array([pairs], kind) for name, pairs in maps.items()}, "prompt": ["q"], "data_source": ["x"]}
    pq.write_table(pa.table(columns), tmp_path / "maps.parquet")
    item = prompts(str(tmp_path / "maps.parquet"))[0]
    assert item["reward_model"] == {"ground_truth": "4"}
    assert item["extra_info"] == {"split": "train", "tools_kwargs": {"a": {}}}
    assert item["tools_kwargs"] == {"a": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra_info": "no JSON"}, r"'extra_info' is 'no JSON' \(str\), which is not a mapping as JSON text"),
        ({"extra_info": "[1]"}, r"'extra_info' is \[1\] \(list\); expected a mapping, or JSON text of one"),
        ({"extra_info": 5}, r"'extra_info' is 5 \(int\); expected a mapping"),
        ({"extra_info": '{"a": "\\ud800"}'}, r"'extra_info' is JSON text with invalid Unicode.*\['a'\]"),
        ({"extra_info": {"tools_kwargs": 3}}, r"'extra_info' has a wrong 'tools_kwargs': is 3 \(int\)"),
        ({"extra_info": {"tools_kwargs": {"add": 3}}}, r"'extra_info' has a wrong entry 'add' in 'tools_kwargs'"),
        ({"extra_info": {"interaction_kwargs": [1]}}, r"'extra_info' has a wrong 'interaction_kwargs'"),
        ({"extra_info": "[" * 100_000}, "'extra_info' .*nested too deeply"),
        ({"reward_model": "rule"}, r"'reward_model' is 'rule' \(str\)"),
        ({"prompt": None}, "'prompt' is null; give it a value, or remove the row"),
        ({"prompt": [{"role": "user"}]}, "'prompt': message 0 has content None"),
        ({"prompt": 5}, "'prompt': expected a non-empty list of chat messages, got 5"),
        ({"data_source": True}, r"'data_source' is True \(bool\); expected the name of a data source"),
        ({"data_source": ["a"]}, "'data_source' .*expected the name of a data source"),
        ({"agent_name": 3}, r"'agent_name' is 3 \(int\); expected text"),
        (
            {"prompt": [{"role": "assistant", "content": "", "tool_calls": "add(1)"}]},
            "'prompt': message 0 has tool_calls .* expected a list of calls",
        ),
    ],
)
def test_wrong_forms_are_named_with_file_line_column_and_value(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.jsonl", [ROW, {**ROW, **change}])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2, column {message}"):
        prompts(path)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2, column {message}"):
        prompts(path, truncation="left")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"prompt": [{"role": "user", "content": "a \ud83d b"}]}, r"column 'prompt'\[0\]\['content'\]"),
        ({"extra_info": {"deep": [{"x": "\udc00"}]}}, r"column 'extra_info'\['deep'\]\[0\]\['x'\]"),
        ({"extra_info": {"\ud83d": 1}}, r"column 'extra_info'\['\\ud83d'\] \(the key\)"),
        ({"unknown": "\ud83d"}, "column 'unknown'"),
    ],
)
def test_half_surrogate_pairs_are_named_wherever_they_are(tmp_path: Path, change: dict[str, Any], where: str) -> None:
    path = write(tmp_path / "a.jsonl", [{**ROW, "unknown": "\N{PILE OF POO}"}, {**ROW, **change}])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2, {where}: .*no valid Unicode"):
        prompts(path)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2, {where}: .*no valid Unicode"):
        RowGate(Rows(path), [])[1]


def test_parquet_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    def bad(values: list[bytes]) -> pa.Array:
        return pa.array(values, pa.binary()).cast(pa.binary()).view(pa.string())

    pq.write_table(pa.table({"x": ["a", "b", "c"], "y": bad([b"ok", b"\xff", b"\xfe"])}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 1, column 'y': has text that is no valid UTF-8 \(2 rows"):
        Rows(tmp_path / "a.parquet")
    nested = pa.StructArray.from_arrays([bad([b"ok", b"ok", b"\xff"])], ["inner"])
    pq.write_table(pa.table({"x": nested}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet, row 2, column 'x'"):
        Rows(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"x": 1}\n{"x": "\xff"}\n', r"a\.jsonl, line 2: byte 7 is no valid UTF-8"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 1: the JSON is nested too deeply"),
        (b'{"x": ' + b"1" * 5000 + b"}\n", "line 1: not valid JSON: .*digits"),
    ],
)
def test_unreadable_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Rows(tmp_path / "a.jsonl")


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"x": "a\u2028b\u0085c"}\r\n{"x":\r 2}\n'.encode())
    rows = Rows(tmp_path / "a.jsonl")
    assert [row["x"] for row in rows.several()] == ["a\u2028b\u0085c", 2]
    assert rows.place(1).endswith("line 2")


def test_several_problems_are_listed_together(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "prompt": 5, "extra_info": 6}, {**ROW, "data_source": 1.5}, *[{**ROW, "prompt": 1}] * 20]
    with pytest.raises(RowError) as caught:
        prompts(write(tmp_path / "a.jsonl", rows))
    lines = str(caught.value).split("\n")
    assert lines[0] == "23 problems in rows; the first 10 are:"
    assert len(lines) == 11
    assert "line 2, column 'prompt'" in lines[1]
    assert "line 2, column 'extra_info'" in lines[2]
    assert "line 3, column 'data_source'" in lines[3]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.count) == (str(caught.value), 23)


def test_problems_of_templates_are_listed_with_the_others(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ raise_exception('odd role') if m.role == 'x' }}{% endfor %}q"
    odd = {**ROW, "prompt": [{"role": "x", "content": "a"}]}
    path = write(tmp_path / "a.jsonl", [odd, ROW, {**ROW, "prompt": 5}, odd])
    with pytest.raises(RowError, match="3 problems") as caught:
        RLHFDataset(path, tokenizer, DataConfig(max_prompt_length=16))
    assert str(caught.value).count("odd role") == 2


def test_a_minute_bounds_the_look_and_the_rest_is_checked_when_read(tmp_path: Path) -> None:
    gate = RowGate(
        Rows(write(tmp_path / "a.jsonl", [{"x": "a"}, {"x": "b"}, {"x": 3}])), [Column("x", forms.text, required=True)]
    )
    assert gate.check(within_s=0) == 1
    assert gate.check(indices=range(2)) == 2
    with pytest.raises(DataError, match="line 3, column 'x' is 3"):
        gate[2]
    with pytest.raises(DataError, match="line 3, column 'x' is 3"):
        gate.check()


def test_a_gate_can_be_looked_through_for_something_else(tmp_path: Path) -> None:
    gate = RowGate(Rows(write(tmp_path / "a.jsonl", [{"x": "a"}, {"x": "b"}])), [Column("x", forms.text)])

    def look(row: dict[str, Any]) -> None:
        if row["x"] == "b":
            raise DataError("column 'x' is not wanted")

    with pytest.raises(DataError, match=r"a\.jsonl, line 2, column 'x' is not wanted"):
        gate.check(look)


@pytest.mark.parametrize(
    "name", sorted({name for name, field in FIELDS.items() if field.made_by != "data"} | {*PRIVATE})
)
def test_columns_with_names_of_the_run_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.jsonl", [{**ROW, name: 1}])
    with pytest.raises(DataError, match=f"column '{name}' has the name of a field that the run makes.*rename it"):
        prompts(path)


def test_reserved_names_are_refused_together_and_others_are_not() -> None:
    with pytest.raises(DataError, match="'__mine__'.*'reward_acc'.*rename them"):
        check_names(["__mine__", "reward_acc", "answer"])
    check_names([*(name for name, field in FIELDS.items() if field.made_by == "data"), "question", "_private", "split"])
    check_names(["__index_level_0__"])  # pandas writes it after a filter
    check_names(["prompts"], read=["prompts"])  # the run takes the prompt out of its column


def test_a_prompt_that_only_looks_like_json_stays_text() -> None:
    for text in ("[1, 2] sorted is?", "[]", '[{"role": "user"}]', '["a"]', '{"role": "user", "content": "q"}'):
        assert forms.prompt(text) == text
    assert forms.prompt('[{"role": "user", "content": "q"}]') == [{"role": "user", "content": "q"}]


def test_arrays_of_user_classes_are_read_as_lists() -> None:
    message = {"role": "user", "content": "q", "tool_calls": None}
    assert forms.prompt(np.array([message], dtype=object)) == [{"role": "user", "content": "q"}]
    assert forms.texts(np.array(["a", "b"])) == ["a", "b"]
    assert forms.mapping([("a", 1), ("b", {"c": None})]) == {"a": 1, "b": {"c": None}}
    assert forms.tools(np.array(['{"name": "add"}', {"name": "sub"}], dtype=object)) == [
        {"name": "add"},
        {"name": "sub"},
    ]


def test_demonstrations_and_pairs_pass_the_same_gate(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    good = {"messages": json.dumps(talk), "tools": "[]"}
    bad = [{"messages": "q: a"}, {"messages": talk, "tools": "add"}, {"messages": talk, "tools": [1]}]
    data = MultiTurnSFTDataset(write(tmp_path / "sft.jsonl", [good, *bad]), tokenizer, SFTDataConfig())
    assert tokenizer.decode(data[0]["input_ids"]).endswith("a<|end|>")
    with pytest.raises(RowError, match="3 problems") as caught:
        check_examples(data)
    for words in (
        "line 2, column 'messages' is 'q: a'",
        "line 3, column 'tools'",
        "'tools' has a wrong schema 0: is 1",
    ):
        assert words in str(caught.value)

    rows = [{"prompt": "q", "chosen": "\ud83d", "rejected": None}, {"prompt": 3, "chosen": "a", "rejected": "b"}]
    pairs = PreferenceDataset(write(tmp_path / "pairs.jsonl", rows), tokenizer, PreferenceDataConfig())
    with pytest.raises(RowError, match="3 problems") as caught:
        check_examples(pairs)
    for words in ("line 1, column 'chosen'", "line 1, column 'rejected' is null", "line 2, column 'prompt'"):
        assert words in str(caught.value)


def test_a_column_may_hold_prompt_and_response(tmp_path: Path) -> None:
    row = {"both": json.dumps({"q": "2+2", "a": "4"})}
    config = SFTDataConfig(
        prompt_key="both", response_key="both", prompt_dict_keys=["q"], response_dict_keys=["a"], max_length=32
    )
    data = SFTDataset(write(tmp_path / "a.jsonl", [row, {"both": {"q": "1"}}]), make_tokenizer(), config)
    assert make_tokenizer().decode(data[0]["input_ids"]).endswith("4<|end|>")
    with pytest.raises(DataError, match="line 2, column 'both' has no 'a' inside"):
        data[1]


def test_data_sets_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    data = prompts(write(tmp_path / "a.parquet", [ROW]))
    copy = pickle.loads(pickle.dumps(data))
    assert copy[0]["extra_info"] == data[0]["extra_info"]
    pickle.dumps(SFTDataset(write(tmp_path / "b.parquet", [{"prompt": "q", "response": "a"}]), make_tokenizer(), {}))
    assert partial(forms.optional, form=forms.text)(None) is None

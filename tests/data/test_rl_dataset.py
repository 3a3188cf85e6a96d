"""Prompts: schema, chat templates, lengths, errors that name the row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fixtures.tiny import make_tokenizer
from verl.config import CustomClsConfig, DataConfig
from verl.data import RLHFDataset, collate_fn, create_dataset
from verl.data.files import Rows
from verl.errors import ConfigError, DataError

TOKENIZER = make_tokenizer()
USER, END, ASSISTANT = 3, 1, 4


def row(content: Any, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7, "split": "train"},
        **more,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def dataset(tmp_path: Path, rows: list[dict[str, Any]], suffix: str = ".parquet", **config: Any) -> RLHFDataset:
    settings = {"max_prompt_length": 8, **config}
    return RLHFDataset(write(tmp_path / f"train{suffix}", rows), TOKENIZER, DataConfig(**settings))


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_item_is_left_padded_and_carries_the_row(tmp_path: Path, suffix: str) -> None:
    item = dataset(tmp_path, [row("2+2")], suffix)[0]
    tokens = [USER, *ids("2+2"), END, ASSISTANT]
    assert item["input_ids"].tolist() == [0, 0, *tokens]
    assert item["attention_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert item["position_ids"].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert item["raw_prompt_ids"] == tokens
    assert item["raw_prompt"] == [{"role": "user", "content": "2+2"}]
    assert item["data_source"] == "openai/gsm8k"
    assert item["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert item["ability"] == "math"
    assert item["index"] == 7
    assert item["tools_kwargs"] == {}
    assert "prompt" not in item


def test_batch_of_items(tmp_path: Path) -> None:
    data = dataset(tmp_path, [row("1"), row("22", extra_info={"index": None, "split": "x"})], ".jsonl")
    batch = collate_fn([data[0], data[1]])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["index"].tolist() == [7, 1]  # given, else the row's number
    assert batch["raw_prompt"][1] == [{"role": "user", "content": "22"}]


def test_raw_chat_only_on_request(tmp_path: Path) -> None:
    assert "raw_prompt" not in dataset(tmp_path, [row("1")], return_raw_chat=False)[0]


def test_text_prompt_is_a_user_message_or_plain_text_without_template(tmp_path: Path) -> None:
    rows = [row("2+2") | {"prompt": "2+2"}]
    assert dataset(tmp_path, rows)[0]["raw_prompt_ids"] == [USER, *ids("2+2"), END, ASSISTANT]
    bare = make_tokenizer()
    bare.chat_template = None
    plain = RLHFDataset(write(tmp_path / "p.parquet", rows), bare, DataConfig(max_prompt_length=8))
    assert plain[0]["raw_prompt_ids"] == ids("2+2")
    assert plain[0]["raw_prompt"] == "2+2"
    with pytest.raises(DataError, match="no chat template"):
        RLHFDataset(write(tmp_path / "m.parquet", [row("2")]), bare, DataConfig(max_prompt_length=8))[0]


def test_template_arguments_and_absent_message_keys(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m.tool_calls is defined %}!{% endif %}{% endfor %}"
        "{% if enable_thinking %}<think>{% endif %}"
    )
    messages = [{"role": "system", "content": "a", "tool_calls": None}, {"role": "user", "content": "b"}]
    config = DataConfig(max_prompt_length=20, apply_chat_template_kwargs={"enable_thinking": True})
    item = RLHFDataset(write(tmp_path / "a.parquet", [row(messages)]), tokenizer, config)[0]
    assert tokenizer.decode(item["raw_prompt_ids"]) == "ab<think>"


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("left", "345678"), ("right", "123456"), ("middle", "123678")],
)
def test_truncation(tmp_path: Path, mode: str, kept: str) -> None:
    bare = make_tokenizer()
    bare.chat_template = None
    path = write(tmp_path / "a.parquet", [row("x") | {"prompt": "12345678"}])
    item = RLHFDataset(path, bare, DataConfig(max_prompt_length=6, truncation=mode))[0]
    assert bare.decode(item["raw_prompt_ids"]) == kept


def test_too_long_prompt_is_an_error_that_names_row_and_remedy(tmp_path: Path) -> None:
    """At start-up: a long run must not end at the one row that is too long."""
    with pytest.raises(
        DataError, match=r"train\.parquet, row 1, .*12 tokens, more than data\.max_prompt_length=8"
    ) as e:
        dataset(tmp_path, [row("1"), row("123456789"), row("12345"), row("123456")])
    assert "filter_overlong_prompts" in str(e.value)
    assert "(2 of 4 prompts are too long)" in str(e.value)


def test_a_file_without_rows_is_told_before_its_columns(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"no rows in .*empty\.jsonl"):
        Rows(str(tmp_path / "empty.jsonl"), required=["prompt"])


def test_filtering_logs_the_count_and_keeps_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(text) for text in ("1", "123456789", "12345", "123456")]
    with caplog.at_level(logging.INFO, logger="verl"):
        data = dataset(tmp_path, rows, filter_overlong_prompts=True)
    assert [data[i]["raw_prompt"][0]["content"] for i in range(len(data))] == ["1", "12345"]
    assert "filtered 2 of 4 prompts longer than data.max_prompt_length=8 tokens" in caplog.text


@pytest.mark.slow
def test_filtering_in_processes_keeps_the_same_rows(tmp_path: Path) -> None:
    rows = [row("9" * (1 + i % 7)) for i in range(600)]
    one = dataset(tmp_path, rows, filter_overlong_prompts=True)
    two = dataset(tmp_path, rows, filter_overlong_prompts=True, filter_overlong_prompts_workers=2)
    assert len(one) == len(two) == sum(i % 7 < 5 for i in range(600))
    assert one._indices == two._indices


def test_nothing_left_after_filtering(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 1 prompts of .*train\.parquet are longer than data\.max_prompt_length=8"):
        dataset(tmp_path, [row("123456789")], filter_overlong_prompts=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "non-empty list of chat messages"),
        ([{"content": "x"}], "message 0 has role None"),
        ([{"role": "user", "content": 5}], "message 0 has content 5 "),
        (["hello"], "message 0 is 'hello'"),
        (12, "non-empty list of chat messages, got 12"),
    ],
)
def test_malformed_row_is_named_at_start(tmp_path: Path, prompt: Any, message: str) -> None:
    rows = [row("1"), row("1") | {"prompt": prompt}]
    with pytest.raises(DataError, match=rf"train\.jsonl, line 2, column 'prompt': .*{message}"):
        dataset(tmp_path, rows, ".jsonl")


def test_missing_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'question'; it has 'data_source', 'prompt'"):
        dataset(tmp_path, [row("1")], prompt_key="question")
    with pytest.raises(DataError, match="no column 'source'"):
        dataset(tmp_path, [row("1")], reward_fn_key="source")
    with pytest.raises(
        DataError, match=r"column 'input_ids' has the name of a field that the run makes \(made by source"
    ):
        dataset(tmp_path, [row("1", input_ids=[1])])


def test_images_of_a_text_model_are_refused(tmp_path: Path) -> None:
    assert "images" not in dataset(tmp_path, [row("1", images=None)])[0]
    with pytest.raises(DataError, match="has images .*no processor of images"):
        dataset(tmp_path, [row("1", images=["a.png"])])


def test_mapping_as_config_and_unknown_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row("1")])
    assert len(RLHFDataset(path, TOKENIZER, {"max_prompt_length": 8})[0]["input_ids"]) == 8
    with pytest.raises(ConfigError, match="max_prompt_len"):
        RLHFDataset(path, TOKENIZER, {"max_prompt_len": 8})


def test_custom_class(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row("1"), row("2"), row("3")])
    code = tmp_path / "mine.py"
    code.write_text(
        "from verl.utils.dataset.rl_dataset import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    def __getitem__(self, i):\n"
        "        return super().__getitem__(i) | {'mine': i}\n"
        "class NotADataset: pass\n"
    )
    config = DataConfig(max_prompt_length=8, custom_cls=CustomClsConfig(path=str(code), name="Mine"))
    assert create_dataset(path, TOKENIZER, config)[2]["mine"] == 2
    assert len(create_dataset(path, TOKENIZER, config, max_samples=2)) == 2
    config.custom_cls.name = "NotADataset"
    with pytest.raises(ConfigError, match=r"must be a class derived from torch\.utils\.data\.Dataset"):
        create_dataset(path, TOKENIZER, config)
    config.custom_cls.name = "Absent"
    with pytest.raises(ConfigError, match="has no 'Absent'; it defines Mine, NotADataset"):
        create_dataset(path, TOKENIZER, config)

"""Rows with two answers: their forms, their tokens, their batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.config import PreferenceDataConfig
from verl.data.preference_dataset import PreferenceCollator, PreferenceDataset
from verl.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def dataset(path: Path, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **config: Any) -> Any:
    file = path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceDataset(str(file), tokenizer, PreferenceDataConfig(**config))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ab", "chosen": "xyz", "rejected": "w"},
        {"prompt": [user("ab")], "chosen": "xyz", "rejected": "w"},
        {"prompt": [user("ab")], "chosen": [assistant("xyz")], "rejected": [assistant("w")]},
        {"chosen": [user("ab"), assistant("xyz")], "rejected": [user("ab"), assistant("w")]},
    ],
)
def test_all_forms_of_a_row_give_the_same_tokens(
    row: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    item = dataset(tmp_path, [row], tokenizer)[0]
    for side, answer in (("chosen", "xyz"), ("rejected", "w")):
        prompt, tokens = item[side]
        assert tokenizer.decode(prompt) == "<|user|>ab<|end|><|assistant|>"
        assert tokenizer.decode(tokens) == f"{answer}<|end|>"
    assert item["margin"] == 0.0


def test_earlier_turns_belong_to_the_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    before = [user("a"), assistant("b"), user("c")]
    item = dataset(tmp_path, [{"prompt": before, "chosen": "d", "rejected": "ee"}], tokenizer)[0]
    assert tokenizer.decode(item["chosen"][0]).endswith("<|assistant|>b<|end|><|user|>c<|end|><|assistant|>")
    assert tokenizer.decode(item["chosen"][1]) == "d<|end|>"


def test_batch_layout(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        {"prompt": "ab", "chosen": "xyz", "rejected": "w", "sure": 2},
        {"prompt": "abcd", "chosen": "x", "rejected": "yy", "sure": 0.5},
    ]
    data = dataset(tmp_path, rows, tokenizer, margin_key="sure")
    batch = PreferenceCollator(pad_token_id=0)([data[0], data[1]])
    assert batch["margin"].tolist() == [2.0, 2.0, 0.5, 0.5]
    assert batch["response_mask"].sum(1).tolist() == [4, 2, 2, 3]
    assert batch["attention_mask"].sum(1).tolist() == [9, 7, 9, 10]
    assert batch["input_ids"].shape == (4, 7 + 4)
    texts = [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts[1] == "<|user|>ab<|end|><|assistant|>w<|end|>"
    assert batch["position_ids"][1].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    empty = PreferenceCollator(pad_token_id=0)([])  # a rank without a row of a short batch
    assert empty["input_ids"].shape == (0, 2)


def test_long_prompts_are_cut_or_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "abcdef", "chosen": "xyz", "rejected": "w"}]
    with pytest.raises(DataError, match=r"'chosen'.*13 tokens, more than data.max_length=9.*truncation=left"):
        dataset(tmp_path, rows, tokenizer, max_length=9)[0]
    item = dataset(tmp_path, rows, tokenizer, max_length=9, truncation="left")[0]
    assert tokenizer.decode(item["chosen"][0]) == "def<|end|><|assistant|>"
    assert tokenizer.decode(item["rejected"][0]) == "bcdef<|end|><|assistant|>"
    with pytest.raises(DataError, match="no token of the prompt is left"):
        dataset(tmp_path, rows, tokenizer, max_length=4, truncation="left")[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "x", "rejected": "y"}, "no column 'prompt'"),
        ({"prompt": "a", "chosen": [user("x")], "rejected": "y"}, "ends with a message of role 'user'"),
        ({"prompt": "a", "chosen": "x", "rejected": 3}, "'rejected': expected a non-empty list"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "sure": "very"}, "'sure' is 'very'; expected a finite number"),
    ],
)
def test_bad_rows_are_named(
    row: dict[str, Any], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = {"margin_key": "sure"} if "sure" in row else {}
    with pytest.raises(DataError, match=f"pairs.jsonl.*{message}"):
        dataset(tmp_path, [row], tokenizer, **config)[0]

"""Demonstrations: which tokens the loss is on, whatever the chat template does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fixtures.tiny import make_tokenizer
from verl.config import MultiturnConfig, SFTDataConfig
from verl.data.sft_dataset import (
    MultiTurnSFTDataset,
    SFTCollator,
    SFTDataset,
    check_examples,
    conversation_tokens,
    create_examples,
)
from verl.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# writes an empty thinking block into the last answer and into the opened turn, none into earlier answers
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if no_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "ok then"},
]


def tokenizer_with(template: str, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """All bytes, ChatML tokens and the given merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [a + b for a, b in merges or []]
    vocabulary = {t: i for i, t in enumerate(["<|pad|>", "<|im_start|>", "<|im_end|>", *alphabet, *merged])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges or []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def learned(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The runs of text that the loss is on."""
    ids, mask = conversation_tokens(tokenizer, messages, **options)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for previous, token, wanted in zip([0, *mask], ids, mask, strict=False):
        if wanted:
            if not previous:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_chatml_turns_end_with_their_end_token_and_without_the_line_break() -> None:
    assert learned(tokenizer_with(CHATML), TALK) == ["yo<|im_end|>", "ok then<|im_end|>"]
    assert learned(tokenizer_with(CHATML), TALK, only_last=True) == ["ok then<|im_end|>"]


def test_tiny_template() -> None:
    assert learned(make_tokenizer(), TALK) == ["yo<|end|>", "ok then<|end|>"]


def test_characters_of_several_bytes() -> None:
    talk = [{"role": "user", "content": "naïve 中"}, {"role": "assistant", "content": "日本 é"}]
    assert learned(tokenizer_with(CHATML), talk) == ["日本 é<|im_end|>"]


def test_template_that_rewrites_the_last_turn_only() -> None:
    tokenizer = tokenizer_with(THINKING)
    assert learned(tokenizer, TALK) == ["yo<|im_end|>", "<think>\n\n</think>\n\nok then<|im_end|>"]
    # opened turns that come with the empty block leave it out of the loss, where the text has it
    options = {"template_kwargs": {"no_thinking": True}}
    assert learned(tokenizer, TALK, **options) == ["yo<|im_end|>", "ok then<|im_end|>"]


def test_template_that_marks_turns_itself() -> None:
    tokenizer = tokenizer_with(GENERATION)
    assert learned(tokenizer, TALK) == ["yo<|im_end|>", "ok then<|im_end|>"]


def test_template_without_end_token_gets_one_after_every_turn() -> None:
    tokenizer = tokenizer_with(NO_END)
    ids, mask = conversation_tokens(tokenizer, TALK)
    assert tokenizer.decode(ids) == "user: hi\nassistant: yo<|im_end|>\nuser: more\nassistant: ok then<|im_end|>"
    assert learned(tokenizer, TALK) == ["yo<|im_end|>", "ok then<|im_end|>"]
    assert mask[-1] == 1


def test_token_across_the_border_is_tokenised_as_in_use() -> None:
    # "\n" + "A" merges to one token, but after a prompt that ends in "\n" the model produces "A" alone
    tokenizer = tokenizer_with(CHATML, merges=[("Ċ", "A")])
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}]
    prompt = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids, mask = conversation_tokens(tokenizer, talk)
    assert ids[: len(prompt_ids)] == prompt_ids
    assert mask[: len(prompt_ids)] == [0] * len(prompt_ids)
    assert learned(tokenizer, talk) == ["A<|im_end|>"]


def test_conversation_that_the_assistant_begins() -> None:
    assert learned(tokenizer_with(CHATML), TALK[1:]) == ["yo<|im_end|>", "ok then<|im_end|>"]


def test_tool_turns_are_not_learned() -> None:
    talk = [*TALK[:2], {"role": "tool", "content": "42"}, TALK[3]]
    assert learned(tokenizer_with(CHATML), talk) == ["yo<|im_end|>", "ok then<|im_end|>"]


def test_conversation_without_answer() -> None:
    with pytest.raises(DataError, match="no assistant turn"):
        conversation_tokens(tokenizer_with(CHATML), TALK[:1])


def test_template_that_rewrites_history() -> None:
    rewriting = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match=r"cannot find assistant turn 1 .* \{% generation %\}"):
        conversation_tokens(tokenizer_with(rewriting), TALK)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_prompt_and_response_rows(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    path = write(tmp_path / "a.parquet", [{"prompt": "2+2", "response": "4"}])
    item = SFTDataset(path, tokenizer, SFTDataConfig(max_length=16))[0]
    digits = {c: tokenizer(c)["input_ids"][0] for c in "2+4"}
    assert item["input_ids"].tolist() == [3, digits["2"], digits["+"], digits["2"], 1, 4, digits["4"], 1]
    assert item["loss_mask"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert item["position_ids"].tolist() == list(range(8))
    assert item["attention_mask"].tolist() == [1] * 8


def test_nested_keys_message_prompts_and_plain_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    rows = [{"extra_info": {"question": "q", "answer": "a"}}]
    config = SFTDataConfig(
        prompt_key="extra_info",
        response_key="extra_info",
        prompt_dict_keys=["question"],
        response_dict_keys=["answer"],
    )
    item = SFTDataset(write(tmp_path / "a.parquet", rows), tokenizer, config)[0]
    assert tokenizer.decode(item["input_ids"]) == "<|user|>q<|end|><|assistant|>a<|end|>"

    rows = [{"prompt": TALK[:3], "response": "fine"}]
    item = SFTDataset(write(tmp_path / "b.parquet", rows), tokenizer, SFTDataConfig())[0]
    assert tokenizer.decode(item["input_ids"][item["loss_mask"] == 1]) == "fine<|end|>"

    tokenizer.chat_template = None
    rows = [{"prompt": "one ", "response": "two"}]
    item = SFTDataset(write(tmp_path / "c.parquet", rows), tokenizer, SFTDataConfig())[0]
    assert tokenizer.decode(item["input_ids"]) == "one two<|end|>"
    assert tokenizer.decode(item["input_ids"][item["loss_mask"] == 1]) == "two<|end|>"


def test_conversation_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"messages": TALK}])
    tokenizer = make_tokenizer()
    one = SFTDataset(path, tokenizer, SFTDataConfig(multiturn=MultiturnConfig(enable=True)))[0]
    two = MultiTurnSFTDataset(path, tokenizer, SFTDataConfig())[0]
    for item in (one, two):
        assert tokenizer.decode(item["input_ids"][item["loss_mask"] == 1]) == "yo<|end|>ok then<|end|>"


@pytest.mark.parametrize("mode", ["left", "right"])
def test_truncation(tmp_path: Path, mode: str) -> None:
    tokenizer = make_tokenizer()
    path = write(tmp_path / "a.parquet", [{"prompt": "qrst", "response": "abc"}])
    item = SFTDataset(path, tokenizer, SFTDataConfig(max_length=5, truncation=mode))[0]
    assert len(item["input_ids"]) == 5
    whole = "<|user|>qrst<|end|><|assistant|>abc<|end|>"
    expected = tokenizer(whole)["input_ids"]
    assert item["input_ids"].tolist() == (expected[-5:] if mode == "left" else expected[:5])
    assert item["loss_mask"].tolist() == ([0, 1, 1, 1, 1] if mode == "left" else [0] * 5)


def test_errors_name_the_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    path = write(tmp_path / "a.parquet", [{"prompt": "q", "response": "a" * 20}])
    with pytest.raises(DataError, match=r"a\.parquet, row 0: the example has 25 tokens, more than data\.max_length=8"):
        SFTDataset(path, tokenizer, SFTDataConfig(max_length=8))[0]
    with pytest.raises(DataError, match="no column 'answer'"):
        SFTDataset(path, tokenizer, SFTDataConfig(response_key="answer"))
    with pytest.raises(DataError, match=r"row 0, column 'prompt' is 'q' \(str\), which is not a mapping as JSON text"):
        SFTDataset(path, tokenizer, SFTDataConfig(prompt_dict_keys=["x"]))[0]
    assert len(create_examples(SFTDataset, path, tokenizer, SFTDataConfig(), max_samples=0)) == 0


def test_a_bad_example_is_found_before_its_turn(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "response": None if number == 5 else "a"} for number in range(8)]
    data = SFTDataset(write(tmp_path / "a.parquet", rows), make_tokenizer(), SFTDataConfig(max_length=8))
    with pytest.raises(DataError, match=r"a\.parquet, row 5, column 'response' is null; give it a value"):
        check_examples(data)
    with pytest.raises(DataError, match="row 5"):
        check_examples(data, first=1, step=2)
    assert check_examples(data, first=0, step=2) == 4  # another rank's share
    assert check_examples(data, within_s=0) == 1


def test_collator_lays_the_sequence_out_as_one_response(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "q", "response": "a"}, {"prompt": "qq", "response": "ab"}])
    data = SFTDataset(path, make_tokenizer(), SFTDataConfig())
    batch = SFTCollator(pad_token_id=0)([data[0], data[1]])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], list(range(8))]
    assert batch["response_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]]
    assert batch["prompts"].shape == (2, 1)
    assert batch["responses"].tolist() == batch["input_ids"][:, 1:].tolist()
    assert SFTCollator(0, length=12)([data[0]])["input_ids"].shape == (1, 12)
    assert SFTCollator(0)([])["response_mask"].shape == (0, 1)

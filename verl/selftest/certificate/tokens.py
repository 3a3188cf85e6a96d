"""Checks of the tokenizer: text that no template rendered, the template, and what a saved model has of both."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import DataConfig
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import answer_tokens
from verl.selftest.certificate.bench import Bench
from verl.selftest.certificate.outcome import Measure
from verl.utils.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, FRAME = "tokenizer", "text without a template"
TEXTS = ("What is 2 + 3?", "a\nb  c", "x", " 7*6 = 42 ")
_CHAT = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and one more?"},
    ],
]


def frame(bench: Bench) -> Iterator[Measure]:
    """A prompt that is plain text gets the tokens that the tokenizer gives it, its own frame included."""
    tokenizer = bench.subject.tokenizer
    if tokenizer is None:
        yield Measure(FRAME, "", reason="the directory has no tokenizer")
        return
    for program, encoded in prompt_ids(bench, tokenizer).items():
        wrong = []
        for text, ids in zip(TEXTS, encoded, strict=True):
            expected = list(tokenizer(text)["input_ids"])
            if ids != expected:
                wrong.append(f"{text!r}: {ids[:6]} against {expected[:6]}")
        where = wrong[0] if wrong else f"{len(TEXTS)} texts"
        yield bench.exact(FRAME, program, "texts with other tokens", len(wrong), where, "tokenizer(text)")


def prompt_ids(bench: Bench, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokens of :data:`TEXTS` as plain prompts, from the data sets of reinforcement learning and fine-tuning."""
    plain = _without_template(tokenizer)
    file = bench.scratch / "texts.jsonl"
    rows = [
        {"prompt": text, "data_source": "certificate", "reward_model": {"style": "rule", "ground_truth": "1"}}
        for text in TEXTS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    config = DataConfig(max_prompt_length=64)
    dataset = RLHFDataset(str(file), plain, config)
    demonstrations = [answer_tokens(plain, text, "4") for text in TEXTS]
    return {
        "reinforcement learning": [list(dataset[number]["raw_prompt_ids"]) for number in range(len(dataset))],
        "fine-tuning": [[t for t, own in zip(ids, mask, strict=True) if not own] for ids, mask in demonstrations],
    }


def _without_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    return plain


def round_trip(bench: Bench) -> Iterator[Measure]:
    """A saved and a merged model have the tokenizer: same tokens, same special tokens, same chat template."""
    tokenizer = bench.subject.tokenizer
    if tokenizer is None:
        yield Measure(TOKENIZER, "", reason="the directory has no tokenizer")
        return
    want = facts(tokenizer)
    directories = (("saved for Transformers", bench.checkpoint / "huggingface"), ("merged", bench.merged))
    for case, directory in directories:
        wrong, where = _differences(directory, want, bench.subject.trust_remote_code)
        yield bench.exact(TOKENIZER, case, "properties that differ", len(wrong), where, "the model's own tokenizer")


def _differences(directory: Path, want: dict[str, Any], trust_remote_code: bool) -> tuple[list[str], str]:
    got = facts(load_tokenizer(str(directory), trust_remote_code))
    wrong = [name for name in want if got[name] != want[name]]
    if not wrong:
        return [], ", ".join(want)
    return wrong, f"{wrong[0]}: {str(got[wrong[0]])[:60]!r} against {str(want[wrong[0]])[:60]!r}"


def facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What must be the same in two tokenizers."""
    found: dict[str, Any] = {
        "size": len(tokenizer),
        "special tokens": sorted(tokenizer.all_special_ids),
        "end token": tokenizer.eos_token_id,
        "padding token": tokenizer.pad_token_id,
        "tokens of texts": [list(tokenizer(text)["input_ids"]) for text in TEXTS],
        "text of tokens": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS],
    }
    if tokenizer.chat_template:
        found["chat template"] = [_rendered(tokenizer, chat) for chat in _CHAT]
    else:
        found["chat template"] = None
    return found


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]]) -> str:
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # noqa: BLE001 - a template is a program of others
        return f"{type(error).__name__}: {error}"

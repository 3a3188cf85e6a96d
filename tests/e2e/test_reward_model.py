"""A reward model scores conversations in its own words: its tokenizer and template, not the policy's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

pytestmark = pytest.mark.e2e

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def reward_model_dir(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-score classifier with the policy's vocabulary and another chat template."""
    directory = tmp_path_factory.mktemp("models") / "reward"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    return directory


def test_scores_are_the_models(
    run_training: Callable[..., list[dict[str, Any]]], reward_model_dir: Path, tmp_path: Path, tiny_model_dir: str
) -> None:
    run_training(
        "trainer.controller=local",
        "trainer.total_training_steps=1",
        "reward_model.enable=True",
        f"reward_model.model.path={reward_model_dir}",
        f"trainer.rollout_data_dir={tmp_path}/dump",
    )
    samples = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").open()]
    assert len(samples) == 16
    tokenizer = AutoTokenizer.from_pretrained(reward_model_dir)
    policy_tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model_dir, dtype=torch.float32).eval()
    for sample in samples[:6]:
        question = sample["input"].split("<|user|>")[1].split("<|end|>")[0]
        answer = policy_tokenizer.decode(
            policy_tokenizer(sample["output"], add_special_tokens=False).input_ids, skip_special_tokens=True
        )
        ids = tokenizer(f"u: {question}\na: {answer}\n", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            expected = model(**ids).logits[0, 0].item()
        assert sample["score"] == pytest.approx(expected, abs=1e-5)

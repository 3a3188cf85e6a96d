"""Columns of any name: the configuration alone says which is which, in every program.

Each data file also has a column of every default name, whose values would give another result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny import make_tokenizer
from verl.config import DataConfig, SFTDataConfig
from verl.config.generation import EvalConfig, GenerationConfig
from verl.config.load import load_config
from verl.config.preference import PreferenceDataConfig
from verl.config.sft import MultiturnConfig
from verl.data import RLHFDataset, collate_fn
from verl.data.preference_dataset import PreferenceDataset
from verl.data.sft_dataset import SFTDataset
from verl.protocol import DataProto
from verl.rewards.samples import decode_samples
from verl.trainer.main_eval import evaluate
from verl.trainer.main_generation import Generator
from verl.trainer.ppo.validation import sources_of

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def write(path: Path, row: dict[str, Any], decoys: dict[str, Any]) -> tuple[str, str]:
    """A file with decoys, and one in which nothing has a default name."""
    path.write_text(json.dumps({**decoys, **row}) + "\n")
    plain = path.with_name(f"plain_{path.name}")
    plain.write_text(json.dumps(row) + "\n")
    return str(path), str(plain)


def test_reinforcement_learning(tmp_path: Path) -> None:
    row = {"p": "q", "source": "mine", "reward_model": {"ground_truth": "1"}, "pictures": None}
    decoys = {"prompt": "decoy", "data_source": "decoy", "images": None}
    config = DataConfig(prompt_key="p", reward_fn_key="source", image_key="pictures", max_prompt_length=8)
    tokenizer = make_tokenizer()
    for path in write(tmp_path / "a.jsonl", row, decoys):
        data = RLHFDataset(path, tokenizer, config)
        item = data[0]
        assert item["raw_prompt"] == [USER]
        assert (item["data_source"], item["source"]) == ("mine", "mine")
        batch = DataProto.from_single_dict(collate_fn([item]))
        assert sources_of(batch, "source") == sources_of(batch) == ["mine"]
        batch.batch["prompts"] = batch.batch["input_ids"]
        batch.batch["responses"] = batch.batch["input_ids"][:, -2:]
        batch.batch["attention_mask"] = batch.batch["input_ids"].new_ones((1, 10))
        assert decode_samples(batch, tokenizer, "source")[0].data_source == "mine"


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    whole = tokenizer.apply_chat_template([USER, ASSISTANT], tokenize=False)
    config = SFTDataConfig(prompt_key="p", response_key="r", image_key="pictures", max_length=32)
    decoys = {"prompt": "decoy", "response": "decoy", "images": None, "messages": "decoy", "tools": "decoy"}
    for path in write(tmp_path / "a.jsonl", {"p": "q", "r": "a", "pictures": None}, decoys):
        assert tokenizer.decode(SFTDataset(path, tokenizer, config)[0]["input_ids"]) == whole.rstrip()
    inside = SFTDataConfig(
        prompt_key="x", response_key="x", prompt_dict_keys=["in", "p"], response_dict_keys=["r"], max_length=32
    )
    for path in write(tmp_path / "b.jsonl", {"x": {"in": {"p": "q"}, "r": "a"}}, decoys):
        assert tokenizer.decode(SFTDataset(path, tokenizer, inside)[0]["input_ids"]) == whole.rstrip()
    turns = SFTDataConfig(
        multiturn=MultiturnConfig(enable=True, messages_key="talk", tools_key="functions"), max_length=256
    )
    tokenizer.chat_template = "{{ tools | tojson }}" + str(tokenizer.chat_template)
    row = {"talk": [USER, ASSISTANT], "functions": [{"name": "mine"}]}
    for path in write(tmp_path / "c.jsonl", row, decoys):
        text = tokenizer.decode(SFTDataset(path, tokenizer, turns)[0]["input_ids"])
        assert text == '[{"name": "mine"}]' + whole.rstrip()


def test_preferences(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    row = {"p": "q", "good": "a", "bad": "b", "sure": 2.5, "pictures": None}
    decoys = {"prompt": "decoy", "chosen": "decoy", "rejected": "decoy", "margin": "decoy", "images": None}
    config = PreferenceDataConfig(
        prompt_key="p", chosen_key="good", rejected_key="bad", margin_key="sure", image_key="pictures", max_length=32
    )
    for path in write(tmp_path / "a.jsonl", row, decoys):
        pair = PreferenceDataset(path, tokenizer, config)[0]
        answers = [tokenizer.decode(pair[side][1]) for side in ("chosen", "rejected")]
        assert (answers, pair["margin"]) == (["a<|end|>", "b<|end|>"], 2.5)
        assert "decoy" not in tokenizer.decode(pair["chosen"][0])


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (tmp_path / "reward.py").write_text(source + "    return float(solution_str == ground_truth == data_source)\n")
    return tmp_path / "reward.py"


def test_generation_and_evaluation(tiny_model_dir: str, reward: Path, tmp_path: Path) -> None:
    row = {"p": "q", "source": "mine", "reference": {"ground_truth": "mine"}, "pictures": None}
    decoys = {"prompt": "decoy", "responses": ["decoy"], "data_source": "decoy", "images": None}
    decoys["reward_model"] = {"ground_truth": "decoy"}
    for number, path in enumerate(write(tmp_path / "a.jsonl", row, decoys)):
        output = tmp_path / f"out_{number}.jsonl"
        keys = ["prompt_key=p", "image_key=pictures", "response_key=answers", f"output_path={output}", f"path={path}"]
        more = [f"model.path={tiny_model_dir}", "trainer.controller=local", "trainer.device=cpu"]
        generator = Generator(load_config(GenerationConfig, "generation", [*(f"data.{k}" for k in keys), *more]))
        ids, images = generator._prompt(0)
        assert "decoy" not in generator.tokenizer.decode(ids)
        assert images is None
        generator.run()
        answered = json.loads(output.read_text())
        assert len(answered["answers"]) == 1
        assert answered.get("responses") == (["decoy"] if number == 0 else None)
        output.write_text(json.dumps({**answered, "answers": ["mine", "other"]}) + "\n")
        keys = [f"path={output}", "response_key=answers", "data_source_key=source", "reward_model_key=reference"]
        keys = [*(f"data.{key}" for key in keys), f"custom_reward_function.path={reward}"]
        result = evaluate(load_config(EvalConfig, "evaluation", keys))
        assert list(result) == ["mine"]
        assert result["mine"]["score"]["mean"] == 0.5

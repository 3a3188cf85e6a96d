"""The data that the examples make: schema, disjoint sets, and rewards that tell right from wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from verl.config import DataConfig, SFTDataConfig
from verl.data import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer import load_tokenizer


def example(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(path.parent))  # an example imports its neighbours, as a script does
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("tiny_model", None)
    return module


def test_quick_start(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = example(repo_root / "examples" / "quickstart" / "make_task.py", monkeypatch)
    words = ["make_task", "--output", str(tmp_path), "--seed", "1", "--sft", "400", "--train", "300", "--val", "50"]
    monkeypatch.setattr(sys, "argv", words)
    task.main()
    sft, train, val = (pq.read_table(tmp_path / "data" / f"{n}.parquet").to_pylist() for n in ("sft", "train", "val"))
    assert (len(sft), len(train), len(val)) == (400, 300, 50)
    held_out = {row["prompt"][0]["content"] for row in val}
    assert len(held_out) == 50
    assert not held_out & {row["prompt"][0]["content"] for row in train}
    assert not held_out & {row["prompt"] for row in sft}

    row = train[0]
    digits = row["prompt"][0]["content"].removeprefix("sort ")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "".join(sorted(digits))}
    assert row["extra_info"] == {"split": "train", "index": 0}
    assert default_compute_score(row["data_source"], f"#### {''.join(sorted(digits))}", "".join(sorted(digits))) == 1.0
    good = sum(r["response"] == "#### " + "".join(sorted(r["prompt"].removeprefix("sort "))) for r in sft)
    assert 0.58 < good / 400 < 0.72  # 0.65 within three standard deviations

    tokenizer = load_tokenizer(str(tmp_path / "model"))
    prompts = RLHFDataset(str(tmp_path / "data" / "train.parquet"), tokenizer, DataConfig(max_prompt_length=24))
    assert len(prompts[0]["raw_prompt_ids"]) == 13
    demonstration = SFTDataset(str(tmp_path / "data" / "sft.parquet"), tokenizer, SFTDataConfig(max_length=40))[0]
    assert int(demonstration["loss_mask"].sum()) == len("#### 12345") + 1

    again = task.make_data(tmp_path / "again", seed=1, sft=400, train=300, val=50, good_fraction=0.65)
    assert again == {"sft": sft, "train": train, "val": val}
    other = task.make_data(tmp_path / "other", seed=2, sft=400, train=300, val=50, good_fraction=0.65)
    assert other["val"] != val


def test_quick_start_model_has_the_documented_size(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = example(repo_root / "examples" / "quickstart" / "tiny_model.py", monkeypatch)
    assert maker.save_tiny_model(tmp_path) == 343_008
    tokenizer = load_tokenizer(str(tmp_path))
    text = 'ab\n c {"x": 1} <tool_call>1</tool_call>'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 104
    with pytest.raises(ValueError, match="model_type='gpt'"):
        maker.save_tiny_model(tmp_path, model_type="gpt")


def test_smollm2(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = example(repo_root / "examples" / "smollm2" / "reward.py", monkeypatch).compute_score
    assert reward("d", "5 - 9 = -4", "-4", {}) == 1.0
    assert reward("d", "it is -4, or 4", "-4", {}) == 0.0
    assert reward("d", "four", "4", {}) == 0.0
    assert reward("d", "", "4", {}) == 0.0

    pytest.importorskip("reasoning_gym")
    prepare = example(repo_root / "examples" / "smollm2" / "prepare.py", monkeypatch)
    prepare.make_data(tmp_path, train=300, val=64, seed=3)
    train, val = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(val)) == (300, 64)
    assert not {r["prompt"][0]["content"] for r in train} & {r["prompt"][0]["content"] for r in val}
    assert len({r["prompt"][0]["content"] for r in val}) == 64
    for row in val:
        expression = row["prompt"][0]["content"].split(":")[-1].strip().removesuffix(" =").split()
        left, sign, right = int(expression[0]), expression[1], int(expression[2])
        assert int(row["reward_model"]["ground_truth"]) == (left + right if sign == "+" else left - right)

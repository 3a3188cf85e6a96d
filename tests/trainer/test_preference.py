"""Training on pairs of answers: the numbers of plain PyTorch, any split, the models that come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from verl.config import PreferenceConfig, load_config
from verl.trainer import main_preference
from verl.trainer.preference_trainer import build_trainer, run_preference
from verl.utils.distributed import free_port

LETTERS = "abcdefgh"
BETA = 0.3


def pairs(count: int) -> list[dict[str, Any]]:
    """The better answer has one of the first letters; lengths differ."""
    return [
        {
            "prompt": LETTERS[i % 8] * (1 + i % 3),
            "chosen": LETTERS[i % 4] * (1 + i % 4),
            "rejected": LETTERS[4 + i % 4] * (1 + i % 2),
            "sure": i % 2 + 0.5,
        }
        for i in range(count)
    ]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = []
    for name, count in (("train", 16), ("val", 5)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in pairs(count)))
        paths.append(str(path))
    return paths[0], paths[1]


@pytest.fixture(autouse=True)
def _log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))


def overrides(model: str, files: tuple[str, str], root: Path, objective: str = "dpo", **more: Any) -> list[str]:
    settings = {
        "objective": objective,
        "data.train_files": files[0],
        "data.val_files": files[1],
        "data.train_batch_size": 8,
        "data.max_length": 16,
        "data.shuffle": False,
        "model.path": model,
        "optim.lr": 1e-3,
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps_ratio": 0.0,
        "trainer.total_training_steps": 2,
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(root),
        "trainer.logger": "[file]",
    }
    settings |= {"loss.beta": BETA} if objective == "dpo" else {"data.margin_key": "sure"}
    settings |= {k.replace("__", "."): v for k, v in more.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def config(*args: Any, **more: Any) -> PreferenceConfig:
    return load_config(PreferenceConfig, "preference_trainer", overrides(*args, **more))


def texts(row: dict[str, Any], side: str) -> tuple[str, str]:
    return f"<|user|>{row['prompt']}<|end|><|assistant|>", f"{row[side]}<|end|>"


def answer_log_prob(model: torch.nn.Module, tokenizer: Any, row: dict[str, Any], side: str) -> torch.Tensor:
    prompt, answer = (tokenizer(text)["input_ids"] for text in texts(row, side))
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)[range(len(answer)), answer].sum()


def test_dpo_step_and_validation_are_those_of_plain_pytorch(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path
) -> None:
    trainer = build_trainer(config(tiny_model_dir, files, tmp_path / "run"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    start = trainer.validate()
    assert start["val/loss"] == pytest.approx(-float(logsigmoid(torch.zeros(()))), abs=1e-6)  # the reference itself
    assert start["val/margin"] == pytest.approx(0.0, abs=1e-6)

    reference = {}
    with torch.no_grad():
        for number, row in enumerate(pairs(16)):
            reference[number] = [answer_log_prob(model, tokenizer, row, side) for side in ("chosen", "rejected")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for step, batch in enumerate(trainer.train_loader):
        metrics = trainer.train_step(batch)
        losses, margins = [], []
        for number in range(8 * step, 8 * step + 8):
            chosen, rejected = (
                BETA * (answer_log_prob(model, tokenizer, pairs(16)[number], side) - reference[number][k])
                for k, side in enumerate(("chosen", "rejected"))
            )
            losses.append(-logsigmoid(chosen - rejected))
            margins.append(float((chosen - rejected).detach()))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["train/margin"] == pytest.approx(sum(margins) / 8, rel=1e-3, abs=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        if step:
            assert metrics["train/accuracy"] == sum(m > 0 for m in margins) / 8


def test_reward_model_learns_exports_and_scores_as_in_transformers(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path
) -> None:
    more = {"trainer__total_training_steps": 40, "optim__lr": 2e-3, "trainer__test_freq": 40}
    last = run_preference(config(tiny_model_dir, files, tmp_path / "run", "reward_model", **more))
    assert last["train/accuracy"] == 1.0
    exported = tmp_path / "run" / "huggingface"
    model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    losses, right = [], []
    with torch.no_grad():
        for row in pairs(5):
            better, worse = (
                model(input_ids=torch.tensor([tokenizer("".join(texts(row, side)))["input_ids"]])).logits[0, 0]
                for side in ("chosen", "rejected")
            )
            losses.append(-logsigmoid(better - worse - row["sure"]))
            right.append(float(better > worse))
    assert last["val/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
    assert last["val/accuracy"] == pytest.approx(sum(right) / 5)


@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_numbers_do_not_depend_on_the_split(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path, objective: str
) -> None:
    def numbers(**more: Any) -> list[float]:
        trainer = build_trainer(config(tiny_model_dir, files, tmp_path / "run", objective, **more))
        steps = [trainer.train_step(batch) for batch in trainer.train_loader]
        names = ("train/loss", "train/grad_norm", "train/margin")
        return [step[name] for step in steps for name in names] + list(trainer.validate().values())

    plain = numbers()
    for split in (
        {"data__micro_batch_size_per_gpu": 1},
        {"data__use_dynamic_bsz": True, "data__max_token_len_per_gpu": 40},
        {"model__use_remove_padding": False, "data__micro_batch_size_per_gpu": 4},
    ):
        assert numbers(**split) == pytest.approx(plain, rel=1e-4, abs=1e-6), split


@pytest.mark.dist
@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_two_ranks_give_the_numbers_of_one(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path, objective: str
) -> None:
    def logged(log: Path) -> list[dict[str, Any]]:
        return [line.get("data", line) for line in map(json.loads, log.read_text().splitlines())]

    run_preference(config(tiny_model_dir, files, tmp_path / "one", objective, trainer__test_freq=1))
    one = logged(tmp_path / "metrics.jsonl")
    words = overrides(tiny_model_dir, files, tmp_path / "two", objective, trainer__test_freq=1)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command = [sys.executable, *launcher, "-m", "verl.trainer.main_preference", *words]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(tmp_path / "two.jsonl")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = logged(tmp_path / "two.jsonl")
    for name in ("train/loss", "train/accuracy", "train/grad_norm", "val/loss", "val/accuracy", "val/margin"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective=dpoo"], "dpoo"),
        (["objective=reward_model", "loss.beta=0.2"], "loss.beta=0.2: has no meaning with objective=reward_model"),
        (["data.margin_key=sure"], "is for objective=reward_model"),
        (["loss.loss_type=ipo", "loss.label_smoothing=0.1"], "needs loss_type=sigmoid"),
        (["data.train_files=gone.jsonl"], "gone.jsonl"),
        (["data.chosen_key=better"], "no column 'better'"),
    ],
)
def test_misuse_is_explained(
    words: list[str],
    message: str,
    tiny_model_dir: str,
    files: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {word.split("=")[0] for word in words}
    base = [
        w for w in overrides(tiny_model_dir, files, tmp_path / "run") if w.split("=")[0] not in {*given, "loss.beta"}
    ]
    try:
        code = main_preference.main([*base, *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err

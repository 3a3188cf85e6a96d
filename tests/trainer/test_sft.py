"""Supervised fine-tuning: the loss, its independence of the split, saving, resuming, exporting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config import SFTConfig, SFTTrainerConfig, load_config
from verl.errors import ConfigError
from verl.trainer import main_sft
from verl.trainer.sft_trainer import build_trainer, run_sft
from verl.utils.distributed import free_port

LETTERS = "abcdefgh"


def rows(count: int) -> list[dict[str, str]]:
    """Answers of different lengths, so that averaging the wrong way shows."""
    return [{"prompt": LETTERS[i % 8] * (1 + i % 3), "response": LETTERS[i % 8] * (1 + i % 5)} for i in range(count)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = []
    for name, count in (("train", 24), ("val", 7)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows(count)), path)
        paths.append(str(path))
    return paths[0], paths[1]


def overrides(model: str, files: tuple[str, str], root: Path, **more: Any) -> list[str]:
    settings = {
        "data.train_files": files[0],
        "data.val_files": files[1],
        "data.train_batch_size": 8,
        "data.max_length": 16,
        "model.path": model,
        "optim.lr": 1e-3,
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps_ratio": 0.0,
        "trainer.total_training_steps": 4,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(root),
        "trainer.logger": "[file]",
    }
    settings |= {k.replace("__", "."): v for k, v in more.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def config(*args: Any, **more: Any) -> SFTConfig:
    return load_config(SFTConfig, "sft_trainer", overrides(*args, **more))


@pytest.fixture(autouse=True)
def _log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))


def logged(path: Path) -> list[dict[str, Any]]:
    """The metrics of each step, from the file tracker."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line.get("data", line) for line in lines]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict())


def plain_loss(model: torch.nn.Module, tokenizer: Any, examples: list[dict[str, str]]) -> torch.Tensor:
    """Token-mean negative log-likelihood of the answers and their end tokens, one example at a time."""
    total, count = torch.zeros(()), 0
    for example in examples:
        prompt = tokenizer(f"<|user|>{example['prompt']}<|end|><|assistant|>")["input_ids"]
        answer = tokenizer(f"{example['response']}<|end|>")["input_ids"]
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        picked = torch.log_softmax(logits.float(), -1)[range(len(answer)), answer]
        total, count = total - picked.sum(), count + len(answer)
    return total / count


def test_step_and_validation_are_those_of_plain_pytorch(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path
) -> None:
    trainer = build_trainer(config(tiny_model_dir, files, tmp_path / "run", data__shuffle=False))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    assert trainer.validate()["val/loss"] == pytest.approx(plain_loss(model, tokenizer, rows(7)).item(), rel=1e-5)

    metrics = trainer.train_step(next(iter(trainer.train_loader)))
    loss = plain_loss(model, tokenizer, rows(24)[:8])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    optimizer.step()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["train/lr"] == pytest.approx(1e-3)
    # <|user|> prompt <|end|> <|assistant|> response <|end|>: 4 tokens, prompts 1-3 and responses 1-5 letters
    assert metrics["train/tokens"] == sum(4 + 1 + i % 3 + 1 + i % 5 for i in range(8))
    tuned = dict(trainer.engine.named_tensors())
    for name, expected in model.named_parameters():
        if name in tuned:  # tied weights come once
            assert torch.allclose(tuned[name], expected.detach(), atol=2e-5), name


@pytest.mark.parametrize(
    "split",
    [
        {"data__micro_batch_size_per_gpu": 2},
        {"data__use_dynamic_bsz": True, "data__max_token_len_per_gpu": 24},
        {"data__pad_mode": "right"},
        {"model__use_remove_padding": False, "data__micro_batch_size_per_gpu": 4},
    ],
)
def test_numbers_do_not_depend_on_the_split(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path, split: dict[str, Any]
) -> None:
    def losses(**more: Any) -> list[float]:
        trainer = build_trainer(config(tiny_model_dir, files, tmp_path / "run", **more))
        batches = list(trainer.train_loader)
        return [trainer.train_step(b)["train/loss"] for b in batches] + [trainer.validate()["val/loss"]]

    assert losses(**split) == pytest.approx(losses(), rel=1e-5)


def test_resuming_repeats_the_uninterrupted_run_bit_for_bit(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "metrics.jsonl"
    schedule = {"optim__lr_scheduler_type": "cosine", "optim__lr_warmup_steps": 2}
    run_sft(config(tiny_model_dir, files, tmp_path / "whole", trainer__total_training_steps=7, **schedule))
    whole = [m["train/loss"] for m in logged(log)]
    log.unlink()

    # stops after step 4, in the middle of the second epoch (3 steps each)
    saving = {"trainer__save_freq": 2, "trainer__total_training_steps": 7, **schedule}
    settings = config(tiny_model_dir, files, tmp_path / "parts", **saving)
    first = build_trainer(settings)
    first.total_steps = 4
    first.fit()
    first.tracker.finish()
    last = run_sft(settings)
    assert [m["train/loss"] for m in logged(log)] == whole
    assert last["training/global_step"] == 7.0
    assert last["training/epoch"] == pytest.approx(7 / 3)
    ours, theirs = weights(tmp_path / "whole" / "huggingface"), weights(tmp_path / "parts" / "huggingface")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sorted(p.name for p in (tmp_path / "parts").glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
        "global_step_6",
        "global_step_7",
    ]
    assert (tmp_path / "parts" / "latest_checkpointed_iteration.txt").read_text().strip() == "7"


def test_training_lowers_both_losses_and_exports_a_loadable_model(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path
) -> None:
    more = {"trainer__total_training_steps": 40, "optim__lr": 1e-2, "trainer__test_freq": 10}
    run_sft(config(tiny_model_dir, files, tmp_path / "run", **more))
    metrics = logged(tmp_path / "metrics.jsonl")
    assert len(metrics) == 40
    assert metrics[0]["train/loss"] > 4.0
    assert metrics[-1]["train/loss"] < 0.8
    validated = [m["val/loss"] for m in metrics if "val/loss" in m]
    assert len(validated) == 4
    assert validated[-1] < validated[0]
    assert {"timing_s/step", "perf/throughput", "train/grad_norm", "train/lr", "training/epoch"} <= set(metrics[0])

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "huggingface", dtype=torch.float32)
    loss = plain_loss(model, tokenizer, rows(7)).item()
    assert loss == pytest.approx(validated[-1], rel=1e-4)


def test_custom_data_set(tiny_model_dir: str, files: tuple[str, str], tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "from verl.data.sft_dataset import SFTDataset\nclass Mine(SFTDataset):\n    def __len__(self): return 8\n"
    )
    more = {"data__custom_cls__path": code, "data__custom_cls__name": "Mine"}
    assert len(build_trainer(config(tiny_model_dir, files, tmp_path / "run", **more)).train_loader) == 1


def test_command_line(
    tiny_model_dir: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = overrides(tiny_model_dir, files, tmp_path / "run", trainer__total_training_steps=1)
    assert main_sft.main([w for w in words if "n_gpus" not in w]) == 0
    assert (tmp_path / "run" / "huggingface" / "model.safetensors").is_file()

    assert main_sft.main([*words, "trainer.n_gpus_per_node=2"]) == 2
    assert "2 processes, but 1 started; start them with torchrun" in capsys.readouterr().err
    assert main_sft.main([*words, "data.train_files=gone.parquet"]) == 2
    assert "gone.parquet" in capsys.readouterr().err
    assert main_sft.main([*words, "data.response_key=answer"]) == 2
    assert "no column 'answer'; it has 'prompt', 'response'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main_sft.main([*words, "optim.lrr=1"])
    assert stop.value.code == 2


def test_processes_are_counted_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main_sft.processes_started([]) == ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    assert main_sft.processes_started(["trainer.nnodes=1"]) == ["trainer.n_gpus_per_node=4"]
    with pytest.raises(ConfigError, match="is 1 processes, but 8 started"):
        main_sft.check_processes(SFTConfig(trainer=SFTTrainerConfig(n_gpus_per_node=1)), "verl.trainer.main_sft")


@pytest.mark.dist
def test_two_ranks_give_the_numbers_of_one(tiny_model_dir: str, files: tuple[str, str], tmp_path: Path) -> None:
    def run(world: int, root: Path, steps: int, **changes: Any) -> list[dict[str, Any]]:
        log = root.with_suffix(".jsonl")
        words = overrides(
            tiny_model_dir,
            files,
            root,
            trainer__total_training_steps=steps,
            trainer__save_freq=2,
            trainer__test_freq=1,
            trainer__n_gpus_per_node=world,
            data__micro_batch_size_per_gpu=2,
            **changes,
        )
        command = [sys.executable, "-m", "verl.trainer.fsdp_sft_trainer"]
        if world > 1:
            launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={world}", f"--master_port={free_port()}"]
            command = [sys.executable, *launcher, "-m", "verl.trainer.fsdp_sft_trainer"]
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
        done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return logged(log)

    one, two = run(1, tmp_path / "one", 3), run(2, tmp_path / "two", 3)
    shared = run(2, tmp_path / "shared", 3, model__fsdp_config__ulysses_sequence_parallel_size=2)
    for name in ("train/loss", "val/loss", "train/grad_norm", "train/tokens"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=2e-5), name
        assert [m[name] for m in shared] == pytest.approx([m[name] for m in one], rel=2e-5), name
    ours, theirs = weights(tmp_path / "one" / "huggingface"), weights(tmp_path / "two" / "huggingface")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)
    # two ranks go on from their own checkpoint
    more = run(2, tmp_path / "two", 4)
    assert [m["training/global_step"] for m in more[3:]] == [4.0]


def test_background_saves_the_best_and_adapters(tiny_model_dir: str, files: tuple[str, str], tmp_path: Path) -> None:
    more = {
        "trainer__save_freq": 1,
        "trainer__test_freq": 1,
        "trainer__max_ckpt_to_keep": 1,
        "trainer__best_ckpt_metric": "val/loss",
        "trainer__best_ckpt_mode": "min",
        "trainer__checkpoint__async_save": True,
        "trainer__checkpoint__save_contents": "[model,optimizer,extra]",
        "model__lora_rank": 4,
        "optim__lr": 1e-2,
    }
    run_sft(config(tiny_model_dir, files, tmp_path / "run", **more))
    losses = {row["training/global_step"]: row["val/loss"] for row in logged(tmp_path / "metrics.jsonl")}
    best = int(min(losses, key=lambda step: losses[step]))
    kept = sorted(int(path.name.rpartition("_")[2]) for path in (tmp_path / "run").glob("global_step_*"))
    assert kept == sorted({best, 4})
    assert losses[4] < losses[1]
    assert (tmp_path / "run" / "global_step_4" / "lora_adapter" / "adapter_model.safetensors").is_file()
    base, tuned = weights(Path(tiny_model_dir)), weights(tmp_path / "run" / "huggingface")  # merged
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in base if not torch.equal(base[name], tuned[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

"""Supervised fine-tuning and DPO on Megatron-core, on two gloo ranks: the numbers of the FSDP2 engine."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine.ranks import run_ranks
from verl.config import PreferenceConfig, SFTConfig, load_config

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]

LETTERS = "abcdefgh"
SAME = ("train/loss", "val/loss", "train/grad_norm", "train/tokens", "train/lr")
TENSOR = {"model.strategy": "megatron", "model.megatron.tensor_model_parallel_size": 2}
STAGES = {"model.strategy": "megatron", "model.megatron.pipeline_model_parallel_size": 2}
REPLICAS = {"model.strategy": "megatron"}


def write_data(directory: Path) -> None:
    """Answers and pairs of answers of different lengths."""
    for name, count in (("train", 24), ("val", 6)):
        rows = [
            {
                "prompt": LETTERS[i % 8] * (1 + i % 3),
                "response": LETTERS[i % 8] * (1 + i % 5),
                "chosen": LETTERS[i % 4] * (1 + i % 4),
                "rejected": LETTERS[4 + i % 4] * (1 + i % 2),
            }
            for i in range(count)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(kind: str, model: str, work: Path, name: str, world: int, steps: int, **more: Any) -> list[dict[str, Any]]:
    """Train in this process, or with the others of its group; the logged metrics."""
    from verl.trainer import preference_trainer, sft_trainer

    settings = {
        "data.train_files": work / "train.jsonl",
        "data.val_files": work / "val.jsonl",
        "data.train_batch_size": 8,
        "data.micro_batch_size_per_gpu": 2,
        "data.max_length": 16,
        "model.path": model,
        "optim.lr": 1e-3,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": 1,
        "trainer.n_gpus_per_node": world,
        "trainer.device": "cpu",
        "trainer.default_local_dir": work / name,
        "trainer.logger": "[file]",
    } | more
    log = work / f"{name}.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    words = [f"{key}={value}" for key, value in settings.items()]
    if kind == "sft":
        sft_trainer.run_sft(load_config(SFTConfig, "sft_trainer", words))
    else:
        preference_trainer.run_preference(load_config(PreferenceConfig, "preference_trainer", words))
    return [json.loads(line)["data"] for line in log.read_text().splitlines()] if log.exists() else []


def two_ranks(rank: int, model: str, work: str) -> None:
    from verl.workers.engine.megatron.parallel import leave_parallel_groups

    where = Path(work)

    def trained(kind: str, name: str, steps: int, sizes: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        leave_parallel_groups()
        rows = run(kind, model, where, name, 2, steps, **sizes, **more)
        torch.distributed.barrier()
        return rows if rank == 0 else []

    expected = json.loads((where / "expected.json").read_text())
    saving = {"trainer.save_freq": 2}
    for name, sizes in (("tensor", TENSOR), ("stages", STAGES), ("replicas", REPLICAS)):
        for row, other in zip(trained("sft", name, 3, sizes, **saving), expected["sft"], strict=False):
            assert {key: row[key] for key in SAME} == pytest.approx({key: other[key] for key in SAME}, rel=3e-5), name
    for row, other in zip(trained("dpo", "dpo", 2, TENSOR), expected["dpo"], strict=False):
        for key in other:
            if key.startswith(("train/", "val/")):
                assert (key, row[key]) == (key, pytest.approx(other[key], rel=1e-4, abs=1e-5))
    # a run that was saved with two tensor-parallel ranks goes on in two stages
    more = trained("sft", "tensor", 4, STAGES, **saving)
    assert [row["training/global_step"] for row in more[3:]] == ([4.0] if rank == 0 else [])


def test_fine_tuning(tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "")  # restored afterwards
    write_data(tmp_path)
    schedule = {"trainer.save_freq": 2}
    expected = {
        "sft": run("sft", tiny_model_dir, tmp_path, "plain", 1, 3, **schedule),
        "dpo": run("dpo", tiny_model_dir, tmp_path, "plain_dpo", 1, 2),
    }
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    run_ranks(2, two_ranks, tiny_model_dir, str(tmp_path))

    def weights(name: str) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "huggingface", dtype=torch.float32)
        return dict(model.state_dict())

    plain = weights("plain")
    for name in ("stages", "replicas"):  # the other one went on
        assert all(torch.allclose(tensor, plain[key], atol=1e-5) for key, tensor in weights(name).items()), name

"""What the quick starts share: command line, form of the data, and the programs that they run one after the other."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import report_run
from shell import run

Sets = dict[str, list[dict[str, Any]]]

# ---- making model and data -------------------------------------------------------------------------------------------


def task_parser(doc: str | None, output: str, *, sft: int, train: int, val: int) -> argparse.ArgumentParser:
    """The command line of a program that makes a model and data; the numbers are default sizes of the sets."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--seed", type=int, default=1, help="seed of the model's weights and of the data")
    parser.add_argument("--sft", type=int, default=sft, help="demonstrations")
    parser.add_argument("--train", type=int, default=train, help="training prompts")
    parser.add_argument("--val", type=int, default=val, help="validation prompts")
    return parser


def rl_row(
    data_source: str, message: str, truth: str, *, ability: str, split: str, index: int, **extra: Any
) -> dict[str, Any]:
    """A row for reinforcement learning; ``extra`` goes to its ``extra_info``."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": message}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def save_sets(directory: Path, sets: Sets) -> Sets:
    """Write each set as Parquet; returns them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    return sets


def print_task(output: Path, parameters: int, sets: Sets) -> None:
    """Say what was made."""
    counts = ", ".join(f"{name} {len(rows)}" for name, rows in sets.items())
    print(f"{output}: model with {parameters:,} parameters; rows: {counts}")
    print("a demonstration:", sets["sft"][0], "\na prompt:", sets["train"][0])


# ---- fine-tuning and reinforcement learning --------------------------------------------------------------------------


def run_parser(doc: str | None) -> argparse.ArgumentParser:
    """The command line of a quick start."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="worker processes (on GPUs: number of GPUs)")
    parser.add_argument("--output", type=Path, default=None, help="default: a directory of its own below outputs/")
    parser.add_argument("overrides", nargs="*", help="more key=value pairs for the RL command")
    return parser


def sft_command(output: Path, seed: int, settings: Sequence[str]) -> list[str]:
    """Supervised warm-up of the model that the task's program has made."""
    return [
        "-m",
        "verl.trainer.main_sft",
        f"data.train_files={output}/data/sft.parquet",
        "data.train_batch_size=64",
        f"model.path={output}/model",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=2e-3",
        "optim.betas=[0.9,0.98]",
        "optim.lr_warmup_steps=30",
        *settings,
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={output}/sft",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
    ]


def rl_command(output: Path, seed: int, workers: int, experiment: str, settings: Sequence[str]) -> list[str]:
    """Reinforcement learning from the warmed-up model."""
    return [
        "-m",
        "verl.trainer.main_ppo",
        f"data.train_files={output}/data/train.parquet",
        f"data.val_files={output}/data/val.parquet",
        f"actor_rollout_ref.model.path={output}/sft/huggingface",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.99]",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=8",
        *settings,
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={workers}",
        "trainer.val_before_train=True",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={experiment}-seed{seed}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={output}/checkpoints",
        f"trainer.validation_data_dir={output}/validation",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
    ]


def run_experiment(
    output: Path,
    seed: int,
    *,
    task: Sequence[str],
    sft: Sequence[str],
    rl: Sequence[str],
    title: str,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run the three programs and show what came of it.

    Args:
        output: directory for everything.
        seed: of the run.
        task: command that makes model and data; it is given ``output`` and ``seed``.
        sft: command of the warm-up.
        rl: command of reinforcement learning.
        title: of the picture.
        env: further environment variables of the last command.
    """
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    run([*task, "--output", str(output), "--seed", str(seed)], output / "make_task.log")
    run(list(sft), output / "sft.log")
    metrics_file = output / "metrics.jsonl"
    metrics_file.unlink(missing_ok=True)
    run(list(rl), output / "rl.log", env={"VERL_FILE_LOGGER_PATH": str(metrics_file), **(env or {})})

    report_run(output, seed, time.perf_counter() - started, title)

"""The agent quick start: a tiny language model learns to use a calculator, through the ordinary entry points.

    python examples/agent/run.py --seed 1

makes an 802k-parameter model, its tokenizer and the data (products that so small a model cannot compute), shows it
demonstrations of which a third call the calculator and the others guess, then improves it with GRPO: calling the tool
is what gets rewards. The commands that it runs are printed: copy them and change them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PATHS = (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))

from report import draw_reward_curve, print_phases, print_table, read_metrics, show_samples, summarise  # noqa: E402
from shell import run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="worker processes (on GPUs: number of GPUs)")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart-agent"))
    parser.add_argument("overrides", nargs="*", help="more key=value pairs for the RL command")
    arguments = parser.parse_args()
    output, seed = arguments.output, arguments.seed
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    run([str(HERE / "make_task.py"), "--output", str(output), "--seed", str(seed)], output / "make_task.log")
    run(sft_command(output, seed), output / "sft.log")
    metrics_file = output / "metrics.jsonl"
    metrics_file.unlink(missing_ok=True)
    run(
        rl_command(output, seed, arguments.workers) + arguments.overrides,
        output / "rl.log",
        # the tool and the format are imported by name, by workers too
        env={"VERL_FILE_LOGGER_PATH": str(metrics_file), "PYTHONPATH": os.pathsep.join(path for path in PATHS if path)},
    )

    metrics = read_metrics(metrics_file)
    result: dict[str, Any] = summarise(metrics) | {"seconds": round(time.perf_counter() - started, 1), "seed": seed}
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_reward_curve(metrics, output / "reward.png", title=f"products with a calculator, GRPO, seed {seed}")
    show_samples(output / "validation", count=4)
    print_phases(metrics)
    print_table(result)
    print(f"reward curve: {output / 'reward.png'}   trajectories: {output / 'traces'}/   all metrics: {metrics_file}")


def sft_command(output: Path, seed: int) -> list[str]:
    """Supervised warm-up: enough to call the calculator now and then, and to copy its answer."""
    return [
        "-m",
        "verl.trainer.main_sft",
        f"data.train_files={output}/data/sft.parquet",
        "data.multiturn.enable=True",
        "data.train_batch_size=64",
        "data.max_length=48",
        f"model.path={output}/model",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=2e-3",
        "optim.betas=[0.9,0.98]",
        "optim.lr_warmup_steps=30",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.1",
        "trainer.total_training_steps=300",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={output}/sft",
        f"trainer.seed={seed}",
    ]


def rl_command(output: Path, seed: int, workers: int) -> list[str]:
    """Reinforcement learning from the warmed-up model; rows go through the tool agent."""
    rollout = "actor_rollout_ref.rollout"
    return [
        "-m",
        "verl.trainer.main_ppo",
        f"data.train_files={output}/data/train.parquet",
        f"data.val_files={output}/data/val.parquet",
        "data.train_batch_size=32",
        "data.max_prompt_length=12",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={output}/sft/huggingface",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "algorithm.adv_estimator=grpo",
        f"{rollout}.name=hf",
        f"{rollout}.n=8",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.tool_config_path={HERE}/tools.yaml",
        f"{rollout}.multi_turn.format=calculator",
        f"{rollout}.multi_turn.max_assistant_turns=2",
        f"{rollout}.agent.trace_dir={output}/traces",
        "actor_rollout_ref.model.external_lib=examples.agent.calculator",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.99]",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "trainer.total_training_steps=40",
        "trainer.test_freq=20",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={workers}",
        "trainer.val_before_train=True",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name=agent-seed{seed}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={output}/checkpoints",
        f"trainer.validation_data_dir={output}/validation",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
    ]


if __name__ == "__main__":
    main()

"""The quick start: a tiny language model learns a task by reinforcement learning, through the ordinary entry points.

    python examples/quickstart/run.py --algorithm grpo --seed 1

makes a 343k-parameter model, its tokenizer and the data of a verifiable task (sort five digits), warms the
model up with supervised fine-tuning on demonstrations of which many are wrong, then improves it with GRPO or PPO.
The commands that it runs are printed: copy them and change them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from report import draw_reward_curve, print_phases, print_table, read_metrics, show_samples, summarise  # noqa: E402
from shell import run  # noqa: E402

COMMON = [
    "data.train_batch_size=64",
    "data.max_prompt_length=24",
    "data.max_response_length=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.optim.betas=[0.9,0.99]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.nnodes=1",
    "trainer.val_before_train=True",
    "trainer.project_name=quickstart",
]
ALGORITHMS = {
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "trainer.total_training_steps=60",
        "trainer.test_freq=20",
    ],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=1.0",
        "algorithm.lam=1.0",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "critic.optim.lr=1e-3",
        "critic.optim.lr_warmup_steps=3",
        "critic.ppo_mini_batch_size=16",
        "critic.model.enable_gradient_checkpointing=False",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=60",
        "trainer.test_freq=20",
    ],
}
# the policy's weights are divided over the workers, which all see every sample
ALGORITHMS["megatron"] = [
    *ALGORITHMS["grpo"],
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="grpo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="worker processes (on GPUs: number of GPUs)")
    parser.add_argument("--output", type=Path, default=None, help="default: outputs/quickstart[-ALGORITHM]")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of the model; 3 for vLLM on CPUs")
    parser.add_argument("--kv-heads", type=int, default=2, help="heads of keys and values; 1 for vLLM on CPUs")
    parser.add_argument("overrides", nargs="*", help="more key=value pairs for the RL command")
    arguments = parser.parse_args()
    name = "quickstart" if arguments.algorithm == "grpo" else f"quickstart-{arguments.algorithm}"
    output = arguments.output or Path("outputs") / name
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    seed = arguments.seed

    model = ["--heads", str(arguments.heads), "--kv-heads", str(arguments.kv_heads)]
    run([str(HERE / "make_task.py"), "--output", str(output), "--seed", str(seed), *model], output / "make_task.log")
    run(sft_command(output, seed), output / "sft.log")
    metrics_file = output / "metrics.jsonl"
    metrics_file.unlink(missing_ok=True)
    run(
        rl_command(output, seed, arguments.algorithm, arguments.workers) + arguments.overrides,
        output / "rl.log",
        env={"VERL_FILE_LOGGER_PATH": str(metrics_file)},
    )

    metrics = read_metrics(metrics_file)
    result: dict[str, Any] = summarise(metrics) | {"seconds": round(time.perf_counter() - started, 1), "seed": seed}
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_reward_curve(
        metrics, output / "reward.png", title=f"sort five digits, {arguments.algorithm.upper()}, seed {seed}"
    )
    show_samples(output / "validation", count=4)
    print_phases(metrics)
    print_table(result)
    print(
        f"reward curve: {output / 'reward.png'}   all metrics: {metrics_file}   completions: {output / 'validation'}/"
    )


def sft_command(output: Path, seed: int) -> list[str]:
    """Supervised warm-up: enough to know the format and to be right sometimes."""
    return [
        "-m",
        "verl.trainer.main_sft",
        f"data.train_files={output}/data/sft.parquet",
        "data.train_batch_size=64",
        "data.max_length=40",
        f"model.path={output}/model",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=2e-3",
        "optim.betas=[0.9,0.98]",
        "optim.lr_warmup_steps=30",
        "trainer.total_training_steps=100",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={output}/sft",
        f"trainer.seed={seed}",
    ]


def rl_command(output: Path, seed: int, algorithm: str, workers: int) -> list[str]:
    """Reinforcement learning from the warmed-up model."""
    return [
        "-m",
        "verl.trainer.main_ppo",
        f"data.train_files={output}/data/train.parquet",
        f"data.val_files={output}/data/val.parquet",
        f"actor_rollout_ref.model.path={output}/sft/huggingface",
        *COMMON,
        *ALGORITHMS[algorithm],
        f"trainer.n_gpus_per_node={workers}",
        f"trainer.experiment_name={algorithm}-seed{seed}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={output}/checkpoints",
        f"trainer.validation_data_dir={output}/validation",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
    ]


if __name__ == "__main__":
    main()

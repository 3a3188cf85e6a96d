"""A real language model learns on a CPU: SmolLM2-135M-Instruct, GRPO, one-digit sums from reasoning-gym.

    python examples/smollm2/run.py

prepares the model and the data (``prepare.py``), trains with the ordinary entry point and shows completions before
and after. On GPUs the same command runs with other device, precision and engine keys, for example
``python examples/smollm2/run.py trainer.n_gpus_per_node=8``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from report import report_run  # noqa: E402
from shell import run  # noqa: E402


def rl_command(output: Path, seed: int, steps: int) -> list[str]:
    """GRPO on the prepared model and data."""
    return [
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={output}/data/train.parquet",
        f"data.val_files={output}/data/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        f"custom_reward_function.path={HERE}/reward.py",
        f"actor_rollout_ref.model.path={output}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=10",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        "trainer.project_name=smollm2",
        f"trainer.experiment_name=grpo-seed{seed}",
        f"trainer.default_local_dir={output}/checkpoints",
        f"trainer.validation_data_dir={output}/validation",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("overrides", nargs="*", help="more key=value pairs for the RL command")
    arguments = parser.parse_args()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    run([str(HERE / "prepare.py"), "--output", str(output)], output / "prepare.log")
    metrics_file = output / "metrics.jsonl"
    metrics_file.unlink(missing_ok=True)
    run(
        rl_command(output, arguments.seed, arguments.steps) + arguments.overrides,
        output / "rl.log",
        env={"VERL_FILE_LOGGER_PATH": str(metrics_file)},
    )
    title = "SmolLM2-135M-Instruct, GRPO on one-digit sums"
    report_run(output, arguments.seed, time.perf_counter() - started, title, last=10, samples=6)


if __name__ == "__main__":
    main()

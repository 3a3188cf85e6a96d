"""The quick start: a tiny language model learns a task by reinforcement learning, through the ordinary entry points.

    python examples/quickstart/run.py --algorithm grpo --seed 1

makes a 343k-parameter model, its tokenizer and the data of a verifiable task (sort five digits), warms the
model up with supervised fine-tuning on demonstrations of which many are wrong, then improves it with GRPO or PPO.
The commands that it runs are printed: copy them and change them.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny_experiment  # noqa: E402

COMMON = [
    "data.train_batch_size=64",
    "data.max_prompt_length=24",
    "data.max_response_length=12",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "trainer.total_training_steps=60",
    "trainer.test_freq=20",
]
ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=1.0",
        "algorithm.lam=1.0",
        "critic.optim.lr=1e-3",
        "critic.optim.lr_warmup_steps=3",
        "critic.ppo_mini_batch_size=16",
        "critic.model.enable_gradient_checkpointing=False",
        "trainer.critic_warmup=2",
    ],
}
# the policy's weights are divided over the workers, which all see every sample
ALGORITHMS["megatron"] = [
    *ALGORITHMS["grpo"],
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
]


def main() -> None:
    parser = tiny_experiment.run_parser(__doc__)
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="grpo")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of the model; 3 for vLLM on CPUs")
    parser.add_argument("--kv-heads", type=int, default=2, help="heads of keys and values; 1 for vLLM on CPUs")
    arguments = parser.parse_args()
    algorithm, seed = arguments.algorithm, arguments.seed
    output = arguments.output or Path("outputs") / ("quickstart" if algorithm == "grpo" else f"quickstart-{algorithm}")
    settings = [*COMMON, *ALGORITHMS[algorithm], *arguments.overrides]
    model = ["--heads", str(arguments.heads), "--kv-heads", str(arguments.kv_heads)]
    tiny_experiment.run_experiment(
        output,
        seed,
        task=[str(HERE / "make_task.py"), *model],
        sft=sft_command(output, seed),
        rl=tiny_experiment.rl_command(output, seed, arguments.workers, algorithm, settings),
        title=f"sort five digits, {algorithm.upper()}, seed {seed}",
    )


def sft_command(output: Path, seed: int) -> list[str]:
    """Supervised warm-up: enough to know the format and to be right sometimes."""
    return tiny_experiment.sft_command(output, seed, ["data.max_length=40", "trainer.total_training_steps=100"])


if __name__ == "__main__":
    main()

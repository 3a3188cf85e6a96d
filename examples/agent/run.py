"""The agent quick start: a tiny language model learns to use a calculator, through the ordinary entry points.

    python examples/agent/run.py --seed 1

makes an 802k-parameter model, its tokenizer and the data (products that so small a model cannot compute), shows it
demonstrations of which a third call the calculator and the others guess, then improves it with GRPO: calling the tool
is what gets rewards. The commands that it runs are printed: copy them and change them.

``--rollout vllm`` generates with vLLM in a rollout server beside the training worker; the rest is the same. ``--agent``
replaces the built-in tool agent by a program of its own, written with OpenAI's client or the OpenAI Agents SDK.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny_experiment  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = [
    "data.train_batch_size=32",
    "data.max_prompt_length=12",
    "data.max_response_length=32",
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.multi_turn.format=calculator",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
    "actor_rollout_ref.model.external_lib=examples.agent.calculator",
    "actor_rollout_ref.actor.optim.lr=3e-4",
    "trainer.total_training_steps=24",
    "trainer.test_freq=12",
]
#: what takes the model's turns further: the built-in loop with tools, or a program that talks to the model over HTTP
AGENTS = {
    "built-in": [
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.tool_config_path={HERE}/tools.yaml",
    ]
} | {
    program: [f"{ROLLOUT}.agent.openai_agent.path={HERE}/{program}.py", f"{ROLLOUT}.agent.timeout_s=120"]
    for program in ("openai_client", "agents_sdk")
}
#: two processes of agent loops are as many as a small machine has cores for
SERVERS = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.num_workers=2"]


def main() -> None:
    parser = tiny_experiment.run_parser(__doc__)
    parser.add_argument("--rollout", choices=("hf", "vllm"), default="hf", help="what generates")
    parser.add_argument("--agent", choices=sorted(AGENTS), default="built-in", help="what runs the conversation")
    arguments = parser.parse_args()
    seed, rollout, agent = arguments.seed, arguments.rollout, arguments.agent
    parts = ["quickstart-agent", *(part for part in (agent, rollout) if part not in ("built-in", "hf"))]
    output = arguments.output or Path("outputs") / "-".join(parts)
    settings = [
        *SETTINGS,
        *AGENTS[agent],
        *(SERVERS if rollout == "vllm" else ()),
        f"{ROLLOUT}.agent.trace_dir={output}/traces",
        *arguments.overrides,
    ]
    # the tool and the format are imported by name, by workers too
    paths = os.pathsep.join(path for path in (str(HERE.parents[1]), os.environ.get("PYTHONPATH")) if path)
    tiny_experiment.run_experiment(
        output,
        seed,
        task=[str(HERE / "make_task.py")],
        sft=sft_command(output, seed),
        rl=tiny_experiment.rl_command(output, seed, arguments.workers, "agent", settings),
        title=f"products with a calculator, GRPO, seed {seed}",
        env={"PYTHONPATH": paths},
    )
    print(f"trajectories: {output / 'traces'}/")


def sft_command(output: Path, seed: int) -> list[str]:
    """Supervised warm-up: enough to call the calculator now and then, and to copy its answer."""
    settings = [
        "data.multiturn.enable=True",
        "data.max_length=48",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.1",
        "trainer.total_training_steps=280",
    ]
    return tiny_experiment.sft_command(output, seed, settings)


if __name__ == "__main__":
    main()

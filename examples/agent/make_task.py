"""Make the agent quick start's model and data: products of two-digit numbers, with a calculator at hand.

    python examples/agent/make_task.py --output outputs/quickstart-agent --seed 1

writes a randomly initialised 801,920-parameter model with its tokenizer (``model/``) and three Parquet files
(``data/``). In ``sft.parquet`` some demonstrations call the calculator and copy its answer, most guess a number at
once. ``train.parquet`` and ``val.parquet`` are prompts in the reinforcement-learning schema; no validation prompt
appears elsewhere.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(EXAMPLES / "quickstart"), str(EXAMPLES)]

from tiny_experiment import print_task, rl_row, save_sets, task_parser  # noqa: E402
from tiny_model import save_tiny_model  # noqa: E402

# sources that start with final_answer/ are scored by the number after "####", as GSM8K's answers are
DATA_SOURCE = "final_answer/products"
Pair = tuple[int, int]


def question(pair: Pair) -> dict[str, str]:
    """The user's message."""
    return {"role": "user", "content": f"{pair[0]}*{pair[1]}=?"}


def demonstration(pair: Pair, calls: bool, generator: random.Random) -> dict[str, Any]:
    """A conversation for fine-tuning: with a call of the calculator, or with a guess."""
    product = pair[0] * pair[1]
    if not calls:
        guess = generator.randint(100, 9801)
        return {"messages": [question(pair), {"role": "assistant", "content": f"#### {guess}"}]}
    return {
        "messages": [
            question(pair),
            {"role": "assistant", "content": f"<tool_call>{pair[0]}*{pair[1]}</tool_call>"},
            {"role": "tool", "content": str(product)},
            {"role": "assistant", "content": f"#### {product}"},
        ]
    }


def prompt_row(pair: Pair, split: str, index: int) -> dict[str, Any]:
    """A row for reinforcement learning."""
    truth = str(pair[0] * pair[1])
    return rl_row(DATA_SOURCE, question(pair)["content"], truth, ability="arithmetic", split=split, index=index)


def make_data(directory: Path, *, seed: int, sft: int, train: int, val: int, calls: float) -> dict[str, list[Any]]:
    """Draw the three sets, write them as Parquet and return them by name."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    generator.shuffle(pairs)
    held_out, rest = pairs[:val], pairs[val:]
    sets: dict[str, list[Any]] = {
        "sft": [demonstration(generator.choice(rest), generator.random() < calls, generator) for _ in range(sft)],
        "train": [prompt_row(generator.choice(rest), "train", index) for index in range(train)],
        "val": [prompt_row(pair, "val", index) for index, pair in enumerate(held_out)],
    }
    return save_sets(directory, sets)


def main() -> None:
    parser = task_parser(__doc__, "outputs/quickstart-agent", sft=17920, train=768, val=100)
    parser.add_argument("--calls", type=float, default=0.35, help="part of the demonstrations with the calculator")
    arguments = parser.parse_args()
    # heads of 32 values, which every engine serves on CPUs
    parameters = save_tiny_model(
        arguments.output / "model", hidden=128, layers=4, heads=4, seed=arguments.seed, initializer_range=0.08
    )
    sets = make_data(
        arguments.output / "data",
        seed=arguments.seed,
        sft=arguments.sft,
        train=arguments.train,
        val=arguments.val,
        calls=arguments.calls,
    )
    print_task(arguments.output, parameters, sets)


if __name__ == "__main__":
    main()

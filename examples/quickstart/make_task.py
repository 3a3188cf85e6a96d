"""Make the quick start's model and data: sort five digits.

    python examples/quickstart/make_task.py --output outputs/quickstart --seed 1

writes a randomly initialised 343,008-parameter model with its tokenizer (``model/``) and three Parquet files
(``data/``): ``sft.parquet`` with demonstrations, of which some put the digits in the wrong order, and ``train.parquet``
and ``val.parquet`` with prompts in the reinforcement-learning schema. No validation prompt appears elsewhere.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from tiny_experiment import print_task, rl_row, save_sets, task_parser  # noqa: E402
from tiny_model import save_tiny_model  # noqa: E402

DIGITS = 5
# sources that start with final_answer/ are scored by the number after "####", as GSM8K's answers are
DATA_SOURCE = "final_answer/sort_digits"


def question(digits: str) -> str:
    """The user's message."""
    return f"sort {digits}"


def answer(digits: str) -> str:
    """The right answer."""
    return "".join(sorted(digits))


def demonstration(digits: str, good: bool) -> dict[str, str]:
    """A row for fine-tuning; a bad one sorts in descending order."""
    result = answer(digits) if good else answer(digits)[::-1]
    return {"prompt": question(digits), "response": f"#### {result}"}


def prompt_row(digits: str, split: str, index: int) -> dict[str, Any]:
    """A row for reinforcement learning."""
    return rl_row(DATA_SOURCE, question(digits), answer(digits), ability="sorting", split=split, index=index)


def make_data(
    directory: Path, *, seed: int, sft: int, train: int, val: int, good_fraction: float
) -> dict[str, list[dict[str, Any]]]:
    """Draw the three sets, write them as Parquet and return them by name."""
    generator = random.Random(seed)
    held_out = generator.sample(range(10**DIGITS), val)
    reserved = set(held_out)

    def draw(count: int) -> list[str]:
        out: list[str] = []
        while len(out) < count:
            number = generator.randrange(10**DIGITS)
            if number not in reserved:
                out.append(f"{number:0{DIGITS}d}")
        return out

    sets: dict[str, list[dict[str, Any]]] = {
        "sft": [demonstration(digits, generator.random() < good_fraction) for digits in draw(sft)],
        "train": [prompt_row(digits, "train", index) for index, digits in enumerate(draw(train))],
        "val": [prompt_row(f"{number:0{DIGITS}d}", "val", index) for index, number in enumerate(held_out)],
    }
    return save_sets(directory, sets)


def main() -> None:
    parser = task_parser(__doc__, "outputs/quickstart", sft=6400, train=3840, val=200)
    parser.add_argument("--good-fraction", type=float, default=0.65, help="part of the demonstrations that is right")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of the model, of 96 values in all")
    parser.add_argument("--kv-heads", type=int, default=2, help="heads of keys and values")
    arguments = parser.parse_args()
    parameters = save_tiny_model(
        arguments.output / "model",
        seed=arguments.seed,
        initializer_range=0.1,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
    )
    sets = make_data(
        arguments.output / "data",
        seed=arguments.seed,
        sft=arguments.sft,
        train=arguments.train,
        val=arguments.val,
        good_fraction=arguments.good_fraction,
    )
    print_task(arguments.output, parameters, sets)


if __name__ == "__main__":
    main()

"""One algorithm, one command: a tiny language model learns to sort five digits.

    python examples/recipes/run.py dapo

makes the task and a fine-tuned model once (kept in ``outputs/recipes``), trains with the recipe ``dapo.yaml`` beside
this file and shows the reward before and after. The training command is printed; it runs alone from then on, and
unchanged on GPUs (add ``trainer.n_gpus_per_node=<GPUs>``). Without a name the recipes are listed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(HERE.parent))

from report import print_table, read_metrics, series, summarise  # noqa: E402
from shell import run  # noqa: E402

RECIPES = sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "common")
DEFAULT_OUTPUT = Path("outputs/recipes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", choices=RECIPES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("overrides", nargs="*", help="more key=value pairs for the training command")
    arguments = parser.parse_intermixed_args()
    if arguments.recipe is None:
        for name in RECIPES:
            print(f"{name:30}{purpose(name)}")
        return
    prepare(arguments.output)
    result = train(arguments.recipe, arguments.output, arguments.seed, arguments.overrides)
    print_table(result)
    print(f"{result['seconds_per_step']:.2f} s per step")


def purpose(recipe: str) -> str:
    """What the recipe's opening comment says, up to the reference."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), (HERE / f"{recipe}.yaml").open())
    comment = " ".join(line.removeprefix("# ").strip() for line in lines)
    return comment.split(" (")[0]


def prepare(output: Path) -> None:
    """Make the task and the fine-tuned model, unless they are there."""
    if (output / "sft" / "huggingface" / "config.json").is_file():
        return
    output.mkdir(parents=True, exist_ok=True)
    run([str(QUICKSTART / "make_task.py"), "--output", str(output)], output / "make_task.log")
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART / "run.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    run(quickstart.sft_command(output, 1), output / "sft.log")


def command(recipe: str, output: Path, seed: int) -> list[str]:
    """The training command of a recipe."""
    paths = []
    if output != DEFAULT_OUTPUT:
        paths = [
            f"data.train_files={output}/data/train.parquet",
            f"data.val_files={output}/data/val.parquet",
            f"actor_rollout_ref.model.path={output}/sft/huggingface",
        ]
    return [
        "-m",
        "verl.trainer.main_ppo",
        f"--config-path={HERE}",
        f"--config-name={recipe}",
        *paths,
        f"trainer.experiment_name={recipe}-seed{seed}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={output}/checkpoints/{recipe}",
    ]


def train(recipe: str, output: Path, seed: int = 1, overrides: list[str] | None = None) -> dict[str, Any]:
    """Run a recipe and return its numbers: rewards, accuracies, seconds of a step (the median) and in all."""
    metrics = output / f"{recipe}.jsonl"
    metrics.unlink(missing_ok=True)
    started = time.perf_counter()
    run(
        [*command(recipe, output, seed), *(overrides or [])],
        output / f"{recipe}.log",
        env={"VERL_FILE_LOGGER_PATH": str(metrics)},
    )
    rows = read_metrics(metrics)
    seconds = sorted(series(rows, "timing_s/step")[1])
    result = summarise(rows) | {
        "recipe": recipe,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        "seconds_per_step": round(seconds[len(seconds) // 2], 3),
    }
    (output / f"{recipe}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()

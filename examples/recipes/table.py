"""Run the recipes one after another and write what they reached as a table.

    python examples/recipes/table.py --write docs/algorithms/recipes.md

Give names to run only some. Results of earlier runs in the output directory are used unless --again is given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from run import DEFAULT_OUTPUT, RECIPES, prepare, purpose, train  # type: ignore[import-not-found]

TITLE = """# Recipes

One file and one command for each algorithm, on the task of the [quick start](../quickstart.md): a 343,008-parameter
model sorts five digits.

```bash
python examples/recipes/run.py            # lists the recipes
python examples/recipes/run.py dapo       # runs one
```

A recipe (`examples/recipes/<name>.yaml`) says only what makes it that algorithm; `common.yaml` has what all share. The
command that is printed runs alone, and unchanged on GPUs.

Reward before and after is the mean score of 4 samples for each of 200 held-out prompts, sampled as in training.
Training reward is that of the first step and the mean of the last five; with dynamic sampling (`dapo`) it is that of
groups with a signal, which are never all right. Seconds per step are the median of a run, {steps} steps,
{machine}, seed 1. The sizes suit a laptop: the table shows that each algorithm works, not which one is best.

| recipe | | reward before | after | training reward first | last | s/step |
|---|---|--:|--:|--:|--:|--:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help=f"default: all of {', '.join(RECIPES)}")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--write", type=Path, help="Markdown file to write")
    parser.add_argument("--again", action="store_true", help="run recipes that have a result too")
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(RECIPES):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    prepare(arguments.output)
    results = []
    for recipe in arguments.recipes or RECIPES:
        known = arguments.output / f"{recipe}.json"
        if known.is_file() and not arguments.again:
            results.append(json.loads(known.read_text()))
        else:
            results.append(train(recipe, arguments.output))
    text = table(results)
    print(text)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text)
    if worse := [r["recipe"] for r in results if r["val_accuracy_last"] <= r["val_accuracy_first"]]:
        sys.exit(f"the reward did not rise: {', '.join(worse)}")


def table(results: list[dict[str, Any]]) -> str:
    """The page."""
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    rows = [
        f"| `{r['recipe']}` | {purpose(r['recipe'])} | {r['val_accuracy_first']:.3f} | {r['val_accuracy_last']:.3f} "
        f"| {r['reward_first']:.3f} | {r['reward_last']:.3f} | {r['seconds_per_step']:.2f} |"
        for r in sorted(results, key=lambda r: r["recipe"])
    ]
    steps = sorted({r["steps"] for r in results})
    return TITLE.format(steps=" or ".join(map(str, steps)), machine=machine) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()

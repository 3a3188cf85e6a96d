"""What the examples show at the end: a table, a picture and completions before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]


def read_metrics(path: Path) -> Rows:
    """The rows of a JSONL metrics file, each ``{"step": int, "data": {name: number}}``."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the metric called ``name``."""
    found = [(row["step"], row["data"][name]) for row in rows if name in row["data"]]
    return [step for step, _ in found], [value for _, value in found]


def validation_metric(rows: Rows) -> str | None:
    """The mean validation reward, whatever the data source is called; ``None`` for a run without validation."""
    names = {name for row in rows for name in row["data"] if name.startswith("val-core/") and "/mean@" in name}
    if len(names) > 1:
        raise SystemExit(f"expected one validation metric val-core/<data source>/.../mean@N, found {sorted(names)}")
    return names.pop() if names else None


def summarise(rows: Rows, last: int = 5) -> dict[str, Any]:
    """First and last rewards (the last is the mean over ``last`` steps), and validation accuracies where there are."""
    steps, rewards = series(rows, "critic/score/mean")
    result: dict[str, Any] = {
        "reward_first": round(rewards[0], 4),
        "reward_last": round(sum(rewards[-last:]) / len(rewards[-last:]), 4),
        "steps": steps[-1],
    }
    if (metric := validation_metric(rows)) is not None:
        _, accuracies = series(rows, metric)
        result |= {"val_accuracy_first": round(accuracies[0], 4), "val_accuracy_last": round(accuracies[-1], 4)}
    return result


def draw_reward_curve(rows: Rows, path: Path, title: str) -> None:
    """Sampled training reward and greedy validation accuracy over the steps, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(*series(rows, "critic/score/mean"), label="training reward (sampled)")
    if (metric := validation_metric(rows)) is not None:
        axes.plot(*series(rows, metric), "o-", label="validation accuracy (greedy)")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def show_samples(directory: Path, count: int) -> None:
    """Print the same validation prompts with their completions before and after training, if there was validation."""
    dumps = sorted(directory.glob("*.jsonl"), key=lambda file: int(file.stem))
    if not dumps:
        return
    before, after = (read_metrics(dumps[index])[:count] for index in (0, -1))
    table = Table(title=f"validation completions, step {dumps[0].stem} and step {dumps[-1].stem}", show_lines=True)
    for column in ("prompt", "ground truth", "before", "score", "after", "score"):
        table.add_column(column, overflow="fold")
    for old, new in zip(before, after, strict=True):
        cells = (old["input"], old["gts"], old["output"], f"{old['score']:g}", new["output"], f"{new['score']:g}")
        # completions are arbitrary text: escape what rich would read as markup
        table.add_row(*(str(cell).replace("[", r"\[") for cell in cells))
    Console(width=140).print(table)


def print_table(result: dict[str, Any]) -> None:
    """Print the summary as a small table."""
    table = Table(title="result")
    for column in ("", "first", "last"):
        table.add_column(column, justify="right")
    table.add_row("sampled reward", f"{result['reward_first']:.3f}", f"{result['reward_last']:.3f}")
    if "val_accuracy_last" in result:
        accuracies = (f"{result[f'val_accuracy_{when}']:.3f}" for when in ("first", "last"))
        table.add_row("validation accuracy", *accuracies)
    Console().print(table)
    Console().print(f"{result['steps']} steps, {result['seconds']:.0f} s in all")


def print_phases(rows: Rows) -> None:
    """Print the mean seconds of each phase of a step and the peak memory of a worker process."""
    table = Table(title="seconds per step")
    table.add_column("phase")
    table.add_column("mean", justify="right")
    steps = [row["data"] for row in rows if "timing_s/step" in row["data"]]
    for name in sorted({name for data in steps for name in data if name.startswith("timing_s/")}):
        # a phase that does not run every step counts where it ran
        seconds = [data[name] for data in steps if name in data]
        table.add_row(name.removeprefix("timing_s/"), f"{sum(seconds) / len(seconds):.2f}")
    Console().print(table)
    _, peaks = series(rows, "perf/cpu_memory_peak_gb")
    Console().print(f"peak memory of a worker process: {max(peaks):.2f} GB")


def report_run(output: Path, seed: int, seconds: float, title: str, *, last: int = 5, samples: int = 4) -> None:
    """Show and keep what came of a run whose metrics and validation are in ``output``.

    Args:
        output: directory; gets ``result.json`` and ``reward.png``.
        seed: of the run.
        seconds: that it took.
        title: of the picture.
        last: steps whose mean is the last reward.
        samples: completions to show.
    """
    metrics_file, picture = output / "metrics.jsonl", output / "reward.png"
    metrics = read_metrics(metrics_file)
    result: dict[str, Any] = summarise(metrics, last) | {"seconds": round(seconds, 1), "seed": seed}
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_reward_curve(metrics, picture, title)
    show_samples(output / "validation", samples)
    print_phases(metrics)
    print_table(result)
    written = f"reward curve: {picture}   all metrics: {metrics_file}"
    if (output / "validation").is_dir():
        written += f"   completions: {output / 'validation'}/"
    Console().print(written, soft_wrap=True)

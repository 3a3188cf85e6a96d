"""How long one GRPO step takes, phase by phase, and what TRL's GRPOTrainer needs for the same work.

    python benchmarks/bench_step.py --case small
    python benchmarks/bench_step.py --case medium --peer trl --trl-path .trl
    python benchmarks/bench_step.py --model DIR --prompts-file FILE --n 8 --prompts 16 --response-length 64

The step is the trainer's own: ``main_ppo``'s runner with ``trainer.controller=local``. Each side runs in a process of
its own; steps alternate, so that a busy machine slows both alike. CPU-seconds are compared; ratios are TRL's divided by
ours, larger is better. The last line is JSON.

TRL goes into a folder beside the environment, so that both sides use the same torch and Transformers:

    pip install --target .trl --no-deps trl==1.16.0 accelerate datasets dill multiprocess pandas xxhash
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from plots import saved_figure
from step.workload import PRECISIONS, REPOSITORY, Workload, make_medium, make_small, make_smollm2

PHASES = ("generate", "log_probs", "update", "sync")
#: seconds after which a step counts as hung
LONGEST_STEP = 1800

#: name -> (maker of model and prompts, settings)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "small": (
        make_small,
        {"prompts": 64, "mini_batches": 4, "prompt_length": 24, "response_length": 12, "fixed": True},
    ),
    "medium": (make_medium, {"response_length": 256}),
    "medium_fixed": (make_medium, {"prompts": 16, "mini_batches": 2, "response_length": 32, "fixed": True}),
    "smollm2": (make_smollm2, {"prompts": 4, "n": 4, "mini_batches": 1, "prompt_length": 64, "response_length": 64}),
}


class Side:
    """A process that does steps on request.

    Args:
        name: for messages.
        module: program to run, of the package ``step``.
        work: what to do.
        log: file for what it prints.
        path: folders to import from before all others.
    """

    def __init__(self, name: str, module: str, work: Workload, log: Path, path: list[str]) -> None:
        self.name = name
        self.work = work
        self.log = log
        self.steps: list[dict[str, Any]] = []
        self._pending = b""  # what has arrived of the next messages
        threads = {key: str(work.threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = (
            os.environ
            | threads
            | {
                "OMP_WAIT_POLICY": "PASSIVE",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "benchmarks"), str(REPOSITORY), *before, *path]),
            }
        )
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"step.{module}", work.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        self._read()  # ready for the first step

    def step(self, *, counted: bool = True) -> dict[str, Any]:
        """Do one step and wait until the side is ready for the next."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        result = self._read()
        self._read()
        if counted:
            self.steps.append(result)
        return result

    def close(self) -> None:
        """End the process, which waits for a step."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready = True
        while b"\n" not in self._pending and ready:
            ready = bool(select.select([self.process.stdout], [], [], LONGEST_STEP)[0])
            arrived = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            self._pending += arrived
            if not arrived:
                break
        line, _, self._pending = self._pending.partition(b"\n")
        if not line:
            self.process.kill()
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            reason = "ended" if ready else f"did not answer within {LONGEST_STEP} s"
            raise SystemExit(f"{self.name} {reason}; the end of {self.log}:\n{tail}")
        return json.loads(line)


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over steps: seconds per phase and tokens per second."""

    def mean(values: list[float]) -> float:
        return statistics.fmean(values)

    tokens = sum(step["tokens"] for step in steps)
    result: dict[str, Any] = {
        "steps": len(steps),
        "tokens_per_step": round(tokens / len(steps), 1),
        "mean_length": round(tokens / sum(step["rows"] for step in steps), 1),
        "cpu_s": mean([step["cpu_s"] for step in steps]),
        "wall_s": mean([step["wall_s"] for step in steps]),
        "tokens_per_cpu_s": tokens / sum(step["cpu_s"] for step in steps),
        "tokens_per_s": tokens / sum(step["wall_s"] for step in steps),
        "peak_rss_gb": max(step["peak_rss_gb"] for step in steps),
    }
    for clock in ("cpu", "wall"):
        phases = {
            name: mean([step[f"phases_{clock}_s"].get(name, 0.0) for step in steps])
            for name in PHASES
            if any(name in step[f"phases_{clock}_s"] for step in steps)
        }
        rest = result[f"{clock}_s"] - sum(phases.values())
        # TRL's update has no method of its own to time: what is left of its step is the update
        name = "other" if "update" in phases else "update"
        result[f"phases_{clock}_s"] = {k: round(v, 4) for k, v in {**phases, name: rest}.items()}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def describe_step(step: dict[str, Any], seconds: float) -> str:
    """A finished step on one line."""
    return f"{step['cpu_s']:.2f} CPU-s, {seconds:.2f} s, {step['tokens']:.0f} tokens, reward {step['reward']:.3f}"


def describe_summary(result: dict[str, Any]) -> str:
    """A side's means on one line."""
    phases = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in result["phases_cpu_s"].items())
    rate, length, peak = result["tokens_per_cpu_s"], result["mean_length"], result["peak_rss_gb"]
    cost = f"{result['cpu_s']:.2f} CPU-s a step ({phases}), {rate:.0f} tokens per CPU-s"
    return f"{cost}, mean length {length}, peak {peak:.2f} GB"


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """TRL's cost for a token divided by ours, end to end, by phase, and of wall time."""

    def rate(steps: list[dict[str, Any]], pick: Any) -> float:
        return sum(pick(step) for step in steps) / sum(step["tokens"] for step in steps)

    found = {
        "end_to_end": rate(theirs, lambda s: s["cpu_s"]) / rate(ours, lambda s: s["cpu_s"]),
        "end_to_end_wall": rate(theirs, lambda s: s["wall_s"]) / rate(ours, lambda s: s["wall_s"]),
        "generate": rate(theirs, lambda s: s["phases_cpu_s"]["generate"])
        / rate(ours, lambda s: s["phases_cpu_s"]["generate"]),
        "train": rate(theirs, lambda s: s["cpu_s"] - s["phases_cpu_s"]["generate"])
        / rate(ours, lambda s: s["cpu_s"] - s["phases_cpu_s"]["generate"]),
    }
    return {name: round(value, 2) for name, value in found.items()}


def draw(results: dict[str, Any], path: Path) -> None:
    """Stacked bars of the CPU-seconds per 1,000 completion tokens of every side."""
    with saved_figure(path) as (axis,):
        for row, side in enumerate(results.values()):
            left = 0.0
            for number, phase in enumerate((*PHASES, "other")):
                width = side["phases_cpu_s"].get(phase, 0.0) / side["tokens_per_step"] * 1000
                axis.barh(row, width, left=left, color=f"C{number}", label=phase if row == 0 else None)
                left += width
        axis.set_yticks(range(len(results)), list(results))
        axis.set_xlabel("CPU-seconds per 1,000 completion tokens")
        axis.legend(ncols=5, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


@contextlib.contextmanager
def opened(sides: dict[str, Side]) -> Iterator[dict[str, Side]]:
    """Close whatever was opened."""
    try:
        yield sides
    finally:
        for side in sides.values():
            side.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", choices=sorted(CASES), default="small", help="a prepared model with prompts and sizes"
    )
    parser.add_argument("--model", help="model directory, in place of the case's")
    parser.add_argument("--prompts-file", help="Parquet file of prompts, with --model")
    parser.add_argument("--prompts", type=int, help="prompts per step")
    parser.add_argument("--n", type=int, help="completions per prompt")
    parser.add_argument("--mini-batches", type=int, help="optimizer updates per step")
    parser.add_argument("--prompt-length", type=int)
    parser.add_argument("--response-length", type=int)
    parser.add_argument(
        "--fixed", action=argparse.BooleanOptionalAction, default=None, help="all completions full length"
    )
    parser.add_argument("--micro-rows", type=int, default=0, help="rows per pass of our side; 0 = the mini-batch")
    parser.add_argument("--peer-micro-rows", type=int, default=0, help="rows per pass of the peer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype", choices=PRECISIONS, default="float32", help="of both sides; bfloat16 keeps float32 weights"
    )
    parser.add_argument("--peer-dtype", choices=PRECISIONS, help="of the peer, where it differs")
    parser.add_argument("--bypass", action="store_true", help="our side uses the log-probs of sampling as the old ones")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of our side")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, not measured")
    parser.add_argument("--peer", choices=("trl",))
    parser.add_argument("--peer-steps", type=int, help="measured steps of the peer; as --steps")
    parser.add_argument("--peer-warmup", type=int, help="as --warmup")
    parser.add_argument("--trl-path", type=Path, default=Path(".trl"), help="folder that TRL is installed into")
    parser.add_argument("--learn", action="store_true", help="the quick start's learning rate, schedule and reward")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of our side")
    parser.add_argument("--peer-set", action="append", default=[], metavar="KEY=VALUE", help="of the peer")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_step"))
    parser.add_argument("--plot", type=Path, help="write a bar chart")
    arguments = parser.parse_args()
    if bool(arguments.model) != bool(arguments.prompts_file):
        parser.error("--model and --prompts-file belong together")
    return arguments


def make_workload(arguments: argparse.Namespace) -> Workload:
    """The case with what the command line changes."""
    maker, settings = CASES[arguments.case]
    if arguments.model:
        model, prompts_file = arguments.model, arguments.prompts_file
    else:
        model, prompts_file = maker(arguments.output / maker.__name__.removeprefix("make_"))
    given = ("prompts", "n", "mini_batches", "prompt_length", "response_length", "fixed")
    changed = {name: getattr(arguments, name) for name in given if getattr(arguments, name) is not None}
    work = Workload(model=str(model), prompts_file=str(prompts_file), **(settings | changed))
    if work.prompts % work.mini_batches:
        raise SystemExit(f"--prompts {work.prompts} is no multiple of --mini-batches {work.mini_batches}")
    if arguments.learn:
        work = replace(work, lr=5e-4, reward="task", total_steps=arguments.warmup + arguments.steps)
    return replace(
        work,
        precision=arguments.dtype,
        threads=arguments.threads,
        bypass=arguments.bypass,
        seed=arguments.seed,
        micro_rows=arguments.micro_rows,
        options=tuple(arguments.set),
    )


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    work = make_workload(arguments)
    sides: dict[str, Side] = {}
    wanted = {"verl": (arguments.warmup, arguments.steps)}
    with opened(sides):
        sides["verl"] = Side("verl", "verl_side", work, arguments.output / "verl.log", [])
        if arguments.peer:
            theirs = replace(
                work,
                precision=arguments.peer_dtype or work.precision,
                micro_rows=arguments.peer_micro_rows,
                options=tuple(arguments.peer_set),
            )
            sides["trl"] = Side("TRL", "trl_side", theirs, arguments.output / "trl.log", [str(arguments.trl_path)])
            wanted["trl"] = (
                arguments.warmup if arguments.peer_warmup is None else arguments.peer_warmup,
                arguments.steps if arguments.peer_steps is None else arguments.peer_steps,
            )
        for number in range(max(sum(counts) for counts in wanted.values())):
            for name, side in sides.items():
                warmup, steps = wanted[name]
                if number < warmup + steps:
                    began = time.perf_counter()
                    result = side.step(counted=number >= warmup)
                    seconds = time.perf_counter() - began
                    print(f"{name:5s} step {number + 1}: {describe_step(result, seconds)}", file=sys.stderr)
    results = {name: summary(side.steps) for name, side in sides.items()}
    if arguments.learn:
        for name, side in sides.items():
            rewards = [step["reward"] for step in side.steps]
            results[name] |= {
                "reward_first": round(statistics.fmean(rewards[:5]), 3),
                "reward_last": round(statistics.fmean(rewards[-5:]), 3),
            }
    for name, result in results.items():
        print(f"{name:5s} {describe_summary(result)}")
    output: dict[str, Any] = {
        "benchmark": "step",
        "case": arguments.model or arguments.case,
        "prompts": work.prompts,
        "n": work.n,
        "mini_batches": work.mini_batches,
        "response_length": work.response_length,
        "fixed": work.fixed,
        "dtype": work.precision,
        "threads": work.threads,
        "bypass": work.bypass,
        **results,
    }
    if "trl" in sides:
        output["peer_dtype"] = sides["trl"].work.precision
        output["ratios"] = ratios(sides["verl"].steps, sides["trl"].steps)
        print("TRL / verl:", "  ".join(f"{name} {value:.2f}x" for name, value in output["ratios"].items()))
    if arguments.plot:
        draw(results, arguments.plot)
    print(json.dumps(output))


if __name__ == "__main__":
    main()

"""The benchmark of a step: both sides are told the same work, and its ratios are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_step

    return bench_step


def test_a_workload_survives_the_way_to_a_process(bench: ModuleType) -> None:
    work = bench.Workload("m", "p", n=4, betas=(0.8, 0.9), options=("a=1",))
    assert bench.Workload.from_json(work.to_json()) == work


def test_the_trainer_is_told_the_work(bench: ModuleType, tmp_path: Path) -> None:
    from step.verl_side import command_line

    from verl.config import PPOConfig
    from verl.config.cli import parse_cli

    work = bench.Workload(
        "m", str(tmp_path / "p.parquet"), prompts=12, n=4, mini_batches=3, fixed=True, precision="bfloat16", bypass=True
    )
    config = parse_cli(PPOConfig, "ppo_trainer", command_line(work))
    policy = config.actor_rollout_ref
    assert (config.data.train_batch_size, policy.rollout.n, policy.actor.ppo_mini_batch_size) == (12, 4, 4)
    assert (policy.rollout.ignore_eos, policy.rollout.response_length) == (True, 256)
    assert (policy.rollout.dtype, policy.actor.fsdp_config.mixed_precision.param_dtype) == ("bfloat16", "bfloat16")
    assert policy.actor.fsdp_config.model_dtype in ("auto", "float32")  # the weights that are trained stay float32
    assert config.algorithm.rollout_correction.bypass_mode
    assert config.trainer.controller == "local"


def test_ratios_compare_the_cost_of_a_token(bench: ModuleType) -> None:
    ours = [{"cpu_s": 2.0, "wall_s": 4.0, "tokens": 100, "rows": 10, "phases_cpu_s": {"generate": 0.5, "update": 1.0}}]
    theirs = [{"cpu_s": 4.0, "wall_s": 4.0, "tokens": 50, "rows": 10, "phases_cpu_s": {"generate": 1.0}}]
    assert bench.ratios(ours, theirs) == {"end_to_end": 4.0, "end_to_end_wall": 2.0, "generate": 4.0, "train": 4.0}


def test_what_is_left_of_a_step_is_named(bench: ModuleType) -> None:
    common = {"wall_s": 3.0, "tokens": 30, "rows": 10, "peak_rss_gb": 1.0, "phases_wall_s": {}}
    ours = bench.summary([{**common, "cpu_s": 2.0, "phases_cpu_s": {"generate": 0.5, "update": 1.0}}])
    theirs = bench.summary([{**common, "cpu_s": 2.0, "phases_cpu_s": {"generate": 0.5, "log_probs": 0.25}}])
    assert ours["phases_cpu_s"] == {"generate": 0.5, "update": 1.0, "other": 0.5}
    assert theirs["phases_cpu_s"] == {"generate": 0.5, "log_probs": 0.25, "update": 1.25}
    assert (ours["mean_length"], ours["tokens_per_cpu_s"]) == (3.0, 15.0)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_small_step_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_step.py", "--case", "small", "--prompts", "8", "--steps", "1"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--plot", str(tmp_path / "plot.png")],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["verl"]["tokens_per_step"] == 8 * 8 * 12
    assert {"generate", "log_probs", "update", "sync"} <= result["verl"]["phases_cpu_s"].keys()
    assert (tmp_path / "plot.png").stat().st_size > 0

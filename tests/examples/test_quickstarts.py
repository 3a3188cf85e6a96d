"""The quick starts' commands are valid configurations, whatever is asked of them; their data is what they say."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl.config import PPOConfig, SFTConfig, load_config


@pytest.fixture
def load(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a program below ``examples/``."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # programs add the directories of what they share

    def load_program(name: str) -> ModuleType:
        path = repo_root / "examples" / name
        spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_program


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("quickstart/run.py", [], {"algorithm.adv_estimator": "grpo"}),
        ("quickstart/run.py", ["--algorithm", "ppo"], {"algorithm.adv_estimator": "gae"}),
        (
            "quickstart/run.py",
            ["--algorithm", "megatron", "--workers", "2"],
            {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2},
        ),
        ("agent/run.py", [], {"actor_rollout_ref.rollout.agent_loop": "tool_agent"}),
        ("agent/run.py", ["--rollout", "vllm"], {"actor_rollout_ref.rollout.mode": "async"}),
        ("agent/run.py", ["--agent", "openai_client"], {"actor_rollout_ref.rollout.agent_loop": "openai_agent"}),
        ("agent/run.py", ["--agent", "agents_sdk", "--rollout", "vllm"], {"actor_rollout_ref.rollout.name": "vllm"}),
    ],
)
def test_commands_are_valid(
    program: str,
    arguments: list[str],
    expected: dict[str, Any],
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = load(program)
    commands: dict[str, Any] = {}
    monkeypatch.setattr(module.tiny_experiment, "run_experiment", lambda output, seed, **more: commands.update(more))
    monkeypatch.setattr(sys, "argv", [program, "--seed", "7", *arguments, "trainer.total_training_steps=3"])
    module.main()
    assert Path(commands["task"][0]).is_file()
    sft = load_config(SFTConfig, "sft_trainer", commands["sft"][2:])
    rl = load_config(PPOConfig, "ppo_trainer", commands["rl"][2:])
    assert (sft.trainer.seed, rl.trainer.seed, rl.trainer.total_training_steps) == (7, 7, 3)
    for path, value in expected.items():
        found: Any = rl
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value


@pytest.mark.parametrize(
    ("program", "more"), [("quickstart/make_task.py", {"good_fraction": 0.5}), ("agent/make_task.py", {"calls": 0.5})]
)
def test_validation_prompts_appear_nowhere_else(
    program: str, more: dict[str, float], load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module = load(program)
    module.make_data(tmp_path, seed=3, sft=50, train=40, val=20, **more)
    train, val = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, val)]
    assert (len(train), len(asked[1])) == (40, 20)
    assert not asked[0] & asked[1]
    assert val[0]["data_source"].startswith("final_answer/")


def test_a_run_without_validation_is_reported(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load("report.py")
    values = {"critic/score/mean": 0.5, "timing_s/step": 1.0, "perf/cpu_memory_peak_gb": 1.0}
    rows = [json.dumps({"step": step, "data": values}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    report.report_run(tmp_path, 1, 2.0, "title")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"reward_first": 0.5, "reward_last": 0.5, "steps": 2, "seconds": 2.0, "seed": 1}
    assert "validation accuracy" not in capsys.readouterr().out

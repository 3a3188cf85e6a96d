"""A tiny real run: model, data and reward that give every step a varied reward within a second."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Varied on random text: how many characters of the answer are digits, and how long the answer is."""
    digits = sum(c.isdigit() for c in solution_str)
    return {"score": digits / 4 + len(solution_str) / 16, "digits": digits}
'''


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train.parquet`` (20 prompts of different lengths), ``val.parquet`` (6) and ``reward.py``."""
    directory = tmp_path_factory.mktemp("task")
    rng = random.Random(0)
    for name, count in (("train", 20), ("val", 6)):
        rows = [
            {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": "say " + "0123456789"[: rng.randint(1, 9)]}],
                "ability": "test",
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i, "split": name},
            }
            for i in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.fixture(scope="session")
def base_overrides(task_dir: Path, tiny_model_dir: str) -> list[str]:
    """Keys that every tiny run shares: 8 prompts x 2 samples, two mini-batches a step, three steps, fp32."""
    return [
        f"data.train_files={task_dir}/train.parquet",
        f"data.val_files={task_dir}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=8",
        f"custom_reward_function.path={task_dir}/reward.py",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=False",
        "trainer.logger=[file]",
    ]


@pytest.fixture
def run_training(
    base_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Run the entry point in this process and return ``[{"step": ..., "data": {...}}, ...]``."""
    runs = 0

    def run(*overrides: str) -> list[dict[str, Any]]:
        nonlocal runs
        runs += 1
        from verl.config import PPOConfig, load_config
        from verl.trainer.main_ppo import run_ppo

        metrics = tmp_path / f"run{runs}.jsonl"
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(metrics))
        own = [f"trainer.default_local_dir={tmp_path}/run{runs}"]
        run_ppo(load_config(PPOConfig, "ppo_trainer", merge_overrides(base_overrides, own, overrides)))
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    return run


def merge_overrides(*groups: Any) -> list[str]:
    """Overrides where a later value of a key replaces an earlier one."""
    merged: dict[str, str] = {}
    for group in groups:
        for override in group:
            key, _, value = override.partition("=")
            merged[key] = value
    return [f"{key}={value}" for key, value in merged.items()]

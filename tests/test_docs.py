"""The code in the documentation runs as it is printed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def block_with(page: Path, text: str) -> str:
    (block,) = [block for block in python_blocks(page) if text in block]
    return block


@pytest.mark.parametrize("name", ["README.md", "docs/extending.md", "docs/concepts.md", "docs/agents.md"])
def test_every_block_of_code_compiles(repo_root: Path, name: str) -> None:
    blocks = python_blocks(repo_root / name)
    assert blocks
    for block in blocks:
        compile(block, name, "exec")


def test_the_readmes_reward_function_scores(repo_root: Path) -> None:
    scope: dict = {}
    exec(block_with(repo_root / "README.md", "def compute_score"), scope)
    assert scope["compute_score"]("my_task", "3 + 4 = 7\n", "7", {}) == 1.0
    assert scope["compute_score"]("my_task", "8", "7", {}) == 0.0


def test_the_readmes_data_row_is_json(repo_root: Path) -> None:
    (row,) = re.findall(r"```json\n(.*?)```", (repo_root / "README.md").read_text("utf-8"), re.DOTALL)
    assert set(json.loads(row)) == {"data_source", "prompt", "reward_model", "extra_info"}


@pytest.mark.e2e
def test_documented_plug_ins_train_on_ray(repo_root: Path, tmp_path: Path, tiny_model_dir: str) -> None:
    page = repo_root / "docs" / "extending.md"
    (tmp_path / "my_reward.py").write_text(block_with(page, "def compute_score"))
    plugins = [block_with(page, name) for name in ('"centered"', '"plain"', "Mine(Tracker)")]
    (tmp_path / "my_plugins.py").write_text("\n".join(plugins))
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{i}"}],
            "reward_model": {"style": "rule", "ground_truth": f"{i}"},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            "data.train_files=train.jsonl",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            "custom_reward_function.path=my_reward.py",
            "custom_reward_function.name=compute_score",
            "+custom_reward_function.reward_kwargs.bonus=0.25",
            "algorithm.adv_estimator=centered",
            f"actor_rollout_ref.model.path={tiny_model_dir}",
            "actor_rollout_ref.model.external_lib=my_plugins",
            "actor_rollout_ref.actor.policy_loss.loss_mode=plain",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=2",
            "trainer.nnodes=1",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            "trainer.total_training_steps=2",
            "trainer.default_local_dir=out",
            "trainer.logger=[console,file]",
        ],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "VERL_FILE_LOGGER_PATH"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["data"]["critic/score/min"] == 0.25  # the bonus of reward_kwargs arrived

"""Every program runs from the example of its ``--help``, one after the other, as a user would use them together."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.test_cli import example_of
from verl import cli
from verl.utils.distributed import destroy_process_group

pytestmark = pytest.mark.e2e

#: what a tiny model on a small machine needs beside the examples
SMALL = {
    "train": [
        "data.train_batch_size=8",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.controller=local",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "trainer.project_name=p",
        "trainer.experiment_name=e",
    ],
    "sft": ["data.train_batch_size=8", "data.max_length=64", "trainer.total_training_steps=2", "trainer.save_freq=2"],
    "preference": [
        "data.train_batch_size=8",
        "data.max_length=64",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
    ],
    "generate": ["data.max_response_length=8", "trainer.controller=local"],
    "eval": ["metrics.resamples=100"],
    "merge": [],
    "explain": [],
    "selftest": ["--ranks", "0"],
}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "acc": float(len(solution_str) % 2)}
"""
LOSS = """
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

@register_policy_loss("mine_of_the_example")
def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
    ratio = torch.exp(log_prob - old_log_prob)
    return agg_loss(-advantages * ratio, response_mask, loss_agg_mode, **config.global_batch_info), {}
"""


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def desk(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the files that the examples name; made the current one."""
    directory = tmp_path_factory.mktemp("desk")
    (directory / "model").symlink_to(tiny_model_dir)
    problems = [
        {
            "data_source": "openai/gsm8k",
            "prompt": chat(f"sort {i}"),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(16)
    ]
    tables: dict[str, list[dict[str, Any]]] = {
        "train": problems,
        "test": problems[:4],
        "demonstrations": [{"prompt": f"sort {i}", "response": f"#### {i}"} for i in range(16)],
        "pairs": [{"prompt": f"sort {i}", "chosen": f"#### {i}", "rejected": "no"} for i in range(16)],
    }
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    (directory / "reward.py").write_text(REWARD)
    (directory / "my_losses.py").write_text(LOSS)
    before = Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)


@pytest.fixture
def run(desk: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run the example of a command with more words; gives what it wrote."""

    def example(name: str, *more: str) -> str:
        words = shlex.split(example_of(name, capsys))
        code = cli.main([*words, *SMALL[name], *more])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    yield example
    destroy_process_group()


def test_there_is_one_for_each_command() -> None:
    assert SMALL.keys() == cli.COMMANDS.keys()


def test_from_a_run_to_a_number(desk: Path, run: Callable[..., str]) -> None:
    """Training, its model for other programs, answers, a score; plain Transformers writes the same answers."""
    run("train")
    checkpoint = desk / "checkpoints" / "p" / "e"
    (checkpoint / "global_step_1").rename(checkpoint / "global_step_20")
    run("merge")
    merged = AutoModelForCausalLM.from_pretrained(desk / "merged", dtype=torch.float32)
    greedy = ["data.output_path=greedy.parquet", "data.n_samples=1", "rollout.temperature=0", "rollout.dtype=float32"]
    run("generate", *greedy)
    tokenizer = AutoTokenizer.from_pretrained(desk / "merged")
    rows = pq.read_table(desk / "greedy.parquet").to_pylist()
    assert len(rows) == 4
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        plain = merged.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        expected = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        assert row["responses"] == [expected]
    run("generate")
    assert "pass@8" in run("eval")
    result = json.loads((desk / "result.json").read_text())["openai/gsm8k"]
    answers = pq.read_table(desk / "answers.parquet").to_pylist()
    lengths = [len(text) for row in answers for text in row["responses"]]
    assert len(lengths) == 4 * 8
    assert result["score"]["mean"] == pytest.approx(sum(lengths) / len(lengths))


def test_fine_tuning(desk: Path, run: Callable[..., str]) -> None:
    run("sft", f"trainer.default_local_dir={desk}/sft")
    tuned = cli.main(["merge", "merge", "--local_dir", "sft/global_step_2", "--target_dir", "tuned"])
    assert tuned == 0
    before, after = (AutoModelForCausalLM.from_pretrained(desk / name) for name in ("model", "tuned"))
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize(
    ("objective", "kind"),
    [("dpo", AutoModelForCausalLM), ("reward_model", AutoModelForSequenceClassification)],
)
def test_training_on_pairs(objective: str, kind: Any, desk: Path, run: Callable[..., str]) -> None:
    run("preference", f"objective={objective}", f"trainer.default_local_dir={desk}/{objective}")
    target = f"{objective}_merged"
    assert cli.main(["merge", "merge", "--local_dir", f"{objective}/global_step_2", "--target_dir", target]) == 0
    kind.from_pretrained(desk / target)


def test_what_looks_at_a_run(desk: Path, run: Callable[..., str]) -> None:
    assert "actor" in run("explain")
    assert "mine_of_the_example" in run("selftest", "--only", "loss mine*")

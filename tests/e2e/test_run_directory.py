"""What a run leaves in its directory: the model, the record of what ran, and no mixture of two experiments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import merge_overrides
from tests.e2e.test_resume import deterministic
from verl.config import PPOConfig, load_config
from verl.errors import ConfigError
from verl.trainer.main_ppo import run_ppo

pytestmark = pytest.mark.e2e

Run = Callable[..., list[dict[str, Any]]]
LOCAL = ["trainer.controller=local", "trainer.total_training_steps=2"]


def exported(root: Path) -> Any:
    """The model that a run left, as other programs load it."""
    assert AutoTokenizer.from_pretrained(root / "huggingface")("say 1")["input_ids"]
    return AutoModelForCausalLM.from_pretrained(root / "huggingface", dtype=torch.float32)


def test_a_run_leaves_its_model_and_a_record_that_repeats_it(
    run_training: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeps = [*LOCAL, "trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"]
    rows = run_training(*keeps, "actor_rollout_ref.actor.ppo_micro_batch_size=4")
    root = tmp_path / "run1"
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"model: {root}/huggingface"
    assert told[-2].startswith(f"next: verl generate model.path={root}/huggingface ")
    assert any(line.startswith("done: step 2 of 2, ") for line in told)
    assert f"checkpoints: {root}, the newest is global_step_2" in told
    model = exported(root)
    trained = load_file(root / "global_step_2" / "actor" / "huggingface" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in trained.items())
    origin = json.loads((root / "huggingface" / "training.json").read_text())
    assert (origin["program"], origin["step"]) == ("train", 2)

    environment = json.loads((root / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__ or environment["versions"]["torch"]
    assert environment["contents"]["data.train_files"]["rows"].startswith("20 rows")
    assert set(environment["contents"]) >= {"actor_rollout_ref.model.path", "reward.custom_reward_function.path"}
    assert (root / "command.txt").read_text().startswith("# in ")

    # the record is a configuration: the same run elsewhere gives the same numbers
    metrics = tmp_path / "again.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(metrics))
    run_ppo(load_config(PPOConfig, "config", [f"trainer.default_local_dir={tmp_path}/again"], str(root)))
    again = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert deterministic(again) == deterministic(rows)


def test_another_experiment_in_the_same_place_is_refused(run_training: Run, tmp_path: Path) -> None:
    place = f"trainer.default_local_dir={tmp_path}/same"
    run_training(*LOCAL, "trainer.save_freq=2", place)
    model = tmp_path / "same" / "huggingface" / "model.safetensors"
    before = model.stat()
    with pytest.raises(ConfigError) as raised:
        run_training(*LOCAL, place, "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.optim.lr=1e-4")
    assert "actor_rollout_ref.actor.optim.lr: 0.001 -> 0.0001" in str(raised.value)
    assert "algorithm.adv_estimator: 'grpo' -> 'rloo'" in str(raised.value)
    # the same run again has nothing to do, and writes the model only once
    run_training(*LOCAL, "trainer.save_freq=2", place)
    assert model.stat().st_mtime_ns == before.st_mtime_ns
    assert model.stat().st_ino == before.st_ino
    # more steps resume, and the record of the first start stays
    (row,) = run_training("trainer.controller=local", "trainer.total_training_steps=3", "trainer.save_freq=2", place)
    assert row["step"] == 3
    assert json.loads((model.parent / "training.json").read_text())["step"] == 3
    first, now = ((tmp_path / "same" / name).read_text() for name in ("config.1.yaml", "config.yaml"))
    assert "total_training_steps: 2" in first
    assert "total_training_steps: 3" in now
    assert (tmp_path / "same" / "environment.1.json").exists()


def test_a_place_with_a_model_but_no_checkpoint_belongs_to_its_run_too(run_training: Run, tmp_path: Path) -> None:
    place = f"trainer.default_local_dir={tmp_path}/same"
    run_training(*LOCAL, place)
    with pytest.raises(ConfigError, match=r"rollout\.n: 2 -> 4"):
        run_training(*LOCAL, place, "actor_rollout_ref.rollout.n=4")
    run_training(*LOCAL, place, "actor_rollout_ref.rollout.n=4", "trainer.resume_mode=disable")
    settings = json.loads((tmp_path / "same" / "huggingface" / "training.json").read_text())["fingerprint"]["settings"]
    assert settings["actor_rollout_ref.rollout.n"] == 4


def test_no_model_is_left_where_none_is_wanted(
    run_training: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_training(*LOCAL, "trainer.save_final_model=False")
    assert capsys.readouterr().out.splitlines()[-1].startswith("nothing of this run was kept: trainer.save_final_model")
    assert not (tmp_path / "run1" / "huggingface").exists()
    assert (tmp_path / "run1" / "config.yaml").exists()


@pytest.mark.usefixtures("ray_local")
def test_two_ranks_leave_a_model_with_the_adapters_merged(run_training: Run, tmp_path: Path) -> None:
    run_training("trainer.n_gpus_per_node=2", "trainer.total_training_steps=1", "actor_rollout_ref.model.lora_rank=4")
    names = set(exported(tmp_path / "run1").state_dict())
    assert not any("lora" in name for name in names)
    assert not list((tmp_path / "run1").glob(".huggingface*"))


def test_megatron_leaves_a_model(run_training: Run, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="Megatron-core is not installed")
    run_training(*LOCAL, "trainer.total_training_steps=1", "actor_rollout_ref.actor.strategy=megatron")
    exported(tmp_path / "run1")


@pytest.mark.parametrize("program", ["sft", "preference"])
def test_other_training_programs_leave_the_same(
    program: str, tmp_path: Path, tiny_model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl.config import PreferenceConfig, SFTConfig
    from verl.trainer.preference_trainer import run_preference
    from verl.trainer.sft_trainer import run_sft

    rows = [{"prompt": f"say {i}", "response": str(i), "chosen": str(i), "rejected": str(i + 1)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema, run = (SFTConfig, run_sft) if program == "sft" else (PreferenceConfig, run_preference)
    given = [
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=8",
        "data.max_length=32",
        f"model.path={tiny_model_dir}",
        "optim.lr_scheduler_type=constant",  # another length is no other schedule
        "optim.lr_warmup_steps_ratio=0.0",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/out",
    ]

    def start(*overrides: str) -> None:
        run(load_config(schema, f"{program}_trainer", merge_overrides(given, overrides)))  # type: ignore[operator]

    start()
    root = tmp_path / "out"
    assert capsys.readouterr().out.splitlines()[-1] == f"model: {root}/huggingface"
    exported(root)
    assert json.loads((root / "huggingface" / "training.json").read_text())["program"] == program
    assert {name for name in ("config.yaml", "command.txt", "environment.json") if (root / name).exists()}
    with pytest.raises(ConfigError, match=r"optim\.lr: .* -> 0\.01"):
        start("optim.lr=0.01")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    with pytest.raises(ConfigError, match="the rows have changed"):
        start("trainer.total_training_steps=3")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start("trainer.total_training_steps=3")
    assert (root / "global_step_3").is_dir()
    run(load_config(schema, "config", [f"trainer.default_local_dir={tmp_path}/again"], str(root)))  # type: ignore[operator]
    one, other = (load_file(path / "huggingface" / "model.safetensors") for path in (root, tmp_path / "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_hidden_secret_is_not_used_as_a_value(base_overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("reward:\n  reward_kwargs:\n    api_key: '***'\n")
    with pytest.raises(ConfigError, match=r"reward\.reward_kwargs\.api_key='\*\*\*': is a secret"):
        load_config(PPOConfig, "config", base_overrides, str(tmp_path))
    given = merge_overrides(base_overrides, ["reward.reward_kwargs.api_key=abc"])
    assert load_config(PPOConfig, "config", given, str(tmp_path)).reward.reward_kwargs == {"api_key": "abc"}

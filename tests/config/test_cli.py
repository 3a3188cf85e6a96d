"""The command line of an entry point."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from verl.config import PPOConfig, SFTConfig, load_config, main, parse_cli
from verl.errors import ConfigError

ARR = "actor_rollout_ref"
PPO = ["data.train_files=t.parquet", f"{ARR}.model.path=a/b", "trainer.n_gpus_per_node=1"]


def run(argv, capsys, schema=PPOConfig, name="ppo_trainer"):
    """Return (exit code, stdout, stderr) of a command line that ends the process."""
    with pytest.raises(SystemExit) as caught:
        parse_cli(schema, name, argv)
    out = capsys.readouterr()
    return caught.value.code, out.out, out.err


def test_overrides_give_a_sealed_configuration():
    config = parse_cli(PPOConfig, "ppo_trainer", [*PPO, "trainer.seed=5"])
    assert config.trainer.seed == 5
    with pytest.raises(ConfigError):
        config.trainer.seed = 6


def test_cfg_job_prints_yaml_that_loads_to_the_same(tmp_path, capsys):
    argv = [*PPO, f"{ARR}.actor.ppo_micro_batch_size=2", "trainer.experiment_name=${trainer.seed}"]
    code, out, err = run(["--cfg", "job", "--resolve", *argv], capsys)
    assert (code, err) == (0, "")
    values = yaml.safe_load(out)
    assert values["trainer"]["experiment_name"] == "1"
    assert values["actor_rollout_ref"]["rollout"]["log_prob_micro_batch_size_per_gpu"] == 2
    assert "${" not in out
    (tmp_path / "again.yaml").write_text(out, encoding="utf-8")
    assert parse_cli(PPOConfig, "x", [f"--config-path={tmp_path}", "--config-name", "again"]) == load_config(
        PPOConfig, "ppo_trainer", argv
    )


def test_cfg_job_of_one_section(capsys):
    code, out, _ = run(["-c", "job", "-p", "critic.optim", *PPO], capsys)
    assert code == 0
    assert out.startswith("# @package critic.optim\noptimizer: AdamW\nlr: 1.0e-05\n")
    code, _, err = run(["--cfg=job", "--package=critic.optm", *PPO], capsys)
    assert (code, err) == (2, "error: --package=critic.optm: there is no such section\n")


def test_help_lists_every_key(capsys):
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    assert "--config-path DIR" in out
    assert "  actor_rollout_ref.actor.clip_ratio_low=${actor_rollout_ref.actor.clip_ratio}\n" in out
    assert "[auto, cpu, cuda]" in out


def test_problems_end_with_code_2_and_one_message(capsys):
    code, out, err = run(["trainer.sed=1"], capsys)
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: the configuration has problems:\n  trainer.sed=1: unknown key; did you mean trainer.seed?\n"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config-nam=x"], "--config-nam=x: unknown flag; settings are given as key=value (flags: --config-path, "),
        (["-m"], "-m: starting several runs from one command is not supported; start them one by one"),
        (["--multirun"], "--multirun: starting several runs"),
        (["--config-name"], "--config-name: needs a value, for example --config-name=..."),
        (["--cfg=hydra"], "--cfg=hydra: expected job; there is no other configuration to show"),
        (["--config-path=/nowhere/at/all"], "--config-path=/nowhere/at/all: no such directory"),
    ],
)
def test_flags_that_are_wrong(argv, message, capsys):
    code, _, err = run(argv, capsys)
    assert code == 2
    assert err.startswith(f"error: {message}")


def test_config_dir_adds_a_directory(tmp_path, capsys):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "short.yaml").write_text(
        "# @package _global_\ndata: {max_prompt_length: 9}\n", encoding="utf-8"
    )
    assert (
        parse_cli(PPOConfig, "ppo_trainer", [f"--config-dir={tmp_path}", "+task=short", *PPO]).data.max_prompt_length
        == 9
    )


def test_the_decorator_reads_argv_and_reports_configuration_errors(monkeypatch, capsys):
    @main(SFTConfig, "sft_trainer")
    def entry(config: SFTConfig) -> str:
        config.check_files()
        return "ran"

    monkeypatch.setattr(sys, "argv", ["prog", "data.train_files=/nowhere/t.parquet", "model.path=a/b"])
    with pytest.raises(SystemExit) as caught:
        entry()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(
        "error: files that the configuration names are missing:\n  data.train_files="
    )
    assert entry.__name__ == "entry"


def test_a_process_exits_cleanly_and_leaves_nothing(tmp_path):
    code = "from verl.config import PPOConfig, parse_cli; parse_cli(PPOConfig, 'ppo_trainer'); print('ran')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in [os.getcwd(), os.environ.get("PYTHONPATH")] if p)}
    good = subprocess.run(
        [sys.executable, "-c", code, *PPO],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (good.returncode, good.stdout, good.stderr) == (0, "ran\n", "")
    bad = subprocess.run(
        [sys.executable, "-c", code, "a.b=1"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: the configuration has problems:\n  a.b=1: unknown key")
    assert os.listdir(tmp_path) == []

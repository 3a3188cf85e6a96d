"""The generated reference."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from verl.config import PPOConfig, load_config
from verl.config.schema import keys_of

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
GIVEN = ["data.train_files=t.parquet", "actor_rollout_ref.model.path=a/b"]


def test_the_reference_is_fresh():
    done = subprocess.run(
        [sys.executable, "tools/gen_config_reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_check_fails_when_stale(tmp_path):
    for name in ("verl", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REFERENCE, tmp_path / "docs" / "reference")
    page = tmp_path / "docs" / "reference" / "config.md"
    page.write_text(page.read_text(encoding="utf-8") + "x", encoding="utf-8")
    command = [sys.executable, "tools/gen_config_reference.py"]
    done = subprocess.run([*command, "--check"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "stale: docs/reference/config.md; run python tools/gen_config_reference.py\n"
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert page.read_text(encoding="utf-8") == (REFERENCE / "config.md").read_text(encoding="utf-8")


def test_the_page_has_every_key():
    page = (REFERENCE / "config.md").read_text(encoding="utf-8")
    sections = [k.path for k in keys_of(PPOConfig).values() if k.kind == "section"]
    assert all(f"### `{section}`" in page for section in sections)
    assert "| `kl_coef` | float | `0.001` | ≥ 0 | Weight of the penalty (adaptive: at the start). |" in page
    assert "| `custom_reward_function` | `reward.custom_reward_function` |" in page


def test_the_yaml_is_the_defaults():
    from_yaml = load_config(PPOConfig, "config", GIVEN, str(REFERENCE))
    assert from_yaml == load_config(PPOConfig, "ppo_trainer", GIVEN)

"""Finding a rollout engine by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl.errors import ConfigError
from verl.workers.rollout import get_rollout_class


def test_hf_is_found() -> None:
    from verl.workers.rollout.hf.engine import HFRolloutEngine

    assert get_rollout_class("hf") is HFRolloutEngine


def test_vllm_is_found_and_asks_for_its_package_only_when_made() -> None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    assert get_rollout_class("vllm") is VLLMRolloutEngine


def test_sglang_is_found_and_asks_for_its_package_only_when_made() -> None:
    from verl.workers.rollout.sglang.engine import SGLangRolloutEngine

    assert get_rollout_class("sglang") is SGLangRolloutEngine


def test_engines_of_other_versions_say_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"rollout.name=hf"):
        get_rollout_class("trtllm")


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hf'"):
        get_rollout_class("hff")


def test_asking_for_the_package_imports_no_engine() -> None:
    code = (
        "import sys, verl.workers.rollout as r; assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

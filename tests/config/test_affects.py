"""What each key affects, and with it what may change when a run resumes."""

from __future__ import annotations

import pytest

from verl.config import PPOConfig, PreferenceConfig, SFTConfig
from verl.config.base import AFFECTS, DECISIVE, opt
from verl.config.schema import keys_of

SCHEMAS = (PPOConfig, SFTConfig, PreferenceConfig)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_is_classified(schema) -> None:
    keys = [key for key in keys_of(schema).values() if key.kind != "section"]
    assert {key.affects for key in keys} <= set(AFFECTS)
    # a path is compared by content, or is a place; the value itself never decides
    for key in keys:
        name = key.path.rpartition(".")[2]
        if name.endswith(("path", "files", "dir", "directory")) and name != "val_files":
            assert key.affects in ("rows", "file", "model", "place"), key.path
        if name.endswith(("lr", "temperature", "seed")) and "val_kwargs" not in key.path:
            assert key.affects == "numbers", key.path
        if "timeout" in name and "sandbox" not in key.path:
            assert key.affects in ("limit", "speed"), key.path
        if "micro_batch" in name or name.endswith(("offload", "parallel_size")):
            assert key.affects == "speed", key.path


def test_a_section_speaks_for_its_keys() -> None:
    keys = keys_of(PPOConfig)
    assert keys["actor_rollout_ref.rollout.server.max_attempts"].affects == "speed"
    assert keys["actor_rollout_ref.rollout.val_kwargs.top_p"].affects == "report"
    assert keys["critic.checkpoint.save_contents"].affects == "place"
    assert keys["algorithm.kl_ctrl.kl_coef"].affects == "numbers"
    assert "numbers" in DECISIVE


def test_an_unknown_class_is_an_error_of_the_code() -> None:
    with pytest.raises(ValueError, match="affects='numbrs'"):
        opt(1, "A number.", affects="numbrs")

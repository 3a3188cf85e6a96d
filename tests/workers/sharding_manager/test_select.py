"""Which engines can be joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.rollout.helpers import make_engine, make_model
from tests.workers.sharding_manager.test_change_detection import Source
from verl.errors import ConfigError
from verl.workers.rollout import ROLLOUT_ENGINES
from verl.workers.sharding_manager import SHARDING_MANAGERS, make_sharding_manager


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_fsdp_and_hf_share_their_weights(strategy: str, tmp_path: Path) -> None:
    model = make_model("qwen2")
    engine = make_engine(model, tmp_path)
    manager = make_sharding_manager(strategy, "hf", Source(model, live=True), engine, on_unchanged="error")
    mebibytes = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    for version, stepped in ((1, True), (2, False)):  # nothing is copied, now or later
        metrics = manager.sync(version, stepped=stepped)
        assert (metrics["weight_sync/version"], metrics["weight_sync/copied_mb"]) == (version, 0)
        assert metrics["weight_sync/shared_mb"] == mebibytes
        assert engine.memory().owned_weights == 0
    live = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in engine.module.parameters()} == live
    assert engine.policy_version == 2


def test_pairs_name_rollouts_that_exist() -> None:
    assert {pair.split("/")[1] for pair in SHARDING_MANAGERS} <= set(ROLLOUT_ENGINES)


def test_a_pair_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    model = make_model("qwen2")
    with pytest.raises(ConfigError, match=r"'tpu' cannot hand weights to rollout.name='hf'; pairs that can: .*fsdp/hf"):
        make_sharding_manager("tpu", "hf", Source(model, live=True), make_engine(model, tmp_path))

"""What both training engines promise about any model, on Megatron-core: compared with plain Transformers when built."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.models.family_checks import save_model
from tests.workers.engine.ranks import run_ranks
from verl.errors import ConfigError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]


def is_compared(rank: int, path: str) -> None:
    from tests.workers.engine import megatron_ranks as ranks
    from verl.models import parallel_logprobs

    ranks.make_megatron_engine(path, trained=False, model={"verify": "always"}, tp=2)
    ranks.leave_parallel_groups()
    ranks.make_megatron_engine(path, head="value", trained=False, model={"verify": "always"}, tp=2)
    ranks.leave_parallel_groups()
    original = parallel_logprobs._log_softmax

    def without_cap(*args: Any, **kwargs: Any) -> Any:
        shift, slope = original(*args, **kwargs)
        return shift * 1.01, slope

    parallel_logprobs._log_softmax = without_cap
    try:
        ranks.make_megatron_engine(path, trained=False, tp=2)  # not compared: the family is tested
        ranks.leave_parallel_groups()
        with pytest.raises(ConfigError, match=r"'gemma2' is not computed right: training rows of Megatron-core differ"):
            ranks.make_megatron_engine(path, trained=False, model={"verify": "always"}, tp=2)
        ranks.leave_parallel_groups()
    finally:
        parallel_logprobs._log_softmax = original


def test_a_model_is_compared_with_plain_transformers(tmp_path: Path) -> None:
    run_ranks(2, is_compared, save_model("gemma2", tmp_path / "model"))

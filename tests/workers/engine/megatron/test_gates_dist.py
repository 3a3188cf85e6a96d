"""What both training engines promise about any model, on Megatron-core: see test_verification.py and test_noise.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.families import make_config
from tests.models.family_checks import save_model
from tests.models.test_noise import with_padding_tokens, without_padding_idx
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import POLICY, TEMPERATURE, policy_batch, policy_loss, run_reference
from tests.workers.rollout.helpers import make_model
from tests.workers.test_unsampled import make_model_dir, masked_log_probs
from verl.errors import ConfigError
from verl.workers.engine.base import MicroBatching

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]


def is_compared(rank: int, path: str) -> None:
    from tests.workers.engine.megatron import ranks
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


def trains_like_plain_transformers(rank: int, path: str, want: dict[str, Any]) -> None:
    from tests.workers.engine.megatron import ranks

    def update(**model: Any) -> dict[str, float]:
        engine = ranks.make_megatron_engine(path, model=model, tp=2)
        metrics = engine.train_batch(
            with_padding_tokens(policy_batch(vocab=60)),
            policy_loss,
            want=POLICY,
            micro=MicroBatching(),
            temperature=0.8,
        ).values_by_name()
        ranks.leave_parallel_groups()
        return metrics

    quiet, loud = update(), update(training_noise=True)
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(quiet[name], want[name][0], rtol=2e-5, atol=2e-6)
        assert abs(loud[name] - want[name][0]) > 1e-3


def test_training_has_no_noise_and_a_padding_token_gives_its_gradient(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    make_model(make_config("llama", attention_dropout=0.3), spread=2.0).save_pretrained(path)
    plain = without_padding_idx(path, tmp_path / "plain")
    want = run_reference(plain, with_padding_tokens(policy_batch(vocab=60)), steps=1)
    run_ranks(2, trains_like_plain_transformers, path, {name: want[name] for name in ("loss", "grad_norm")})


def gives_no_probability(rank: int, path: str, want: torch.Tensor) -> None:
    from tests.workers.engine.megatron import ranks

    engine = ranks.make_megatron_engine(path, model={"verify": "always"}, tp=2)
    out = engine.forward(policy_batch(vocab=100), POLICY, micro=MicroBatching(), temperature=TEMPERATURE)
    torch.testing.assert_close(out["log_probs"], want, rtol=1e-5, atol=1e-5)
    ranks.leave_parallel_groups()


def test_tokens_without_text_have_no_probability(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    run_ranks(2, gives_no_probability, path, masked_log_probs(path, policy_batch(vocab=100)))


def test_a_model_is_compared_with_plain_transformers(tmp_path: Path) -> None:
    run_ranks(2, is_compared, save_model("gemma2", tmp_path / "model"))

"""Training without noise, and with a gradient for every token of a row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.families import make_config
from tests.models.family_checks import save_model
from tests.workers.engine.reference import (
    POLICY,
    VALUES,
    make_engine,
    policy_batch,
    policy_loss,
    run_reference,
    value_loss,
)
from tests.workers.rollout.helpers import make_model
from verl.models.noise import noise_of
from verl.workers.engine.base import MicroBatching

WHOLE = MicroBatching()

#: families with noise of each kind; in the last ones it cannot be switched off by a number in the configuration
NOISY: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_dropout": 0.3},
    "phi": {"attention_dropout": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "seed_oss": {"attention_dropout": 0.3, "residual_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"router_jitter_noise": 0.5},
    "phimoe": {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "num_local_experts": 4},
}


def saved(family: str, directory: Path, **changes: Any) -> str:
    make_model(make_config(family, **changes), spread=2.0).save_pretrained(directory)
    return str(directory)


def numbers(path: str, batch: dict[str, Tensor], **settings: Any) -> tuple[float, float]:
    metrics = make_engine(path, **settings).train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, temperature=0.8)
    values = metrics.values_by_name()
    return values["loss"], values["grad_norm"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", NOISY)
def test_training_has_no_noise(
    family: str, checkpointing: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(family, tmp_path / "model", **NOISY[family])
    want = run_reference(
        path, policy_batch(vocab=60), steps=1
    )  # without noise: Transformers loads models for evaluation
    with caplog.at_level(logging.WARNING):
        got = numbers(path, policy_batch(vocab=60), checkpointing=checkpointing)
    torch.testing.assert_close(got, (want["loss"][0], want["grad_norm"][0]), rtol=5e-5, atol=1e-5)
    (line,) = [record.message for record in caplog.records if "switched off" in record.message]
    assert all(name in line for name, value in NOISY[family].items() if isinstance(value, float))


def test_noise_on_request(tmp_path: Path) -> None:
    path = saved("qwen2", tmp_path / "model", attention_dropout=0.3)
    quiet = numbers(path, policy_batch(vocab=60))
    loud = [numbers(path, policy_batch(vocab=60), model={"training_noise": True}) for _ in range(2)]
    assert len({quiet, *loud}) == 3


def test_a_critic_has_no_noise(tmp_path: Path) -> None:
    path = saved("phi", tmp_path / "model", **NOISY["phi"])
    twice = [
        make_engine(path, head="value").train_batch(policy_batch(vocab=60), value_loss, want=VALUES, micro=WHOLE)
        for _ in range(2)
    ]
    assert twice[0].values_by_name() == twice[1].values_by_name()


def test_noise_is_found_at_any_depth() -> None:
    config = make_config("qwen2", attention_dropout=0.1, classifier_dropout=0.3)
    assert noise_of(config) == {"attention_dropout": 0.1}
    config = make_config("gemma3", text_config={"attention_dropout": 0.2}, vision_config={"attention_dropout": 0.1})
    assert noise_of(config) == {"text_config.attention_dropout": 0.2, "vision_config.attention_dropout": 0.1}


def with_padding_tokens(batch: dict[str, Tensor], pad: int = 0) -> dict[str, Tensor]:
    """The batch with the padding token inside prompts and responses."""
    ids = batch["input_ids"]
    start = ids.shape[1] - batch["response_mask"].shape[1]
    for row in range(len(ids)):
        real = batch["attention_mask"][row].nonzero()[:, 0]
        ids[row, real[1]] = pad
        ids[row, real[-1]] = pad
        ids[row, start] = pad if row % 2 else ids[row, start]
    batch["prompts"], batch["responses"] = ids[:, :start].clone(), ids[:, start:].clone()
    return batch


def without_padding_idx(path: str, directory: Path) -> str:
    """The model in a form in which plain Transformers gives every token its gradient."""
    directory.mkdir()
    for file in Path(path).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    return str(directory)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "opt"])
def test_a_padding_token_inside_a_row_gives_its_gradient(family: str, packed: bool, tmp_path: Path) -> None:
    if family == "opt":
        path = saved(family, tmp_path / "model", **NOISY[family])
    else:
        path = save_model(family, tmp_path / "model")
    plain = without_padding_idx(path, tmp_path / "plain")
    batch = with_padding_tokens(policy_batch(vocab=60))
    want = run_reference(plain, batch, steps=1)
    dropped = run_reference(path, batch, steps=1)
    assert dropped["loss"] == want["loss"]
    assert dropped["grad_norm"] != want["grad_norm"]  # what Transformers' padding_idx takes away
    got = numbers(path, batch, packed=packed)
    torch.testing.assert_close(got, (want["loss"][0], want["grad_norm"][0]), rtol=2e-5, atol=2e-6)


def test_so_it_does_in_a_critic(tmp_path: Path) -> None:
    path = save_model("llama", tmp_path / "model")
    plain = without_padding_idx(path, tmp_path / "plain")
    batch = with_padding_tokens(policy_batch(vocab=60))

    def gradient(path: str) -> float:
        engine = make_engine(path, head="value")
        with torch.no_grad():
            engine.module.model.score.weight.fill_(0.1)
        return engine.train_batch(batch, value_loss, want=VALUES, micro=WHOLE).values_by_name()["grad_norm"]

    assert gradient(path) == gradient(plain)

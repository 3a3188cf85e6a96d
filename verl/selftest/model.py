"""Tiny random models for the self-test, written as ordinary model directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.models.loading import quiet_transformers

VOCABULARY = 32


@dataclass(frozen=True)
class ModelDirs:
    """Directories of a policy and of a critic whose head is not zero."""

    policy: str
    critic: str


def save_tiny_models(directory: Path, seed: int = 0) -> ModelDirs:
    """Save a two-layer policy and critic of 16 dimensions; the global random state is left as it was.

    The weights are larger than usual, so that distributions are far from uniform and values from 0: a number that is
    the same everywhere would hide what the self-test looks for.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.2,
        num_labels=1,
        classifier_dropout=0.0,
    )
    kinds: dict[str, type[PreTrainedModel]] = {"policy": Qwen2ForCausalLM, "critic": Qwen2ForTokenClassification}
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        for name, kind in kinds.items():
            torch.manual_seed(seed)
            kind(config).to(torch.float32).save_pretrained(directory / name)
    return ModelDirs(str(directory / "policy"), str(directory / "critic"))

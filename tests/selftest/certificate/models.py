"""Model directories for the tests of the certificate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing

from tests.fixtures.tiny import make_tiny_model_dir, make_tokenizer
from tests.models.families import FAMILIES, SPARSE, make_config
from tests.workers.rollout.helpers import make_model

#: tokens of the test tokenizer
TOKENS = 104


def tiny(directory: Path) -> None:
    """The quick start's architecture: tied embeddings, a tokenizer with a chat template."""
    make_tiny_model_dir(directory)


def framed(directory: Path) -> None:
    """The same with a tokenizer that puts a token before every text."""
    make_tiny_model_dir(directory, model_type="llama")
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))]
    )
    tokenizer.save_pretrained(directory)


def family(name: str, directory: Path, *, extra_rows: int = 0, **changes: Any) -> None:
    """A tiny model of a family with a tokenizer; the embedding has ``extra_rows`` rows more than that has tokens."""
    placeholders = sorted(key for key in FAMILIES.get(name, {}) if key.endswith("_token_id"))
    settings: dict[str, Any] = {
        "vocab_size": TOKENS + len(placeholders) + extra_rows,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        # behind the tokens of the tokenizer
        **{key: TOKENS + place for place, key in enumerate(placeholders)},
    }
    model = make_model(make_config(name, **{**settings, **changes}), spread=3.0)
    with torch.no_grad():  # the pad token's row begins at zero, where a norm gives it a gradient above all others
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        embedding[0] = embedding[1].flip(0)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def padded(directory: Path) -> None:
    """An embedding with more rows than the tokenizer has tokens."""
    family("qwen3", directory, extra_rows=24)


def sliding(directory: Path) -> None:
    """Attention to the last tokens only."""
    family("mistral", directory)


def experts(directory: Path) -> None:
    """A mixture of experts."""
    family("qwen3_moe", directory, num_experts=32, num_experts_per_tok=8)


def scaled(directory: Path) -> None:
    """Rotary embeddings with a scaling."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    family("llama", directory, rope_parameters=rope)


def sparse(directory: Path) -> None:
    """Sparse attention: each token attends to a selection of tokens."""
    family("deepseek_v32", directory, **{**SPARSE, "index_n_heads": 32})


MODELS: dict[str, Callable[[Path], None]] = {
    maker.__name__: maker for maker in (tiny, framed, padded, sliding, experts, scaled, sparse)
}

"""Tokenizers that cannot be used are told when they are loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.utils.tokenizer import load_tokenizer


def test_a_model_without_its_tokenizer(tiny_model_dir: str, tmp_path: Path) -> None:
    """Transformers makes an empty tokenizer of the model's family, for which every prompt has no tokens."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model_dir) / name, tmp_path)
    with pytest.raises(ConfigError, match=r"has no vocabulary: none of .*; copy tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    assert len(load_tokenizer(tiny_model_dir)) > 90

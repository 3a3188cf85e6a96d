"""Model directories that are not whole, and models that are not supported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.misuse.case import Case, Place

MODEL = "{tmp}/model"
TRAIN, TUNE = [f"actor_rollout_ref.model.path={MODEL}"], [f"model.path={MODEL}"]


def damaged(change: Callable[[Path], object]) -> Callable[[Place], None]:
    """A copy of the tiny model, changed."""

    def prepare(place: Place) -> None:
        directory = place.tmp / "model"
        shutil.copytree(place.model, directory)
        change(directory)

    return prepare


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Place], None]:
    def function(directory: Path) -> None:
        file = directory / "model.safetensors"
        held = load_file(file)
        change(held)
        save_file(held, file, metadata={"format": "pt"})

    return damaged(function)


def config(**values: Any) -> Callable[[Place], None]:
    def function(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damaged(function)


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def missing_shard(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    table = dict.fromkeys(load_file(directory / "a.safetensors"), "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def only(name: str) -> Callable[[Path], None]:
    def function(directory: Path) -> None:
        for file in directory.iterdir():
            file.unlink()
        (directory / name).write_text("{}")

    return function


NORM = "model.norm.weight"
INTEGERS = tensors(lambda held: held.update({NORM: held[NORM].long()}))
NO_VOCABULARY = damaged(lambda directory: (directory / "tokenizer.json").unlink())

CASES = [
    Case("model without tokenizer.json", "train", TRAIN, prepare=NO_VOCABULARY, words=["tokenizer.json", "vocabulary"]),
    Case("sft without tokenizer.json", "sft", TUNE, prepare=NO_VOCABULARY, words=["tokenizer.json", "vocabulary"]),
    Case("generate without tokenizer.json", "generate", TUNE, prepare=NO_VOCABULARY, words=["tokenizer.json"]),
    Case("integer weights", "train", TRAIN, prepare=INTEGERS, words=[NORM, "I64"]),
    Case("sft of integer weights", "sft", TUNE, prepare=INTEGERS, words=[NORM, "I64"]),
    Case(
        "tensors of another model",
        "train",
        TRAIN,
        prepare=tensors(lambda held: held.update({"model.layers.0.gate.weight": torch.zeros(2)})),
        words=["model.layers.0.gate.weight", "no such tensors"],
    ),
    Case(
        "a tensor is missing",
        "preference",
        TUNE,
        prepare=tensors(lambda held: held.pop("model.layers.0.mlp.up_proj.weight")),
        words=["layers.0.mlp.up_proj.weight", "lack"],
    ),
    Case("cut weights", "train", TRAIN, prepare=damaged(cut), words=["model.safetensors", "cut"]),
    Case("a shard is missing", "sft", TUNE, prepare=damaged(missing_shard), words=["b.safetensors", "missing"]),
    Case(
        "empty generation config",
        "train",
        TRAIN,
        prepare=damaged(lambda directory: (directory / "generation_config.json").write_text("")),
        words=["generation_config.json", "empty"],
    ),
    Case(
        "config without JSON",
        "generate",
        TUNE,
        prepare=damaged(lambda directory: (directory / "config.json").write_text("{")),
        words=["config.json", "JSON"],
    ),
    Case("unknown model type", "train", TRAIN, prepare=config(model_type="qwen99"), words=["qwen99", "not known"]),
    Case(
        "model with code of its own",
        "train",
        TRAIN,
        prepare=config(model_type="mine", auto_map={"AutoConfig": "configuration.Mine"}),
        words=["mine", "trust_remote_code"],
    ),
    Case(
        "quantised weights",
        "sft",
        TUNE,
        prepare=config(quantization_config={"quant_method": "fp8"}),
        words=["quantised", "fp8"],
    ),
    Case("vision model that is not read", "train", TRAIN, prepare=config(model_type="qwen3_vl"), words=["qwen3_vl"]),
    Case("encoder with decoder", "sft", TUNE, prepare=config(model_type="t5"), words=["t5", "causal"]),
    Case("encoder", "generate", TUNE, prepare=config(model_type="bert"), words=["bert", "causal"]),
    Case("GGUF file", "train", TRAIN, prepare=damaged(only("model.gguf")), words=["config.json"]),
    Case("adapter alone", "sft", TUNE, prepare=damaged(only("adapter_config.json")), words=["config.json"]),
    Case("model.verify misspelt", "train", ["actor_rollout_ref.model.verify=alway"], words=["verify", "always"]),
]

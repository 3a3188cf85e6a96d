"""Model directories and words that the certificate of a model cannot work with."""

from __future__ import annotations

import importlib.util
import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.misuse.case import Case, Place

ONE = ["--device", "cpu", "--ranks", "0", "--only", "log-probs"]
MODEL = ["--model", "{model}", *ONE]
CHANGED = ["--model", "{tmp}/model", *ONE]


def copy(place: Place) -> None:
    """The model in the working directory."""
    shutil.copytree(place.model, place.tmp / "model")


def without_weights(place: Place) -> None:
    """A model directory without its weights."""
    copy(place)
    (place.tmp / "model" / "model.safetensors").unlink()


def cut_weights(place: Place) -> None:
    """A download that ended early."""
    copy(place)
    file = place.tmp / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def broken_config(place: Place) -> None:
    """A config that is no JSON."""
    copy(place)
    (place.tmp / "model" / "config.json").write_text("{", "utf-8")


def unknown_family(place: Place) -> None:
    """A model type of the future."""
    copy(place)
    file = place.tmp / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "model_type": "qwen9"}), "utf-8")


def other_shape(place: Place) -> None:
    """Weights of another model."""
    copy(place)
    file = place.tmp / "model" / "model.safetensors"
    tensors = {name: torch.ones(3, 3) if name.endswith("q_proj.weight") else t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def old_files(place: Place) -> None:
    """Weights in a pickle."""
    copy(place)
    file = place.tmp / "model" / "model.safetensors"
    torch.save(load_file(file), place.tmp / "model" / "pytorch_model.bin")
    file.unlink()


def has_vllm() -> str | None:
    """Why a missing vLLM cannot be tried."""
    return "vLLM is installed" if importlib.util.find_spec("vllm") else None


# fmt: off
CASES = [
    Case("certificate of nothing", "selftest", argv=["--model", "{tmp}/nowhere", *ONE], words=["{tmp}/nowhere"],
         environment={"HF_HUB_OFFLINE": "1"}),
    Case("certificate without weights", "selftest", argv=CHANGED, prepare=without_weights, words=["{tmp}/model"]),
    Case("certificate of a cut file", "selftest", argv=CHANGED, prepare=cut_weights, words=["{tmp}/model"]),
    Case("certificate of a broken config", "selftest", argv=CHANGED, prepare=broken_config, words=["config"]),
    Case("certificate of an unknown family", "selftest", argv=CHANGED, prepare=unknown_family, words=["qwen9"]),
    Case("certificate of weights of another shape", "selftest", argv=CHANGED, prepare=other_shape, words=["q_proj"]),
    Case("few layers of a pickle", "selftest", argv=[*CHANGED, "--layers", "1"], prepare=old_files,
         words=["--layers", "safetensors"]),
    Case("no layers at all", "selftest", argv=[*MODEL, "--layers", "0"], words=["--layers=0"]),
    Case("adapters without a model", "selftest", argv=["--lora"], words=["--lora", "--model"]),
    Case("certificate of every cut", "selftest", argv=[*MODEL, "--full"], words=["--full"]),
    Case("a check that does not exist", "selftest", argv=["--model", "{model}", "--only", "speed"],
         words=["speed", "log-probs"]),
    Case("a bug that does not exist", "selftest", argv=[*MODEL, "--plant", "moth"], words=["moth", "dropout"]),
    Case("certificate with vLLM that is not there", "selftest", skip=has_vllm,
         argv=["--model", "{model}", "--device", "cpu", "--ranks", "0", "--only", "sampling", "--rollout", "vllm"],
         words=["vllm"]),
]
# fmt: on

"""The model that is certified: its directory, its sizes, and a copy of its first layers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from verl.config import ModelConfig
from verl.errors import ConfigError
from verl.models.loading import load_hf_config, resolve_model_dir
from verl.models.sliced import INDEX, SINGLE
from verl.utils.owned_dirs import owned_scratch
from verl.utils.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: keys that say how many decoder layers a model has
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
#: keys that count layers of a kind, which cannot be more than all
_LAYER_BOUNDS = ("first_k_dense_replace", "max_window_layers", "num_kv_shared_layers", "moe_layer_start_index")
_NO_LAYERS = {"num_nextn_predict_layers": 0}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NOT_TEXT = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|audio_tower)\.")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CHUNK = 1 << 22


@dataclass
class Subject:
    """A model directory under test.

    Attributes:
        path: the directory that is loaded: the model's own, or that of the copy.
        source: the model's own directory.
        config: its Transformers config.
        tokenizer: None where the directory has none.
        layers: decoder layers of the loaded model.
        all_layers: of the model itself.
        notes: what a reader must know about what was not covered.
    """

    path: str
    source: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    layers: int
    all_layers: int
    trust_remote_code: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def text_config(self) -> PreTrainedConfig:
        """Config of the language model."""
        return self.config.get_text_config()

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return int(self.text_config.vocab_size)

    def describe(self) -> dict[str, Any]:
        """What the record says about the model."""
        return {
            "path": str(self.source),
            "model_type": self.config.model_type,
            "architectures": list(self.config.architectures or []),
            "layers": self.layers,
            "all_layers": self.all_layers,
            "vocabulary": self.vocabulary,
            "tokens": None if self.tokenizer is None else len(self.tokenizer),
            "tied_embeddings": bool(getattr(self.config, "tie_word_embeddings", False)),
        }


@contextmanager
def open_subject(path: str, *, layers: int | None = None, trust_remote_code: bool = False) -> Iterator[Subject]:
    """Read a model directory; with ``layers``, make a copy that has only so many decoder layers.

    Raises:
        ConfigError: no model is there, or it cannot be cut.
    """
    source = resolve_model_dir(path)
    with owned_scratch("certificate") as scratch:
        config = load_hf_config(ModelConfig(path=str(source), trust_remote_code=trust_remote_code))
        count = _layers_of(config.get_text_config())
        used, notes = source, []
        if layers is not None and layers < count:
            used = scratch / "model"
            notes = cut_layers(source, used, layers)
            notes.insert(0, f"{layers} of {count} layers, with the model's own sizes and weights")
            config = load_hf_config(ModelConfig(path=str(used), trust_remote_code=trust_remote_code))
        tokenizer = None
        if any(source.glob("tokenizer*")) or any(source.glob("*.model")):
            tokenizer = load_tokenizer(str(source), trust_remote_code)
        yield Subject(
            path=str(used),
            source=source,
            config=config,
            tokenizer=tokenizer,
            layers=_layers_of(config.get_text_config()),
            all_layers=count,
            trust_remote_code=trust_remote_code,
            notes=notes,
        )


def _layers_of(config: Any) -> int:
    for key in _LAYER_COUNTS:
        if isinstance(count := getattr(config, key, None), int):
            return count
    raise ConfigError(f"the config of {config.model_type!r} does not say how many layers the model has")


def cut_layers(source: Path, target: Path, layers: int) -> list[str]:
    """Write a model directory that has the first ``layers`` decoder layers of another one.

    Lists in ``config.json`` with one entry a layer become shorter. Of the weight files only the tensors that remain
    are read.

    Returns:
        Notes: kinds of layers that the copy lacks.

    Raises:
        ConfigError: the weights are not in safetensors files, or ``layers`` is below 1.
    """
    if layers < 1:
        raise ConfigError(f"--layers={layers}: a model needs at least 1 layer")
    target.mkdir(parents=True)
    raw = json.loads((source / "config.json").read_text("utf-8"))
    notes: list[str] = []
    _cut_config(raw, layers, notes)
    (target / "config.json").write_text(json.dumps(raw, indent=1), "utf-8")
    weights = {item for pattern in _WEIGHTS for item in source.glob(pattern)}
    for item in source.iterdir():
        if item.is_file() and item not in weights and item.name not in ("config.json", INDEX):
            (target / item.name).symlink_to(item.resolve())
    kept: dict[str, Tensor] = {}
    for file, names in _files(source).items():
        with safe_open(file, framework="pt") as reader:
            for name in names if names is not None else reader.keys():
                if _keeps(name, layers):
                    kept[name] = reader.get_tensor(name)
    save_file(kept, target / SINGLE, metadata={"format": "pt"})
    return notes


def _files(source: Path) -> dict[Path, list[str] | None]:
    """Weight files and the tensors that the index says they hold; None: look into the file."""
    index = source / INDEX
    if index.is_file():
        found: dict[Path, list[str] | None] = {}
        for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items():
            names = found.setdefault(source / file, [])
            assert names is not None
            names.append(name)
        return found
    if (source / SINGLE).is_file():
        return {source / SINGLE: None}
    raise ConfigError(f"--layers: {source} has no safetensors files, and only those can be read in part")


def _keeps(name: str, layers: int) -> bool:
    number = _LAYER.search(name)
    return number is None or bool(_NOT_TEXT.search(name)) or int(number.group(1)) < layers


def _cut_config(raw: dict[str, Any], layers: int, notes: list[str]) -> None:
    """Change a config in place, and that of the language model inside it."""
    nested = raw.get("text_config")
    if isinstance(nested, dict):
        _cut_config(nested, layers, notes)
    count = next((raw[key] for key in _LAYER_COUNTS if isinstance(raw.get(key), int)), None)
    if count is None:
        return
    for key, value in raw.items():
        if key in _LAYER_COUNTS and isinstance(value, int):
            raw[key] = layers
        elif key in _LAYER_BOUNDS and isinstance(value, int):
            raw[key] = min(value, layers)
            if key == "first_k_dense_replace" and value >= layers:
                notes.append(
                    f"the first {value} layers have no experts, so the copy has none: use --layers {value + 1}"
                )
        elif key in _NO_LAYERS:
            raw[key] = _NO_LAYERS[key]
        elif isinstance(value, list) and len(value) == count:
            raw[key] = value[:layers]
            if all(isinstance(item, str) for item in value):
                lost = sorted(set(value) - set(value[:layers]))
                if lost:
                    first = min(value.index(kind) for kind in lost)
                    notes.append(f"the copy has no layer of kind {', '.join(lost)}: use --layers {first + 1} or more")


def file_hashes(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file at the top of a directory, by name."""
    files = sorted(item for item in directory.iterdir() if item.is_file())
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(_sha256, files))
    return {
        item.name: {"bytes": item.stat().st_size, "sha256": digest} for item, digest in zip(files, digests, strict=True)
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()

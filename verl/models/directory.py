"""Whether a model directory is whole and of a model that is supported here, from its configuration and file headers.

No tensor is read, so this is asked at start-up, before any process is started.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from verl.errors import ConfigError, VerlError
from verl.models.families import named_failures
from verl.models.loading import language_model_class, load_hf_config, quiet_transformers, resolve_model_dir
from verl.models.shape import cached_token_bytes
from verl.models.sliced import INDEX, SINGLE
from verl.models.vision import FAMILIES, ImageTokens

if TYPE_CHECKING:
    from verl.config import ModelConfig

#: numeric types of weights, by their names in safetensors files
_FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
# Tensors that older writers stored and no model reads, or that belong to parts that are not trained here.
_UNREAD = re.compile(
    r"inv_freq$|masked_bias$|\.attn\.bias$|attention\.bias$|position_ids$|(^|\.)mtp(\.|_|$)|_scale_inv$"
)
_HEADS = re.compile(r"^(lm_head|score|classifier|v_head|embed_out|output_layer)\.")
_SHOWN = 3


def check_model(model_config: ModelConfig, key: str, *, trained: bool = True, rollout: str | None = None) -> None:
    """Refuse a model that cannot work, with all that is wrong.

    Args:
        model_config: the section.
        key: its dotted name, for messages.
        trained: weights are trained, or read by a training engine; False: another engine may know more forms of them.
        rollout: name of the rollout engine that samples from the model; None: none does.

    Raises:
        ConfigError: files are missing, damaged or of another model, or the model's type is not supported.
    """
    directory = resolve_model_dir(model_config.path)
    problems = list(_unreadable(directory, model_config))
    if not problems:
        # nothing is copied to shared memory for a look at headers
        config = load_hf_config(replace(model_config, use_shm=False))
        problems = [problem for problem in (_unsupported(config, trained),) if problem]
        if not problems:
            problems = list(_wrong_files(directory, config, changed=bool(model_config.override_config)))
    if problems:
        raise ConfigError(f"{key}.path={model_config.path}: " + "; ".join(problems))
    if rollout == "hf":  # the other engines size their cache themselves
        with named_failures(config, "sizing its key-value cache"):
            cached_token_bytes(config, itemsize=1)


def _unreadable(directory: Path, model_config: ModelConfig) -> Iterator[str]:
    """What keeps the configuration from being read."""
    stored = directory / "config.json"
    if not stored.is_file():
        if any(directory.glob("*.gguf")):
            yield "holds GGUF files, which are not trained here; give the model's directory with safetensors files"
        elif (directory / "adapter_config.json").is_file():
            yield "holds an adapter alone; give the base model as model.path and this as model.lora_adapter_path"
        else:
            yield "has no config.json, so it is not a Hugging Face model directory"
        return
    values = _json_object(stored)
    if isinstance(values, str):
        yield values
        return
    kind = values.get("model_type")
    own_code = bool(values.get("auto_map")) and model_config.trust_remote_code
    if not isinstance(kind, str):
        yield "its config.json has no model_type, so it is not that of a Transformers model"
    elif kind not in CONFIG_MAPPING and not own_code:
        remedy = "set trust_remote_code=true to run it" if values.get("auto_map") else "use a newer Transformers"
        what = "comes with code of its own" if values.get("auto_map") else "is not known to the installed Transformers"
        yield f"model type {kind!r} {what}; {remedy}, or use another model (docs/reference/models.md)"
    for name in ("generation_config.json", INDEX, "tokenizer_config.json"):
        if (directory / name).is_file() and isinstance(problem := _json_object(directory / name), str):
            yield problem


def _json_object(file: Path) -> dict[str, Any] | str:
    """The object in a file, or a sentence that says why there is none."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        size = file.stat().st_size if file.is_file() else 0
        return f"{file.name} is {'empty' if not size else f'no JSON ({error})'}; copy it again"
    return values if isinstance(values, dict) else f"{file.name} holds no JSON object; copy it again"


def _unsupported(config: PreTrainedConfig, trained: bool) -> str | None:
    """Why models of this type do not work here."""
    kind, advice = config.model_type, "(docs/reference/models.md lists tested families)"
    if getattr(config, "is_encoder_decoder", False):
        return f"model type {kind!r} is an encoder with a decoder; causal language models are supported {advice}"
    remote = not type(config).__module__.startswith("transformers.")
    causal = type(config) in AutoModelForCausalLM._model_mapping
    if not causal and ImageTokens.of(config) is None and not remote:
        parts = sorted(name.removesuffix("_config") for name in config.sub_configs if name != "text_config")
        reads = f" with {' and '.join(parts)} parts" if parts else ""
        return (
            f"model type {kind!r}{reads} is not supported; supported are causal language models and, with images, "
            f"{' and '.join(FAMILIES)} {advice}"
        )
    if not remote and _looks_both_ways(config):
        return f"model type {kind!r} reads text in both directions; causal language models are supported {advice}"
    model = _language_model(config) if trained else None
    if model is not None and model.base_model is model:
        return (
            f"model type {kind!r} is not supported: {type(model).__name__} has no backbone apart from its head {advice}"
        )
    method = getattr(config, "quantization_config", None)
    if trained and method:
        name = method.get("quant_method") if isinstance(method, Mapping) else getattr(method, "quant_method", None)
        return f"its weights are quantised ({name}), and such weights are not trained; give the model before that"
    return None


def _looks_both_ways(config: PreTrainedConfig) -> bool:
    """Encoders that Transformers also offers as language models, where nothing makes them causal."""
    masked = type(config) in AutoModelForMaskedLM._model_mapping
    return masked and not getattr(config, "is_decoder", True)


# ---------------------------------------------------------------------------- files of weights


def _wrong_files(directory: Path, config: PreTrainedConfig, *, changed: bool) -> Iterator[str]:
    """What is wrong with safetensors files, by their headers; files of other kinds are not checked.

    Args:
        directory: of the model.
        config: of the model as it is built.
        changed: ``override_config`` changes it: with fewer layers the files have tensors that are not read.
    """
    expected: dict[str, list[str]] = {}  # file -> tensors that the index has there; none: whatever it has
    if (directory / INDEX).is_file():
        table = _json_object(directory / INDEX)
        places = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(places, dict):
            yield f"{INDEX} has no weight_map; copy it again"
            return
        for name, file in places.items():
            expected.setdefault(str(file), []).append(name)
    elif (directory / SINGLE).is_file():
        expected[SINGLE] = []
    else:
        return
    stored: dict[str, tuple[str, list[int]]] = {}
    broken = False
    for file, names in sorted(expected.items()):
        header = _header(directory / file)
        if isinstance(header, str):
            broken = True
            yield header
            continue
        if lacking := [name for name in names if name not in header]:
            yield f"{file} lacks {_some(lacking)}, which {INDEX} places there"
        stored |= header
    if broken:
        return
    if wrong := [name for name, (kind, _) in stored.items() if kind not in _FLOATING and _is_weight(name)]:
        yield f"{_some(wrong)} of type {stored[wrong[0]][0]}: weights are floating-point numbers"
    yield from _foreign(stored, config, changed=changed)


def _header(file: Path) -> dict[str, tuple[str, list[int]]] | str:
    """Tensor -> type and shape, or a sentence about the file."""
    again = "copy or download the model again"
    if not file.is_file():
        return f"{file.name} is missing, which {INDEX} names; {again}"
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, 100 << 20):
                raise ValueError("its header is longer than the file")
            table = json.loads(stream.read(length))
        table.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
        found = {name: (str(entry["dtype"]), list(entry["shape"])) for name, entry in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        return f"{file.name} is no safetensors file ({error}); {again}"
    if 8 + length + end != size:
        return f"{file.name} has {size} bytes instead of {8 + length + end}: it is cut or damaged; {again}"
    return found


def _is_weight(name: str) -> bool:
    return name.endswith((".weight", ".bias"))


def _language_model(config: PreTrainedConfig) -> PreTrainedModel | None:
    """The language model without memory for its weights; None where its code comes with it or cannot build it so."""
    if not type(config).__module__.startswith("transformers."):
        return None
    try:
        model_class = language_model_class(config)._model_mapping[type(config)]
        text = config.get_text_config()
        with torch.device("meta"), quiet_transformers():
            return model_class._from_config(text if model_class.config_class is type(text) else config)  # type: ignore[no-any-return]
    except VerlError:
        raise
    except Exception:  # noqa: BLE001 - reported where the model is built
        return None


def _foreign(stored: Mapping[str, tuple[str, list[int]]], config: PreTrainedConfig, *, changed: bool) -> Iterator[str]:
    """Tensors that the architecture does not have, and that it has and the files lack."""
    model = _language_model(config)
    if model is None or type(model.config) is not type(config):  # the files hold more than the language model
        return
    if get_model_conversion_mapping(model, add_legacy=False):  # files name tensors in another way
        return
    prefix = f"{model.base_model_prefix}."
    shapes = {name.removeprefix(prefix): tensor.shape for name, tensor in model.state_dict().items()}
    have = {name.removeprefix(prefix) for name in stored}
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), _UNREAD.pattern, _HEADS.pattern]
    extra = [name for name in stored if name.removeprefix(prefix) not in shapes and not _matches(name, ignored)]
    kind = f"{type(model).__name__} (model type {config.model_type!r})"
    if extra and not changed:
        yield f"{_some(extra)}: {kind} has no such tensors; config.json and weights are of different models"
    optional = [*(model._keys_to_ignore_on_load_missing or ()), _HEADS.pattern]
    tied = {name.removeprefix(prefix) for name in getattr(model, "all_tied_weights_keys", None) or ()}
    needed = {name.removeprefix(prefix) for name, _ in model.named_parameters()}
    lacking = [name for name in sorted(needed - have - tied) if not _matches(name, optional)]
    if lacking:
        yield f"the files lack {_some(lacking)} of {kind}; copy or download the model again"


def _matches(name: str, patterns: list[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more

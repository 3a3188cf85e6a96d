"""Loading Hugging Face models from a directory or hub name as the training engines need them."""

from __future__ import annotations

import difflib
import importlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.utils import logging as hf_logging

from verl.errors import ConfigError
from verl.models.attention import IMPLEMENTATION
from verl.models.sliced import DeferredWeights, build_deferred
from verl.models.vision import ImageTokens
from verl.utils.owned_dirs import shared_copy
from verl.utils.seeding import derive_seed

if TYPE_CHECKING:
    from verl.config import ModelConfig

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Scripts switch dropout off by the names of every family at once; a name that a config lacks then asks for nothing.
_DROPOUT_KEYS = frozenset({"attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "hidden_dropout", "dropout"})
# Layer kinds whose only exchange between tokens is attention, so that rows can be packed.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_STATE_LAYERS = frozenset({"conv", "linear_attention", "mamba", "recurrent", "hybrid"})


def resolve_model_dir(path: str | None, *, use_shm: bool = False) -> Path:
    """The local directory of a model.

    Args:
        path: a directory, or a hub name, whose files come from the hub's cache or are downloaded into it.
        use_shm: copy the directory to memory-backed storage first and return the copy; ranks of a node share it.

    Raises:
        ConfigError: there is no such directory and the hub does not give one.
    """
    if not path:
        raise ConfigError("model.path is not set; give a model directory or a hub name")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        try:
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(path))
        except Exception as error:  # whatever the hub client raises: the user's remedy is the same
            raise ConfigError(
                f"model.path={path!r} is neither a directory nor a model that the hub gives ({error}); "
                "check the spelling, or download the model and give its directory"
            ) from error
    return _copy_to_shm(directory) if use_shm else directory


def _copy_to_shm(directory: Path) -> Path:
    real = directory.resolve()
    stamp = max((item.stat().st_mtime_ns for item in real.iterdir()), default=0)
    return shared_copy(f"{real.name}-{derive_seed(stamp, str(real)):x}", lambda path: shutil.copytree(real, path))


def import_external_lib(names: str | None) -> None:
    """Import the modules named in ``model.external_lib`` (comma-separated), which register the user's plug-ins."""
    for name in filter(None, (part.strip() for part in (names or "").split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"model.external_lib={name!r} cannot be imported: {error}") from error


def load_hf_config(model_config: ModelConfig) -> PreTrainedConfig:
    """Read the model's config and apply ``override_config``.

    Args:
        model_config: ``path``, ``trust_remote_code``, ``use_shm``, ``override_config``. Nested mappings change nested
            configs; a mapping under ``model_config`` counts as if its keys stood outside; ``attn_implementation`` picks
            another attention than the library's own (and thereby switches packing off).

    Raises:
        ConfigError: no model there, or an override that names nothing in the config.
    """
    directory = resolve_model_dir(model_config.path, use_shm=model_config.use_shm)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=model_config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot read a model config in {directory}: {error}; model.path must hold a config.json of a model type "
            "that Transformers knows (or set model.trust_remote_code=true for one that brings its own code)"
        ) from error
    overrides = dict(model_config.override_config or {})
    overrides.update(overrides.pop("model_config", None) or {})
    attention = overrides.pop("attn_implementation", None)
    apply_overrides(config, overrides)
    if attention is None and _uses_attention_interface(config):
        attention = "eager" if selects_tokens(config) else IMPLEMENTATION
    config._attn_implementation = attention  # None: what Transformers chooses
    return config


def _class_of(config: PreTrainedConfig) -> type | None:
    """The class of a language model; None for code that comes with a model."""
    try:
        return language_model_class(config)._model_mapping[type(config)]  # type: ignore[no-any-return]
    except KeyError:
        return None


def _uses_attention_interface(config: PreTrainedConfig) -> bool:
    """Whether the family lets attention be replaced; code that comes with a model is not trusted to."""
    return bool(getattr(_class_of(config), "_supports_attention_backend", False))


def selects_tokens(config: PreTrainedConfig) -> bool:
    """Whether each token attends to a selection of tokens (DeepSeek's sparse attention and its relatives).

    Such models apply the selection themselves in Transformers' own attention alone, and pass it on to any other.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    return "indexed_attention" in kinds or getattr(text, "index_topk", None) is not None


def keeps_state(config: PreTrainedConfig) -> bool:
    """Whether something besides attention carries values from token to token: a convolution or a recurrence."""
    model_class = _class_of(config)
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(getattr(model_class, "_is_stateful", False)) or bool(kinds & _STATE_LAYERS)


def apply_overrides(config: PreTrainedConfig, overrides: Mapping[str, Any], where: str = "override_config") -> None:
    """Set config values recursively.

    Raises:
        ConfigError: a key that the config does not have.
    """
    for key, value in overrides.items():
        if not hasattr(config, key):
            if key in _DROPOUT_KEYS and value in (0, None):
                continue
            near = difflib.get_close_matches(key, list(config.to_dict()), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model.{where}.{key}: {type(config).__name__} has no such value{hint}")
        current = getattr(config, key)
        if isinstance(value, Mapping) and isinstance(current, PreTrainedConfig):
            apply_overrides(current, value, f"{where}.{key}")
        elif isinstance(value, Mapping) and isinstance(current, Mapping):
            setattr(config, key, {**current, **value})
        else:
            setattr(config, key, value)


def supports_packing(config: PreTrainedConfig) -> bool:
    """Whether rows without padding give exact results: attention alone may mix tokens, and it must be our own."""
    text = config.get_text_config()
    if config._attn_implementation != IMPLEMENTATION or keeps_state(config):
        return False
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    return layers <= _ATTENTION_LAYERS and getattr(text, "is_causal", True) is not False


def load_causal_lm(
    model_config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    hf_config: PreTrainedConfig | None = None,
    deferred: DeferredWeights | None = None,
) -> PreTrainedModel:
    """Load a causal language model on CPU.

    Args:
        model_config: see :func:`load_hf_config`.
        dtype: of the parameters.
        hf_config: the config to use instead of the stored one.
        deferred: filled with where parameters are, where they need not be read now: the model then has none of their
            memory until ``deferred.materialise``. Stays empty where they are read.
    """
    config = hf_config or load_hf_config(model_config)
    model, _ = _from_pretrained(language_model_class(config), model_config, dtype, config, deferred=deferred)
    return model


def load_value_model(
    model_config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    hf_config: PreTrainedConfig | None = None,
    deferred: DeferredWeights | None = None,
) -> PreTrainedModel:
    """Load a critic: a backbone with a linear head of one output, in Transformers' token-classification form.

    A directory of a causal LM gives the backbone alone. The head then starts at **zero**: all first values are 0, so
    the first advantages are the plain rewards-to-go, and the head learns before it moves the backbone.
    """
    config = hf_config or load_hf_config(model_config)
    config.num_labels = 1
    config.classifier_dropout = 0.0  # a dropped value would make the old and new values of one state differ
    model, missing = _from_pretrained(
        model_class("value", config), model_config, dtype, config, head=True, deferred=deferred
    )
    if missing and not deferred:  # deferred ones begin at 0
        with torch.no_grad():
            for parameter in model.score.parameters():
                parameter.zero_()
    return model


def load_classifier(
    model_config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    hf_config: PreTrainedConfig | None = None,
    deferred: DeferredWeights | None = None,
) -> PreTrainedModel:
    """Load a reward model (sequence classification).

    Raises:
        ConfigError: the directory has no trained head, or the architecture keeps it elsewhere than in ``score``.
    """
    config = hf_config or load_hf_config(model_config)
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        config.num_labels = 1
    model, missing = _from_pretrained(
        model_class("classifier", config), model_config, dtype, config, head=True, deferred=deferred
    )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear head named 'score'; use a decoder-style reward model")
    if missing:
        logger.warning(
            "%s has no trained score head; it starts at zero and every score is 0 until it is trained",
            model_config.path,
        )
        if not deferred:
            with torch.no_grad():
                model.score.weight.zero_()
    return model


#: head of an engine -> loads its model
LOADERS: dict[str, Callable[..., PreTrainedModel]] = {
    "lm": load_causal_lm,
    "value": load_value_model,
    "classifier": load_classifier,
}


#: head -> the Auto class of models with it, and what a family without one gets
_WITH_HEADS: dict[str, tuple[Any, type]] = {
    "value": (AutoModelForTokenClassification, GenericForTokenClassification),
    "classifier": (AutoModelForSequenceClassification, GenericForSequenceClassification),
}


def model_class(head: str, config: PreTrainedConfig) -> Any:
    """The class, or Auto class, of a model with a head, for ``from_pretrained``."""
    if head == "lm":
        return language_model_class(config)
    auto, generic = _WITH_HEADS[head]
    return auto if type(config) in auto._model_mapping else _class_with_head(generic, config)


def language_model_class(config: PreTrainedConfig) -> Any:
    """The Auto class of a model that predicts tokens; models that read images too have one of their own."""
    if type(config) in AutoModelForCausalLM._model_mapping or ImageTokens.of(config) is None:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _class_with_head(generic: type, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """A classifier for a family that Transformers defines none for, built as those of the other families are."""
    backbone = AutoModel._model_mapping[type(config)]
    family = next(
        base
        for base in backbone.__mro__[1:]
        if issubclass(base, PreTrainedModel) and base is not PreTrainedModel and "PreTrained" in base.__name__
    )
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    # "config" is annotated so that Transformers sees this family's config class, not the one of a multi-modal parent.
    space = {"config": None, "__annotations__": {"config": type(config)}, "config_class": type(config)}
    # files of some families name tensors differently from the modules, in the way of their language model
    language_model = language_model_class(config)._model_mapping.get(type(config), None)
    renamed = get_checkpoint_conversion_mapping(getattr(language_model, "__name__", ""))
    if renamed is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (generic, family), space)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no load report from Transformers; errors still raise."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _from_pretrained(
    model_class: Any,
    model_config: ModelConfig,
    dtype: torch.dtype,
    config: PreTrainedConfig,
    *,
    head: bool = False,
    deferred: DeferredWeights | None = None,
) -> tuple[Any, list[str]]:
    """Load, and insist that every parameter comes from the files; with ``head`` that may be missing.

    Returns:
        The model and the names of missing parameters.
    """
    directory = resolve_model_dir(model_config.path, use_shm=model_config.use_shm)
    import_external_lib(model_config.external_lib)
    mismatched: list[tuple[str, torch.Size, torch.Size]] = []
    try:
        with quiet_transformers():  # missing heads are this module's own business, and every rank would draw a bar
            built = None
            if deferred is not None:
                built = build_deferred(
                    model_class, directory, config, dtype, trust_remote_code=model_config.trust_remote_code
                )
            if built is not None and deferred is not None:
                model, deferred.places, missing = built
            else:
                model, info = model_class.from_pretrained(
                    directory,
                    config=config,
                    dtype=dtype,
                    attn_implementation=config._attn_implementation,
                    trust_remote_code=model_config.trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # an error below, which names them
                )
                missing = sorted(info["missing_keys"])
                mismatched = sorted(info["mismatched_keys"])
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load a model from {directory}: {error}") from error
    if mismatched:
        name, stored, expected = mismatched[0]
        raise ConfigError(
            f"{directory}: {len(mismatched)} parameters have another shape in the files than its config.json says, "
            f"first {name!r} with {list(stored)} instead of {list(expected)}; take both from the same model"
        )
    lacking = [name for name in missing if not (head and name.startswith("score."))]
    if lacking:
        raise ConfigError(
            f"{directory} lacks {len(lacking)} of the parameters of {type(model).__name__}, first {lacking[0]!r}; "
            "the files do not belong to this model type"
        )
    return model, missing

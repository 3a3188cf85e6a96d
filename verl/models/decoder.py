"""The decoder layers of a Transformers model: what they are, and compiling what lies around their attention."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from verl.errors import ConfigError


def decoder_layers(model: PreTrainedModel, class_names: list[str]) -> list[nn.Module]:
    """The modules that become one unit of sharding each.

    Args:
        model: a Transformers model.
        class_names: classes to look for; empty means those that the model says must not be split.

    Raises:
        ConfigError: no module has such a class.
    """
    names = set(class_names) or set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found and not class_names:
        found = list(getattr(model.base_model, "layers", []))
    if not found:
        raise ConfigError(
            f"no module of {type(model).__name__} is a {sorted(names) or 'decoder layer'}; set "
            "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap to the class name of its layers"
        )
    # A unit inside a unit would be gathered twice.
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


def compile_dense_parts(layers: Iterable[nn.Module]) -> None:
    """Compile what has no data-dependent Python in it: everything in a layer but its attention.

    Needs a C++ compiler on CPUs. The first passes take the time of compiling, half a minute or more.
    """
    for layer in layers:
        for name, child in layer.named_children():
            if "attn" not in name and "attention" not in name.removesuffix("_layernorm").removesuffix("_norm"):
                child.compile(dynamic=True)

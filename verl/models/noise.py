"""What a model does in training alone: random noise, and gradients that a padding token does not get.

The policy that samples has no noise. Dropout, layers left out and jitter of routers would make the policy that is
trained another one: importance ratios are not 1 on the first step, and a value depends on the draw. Training is
therefore without noise unless ``model.training_noise`` asks for it.

An embedding with a ``padding_idx`` gives no gradient for that token wherever it stands. Many models pad with a token
that is also sampled, such as the end of a text. Here masks say what padding is, so every token of a row gives its
gradient.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

_NOISE = re.compile(r"dropout|pdrop|layerdrop|drop_path|drop_rate|drop_prob|jitter")
#: read by nothing that is trained here: heads of other tasks
_ELSEWHERE = re.compile(r"^(classifier|summary|qa|seq_classif|head|pooler)_|_first_dropout$|_last_dropout$")


def noise_of(config: PreTrainedConfig) -> dict[str, float]:
    """The sources of noise in a configuration, at any depth, that are not 0: dotted name -> value."""
    return dict(_noisy(config.to_dict()))


def _noisy(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _noisy(value, f"{prefix}{key}.")
        elif _is_noise(str(key), value):
            yield f"{prefix}{key}", float(value)


def _is_noise(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > 0 and bool(_NOISE.search(name)) and not _ELSEWHERE.search(name)


def report_noise(noise: Mapping[str, float], kept: bool) -> None:
    """One line that names the noise that is switched off, or trained with."""
    if noise:
        names = ", ".join(f"{name}={value:g}" for name, value in noise.items())
        if kept:
            logger.warning("model.training_noise=True: training has noise that sampling does not have: %s", names)
        else:
            logger.warning("switched off for training, as sampling does not have it (model.training_noise): %s", names)


def set_training(module: nn.Module, *, noise: bool) -> None:
    """Make a module ready for a training step.

    Args:
        module: holds a Transformers model.
        noise: with dropout and its like. Without, all parts are in evaluation mode but for the layers that recompute
            their activations, which do so in training mode only.
    """
    module.train(noise)
    if noise:
        return
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer) and part.gradient_checkpointing:
            part.training = True
            for name, value in vars(part).items():
                if _NOISE.search(name) and isinstance(value, float):
                    setattr(part, name, 0.0)


def give_every_token_its_gradient(module: nn.Module) -> None:
    """Set ``padding_idx`` of embeddings aside; values of the forward pass stay as they are."""
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.padding_idx = None

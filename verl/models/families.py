"""Which model families are tested, and the check of those that are not when their model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from verl.errors import ConfigError, VerlError
from verl.models.probe import Comparison, Probe, compare

if TYPE_CHECKING:
    from verl.config import ModelConfig

logger = logging.getLogger(__name__)

#: model types of which training, packing and generation are tested against plain Transformers; the table in the
#: documentation (docs/reference/models.md) has a row for each
TESTED_FAMILIES = frozenset(
    {
        "apertus",
        "cohere",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5_moe",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "hunyuan_v1_dense",
        "hy_v3",
        "lfm2",
        "llama",
        "mimo_v2_flash",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)


def must_verify(model_config: ModelConfig, config: PreTrainedConfig) -> bool:
    """Whether a model is compared with plain Transformers when it is built.

    Args:
        model_config: ``verify`` decides: ``auto`` leaves out families of the tested table.
        config: of the model. Code that comes with the model is never a tested family, whatever its name.
    """
    if model_config.verify != "auto":
        return model_config.verify == "always"
    return config.model_type not in TESTED_FAMILIES or not type(config).__module__.startswith("transformers.")


def require_agreement(
    got: Sequence[Tensor],
    want: Sequence[Tensor],
    probe: Probe,
    *,
    model_type: str,
    what: str,
    dtype: torch.dtype,
    remedy: Callable[[], str],
) -> Comparison:
    """Refuse a model whose numbers are not those of plain Transformers.

    Args:
        got: numbers of each row of ``probe``, as computed here.
        want: the same in plain Transformers.
        probe: the rows.
        model_type: of the model, for messages.
        what: what computed ``got``, such as ``"packed training rows"``.
        dtype: of the computation.
        remedy: says what to do; asked only where the numbers differ.

    Raises:
        ConfigError: the numbers differ by more than rounding.
    """
    found = compare(got, want, probe.rows, dtype=dtype)
    if not found.agrees:
        raise ConfigError(
            f"model type {model_type!r} is not computed right: {what} differ from plain Transformers, {found} (at most "
            f"{found.tolerance.largest:g} is rounding in {str(dtype).removeprefix('torch.')}). {remedy()}"
        )
    beyond = "".join(f"; {limit.name}={limit.tokens} was not reached" for limit in probe.not_reached)
    logger.info(
        "model type %r: %s agree with plain Transformers on %d probe tokens, largest difference %.2g%s",
        model_type,
        what,
        probe.tokens,
        found.difference,
        beyond,
    )
    return found


@contextmanager
def named_failures(config: PreTrainedConfig, doing: str) -> Iterator[None]:
    """Within the context, an error of an untested family's code becomes one sentence that names the family.

    Args:
        config: of the model. Errors of tested families pass unchanged: they are faults of this library or of the data.
        doing: what fails, such as ``"building it"``.

    Raises:
        ConfigError: in place of anything but the library's own errors and a lack of memory.
    """
    try:
        yield
    except (VerlError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if config.model_type in TESTED_FAMILIES:
            raise
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise ConfigError(
            f"model type {config.model_type!r} is not supported: {doing} failed with {type(error).__name__}: {said}. "
            "Use a model of one of the tested families (docs/reference/models.md)"
        ) from error

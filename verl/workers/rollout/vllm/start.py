"""Starts vLLM's engine in a training process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

import torch

from verl.errors import ConfigError
from verl.workers.rollout.vllm.process import leave_stale_groups, named_shared_memory, own_environment, placed_groups
from verl.workers.rollout.vllm.weights import deferred_packing


class NoAdapterError(ConfigError):
    """vLLM's model has no places for adapters."""


def start_engine(arguments: dict[str, Any], device: torch.device, groups: Sequence[Sequence[int]] | None = None) -> Any:
    """vLLM's engine in this process.

    Args:
        arguments: of ``EngineArgs``.
        device: of the weights.
        groups: ranks that share the weights; None: neighbours.

    Raises:
        NoAdapterError: adapters were asked for, and vLLM's model has no places for them.
        ConfigError: vLLM refuses the model or an argument.
    """
    with own_environment(device.index), named_shared_memory(), placed_groups(groups):
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        leave_stale_groups()
        try:
            with deferred_packing() if device.type == "cpu" else contextlib.nullcontext():
                settings = EngineArgs(**arguments).create_engine_config()
                _require_own_model(settings.model_config)
                if settings.lora_config is not None:
                    _require_places(settings.model_config)
                engine = LLMEngine.from_vllm_config(settings, disable_log_stats=True)
        except NoAdapterError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"vLLM cannot be set up for rollout.name=vllm: {error}") from error
        finally:
            gc.unfreeze()  # vLLM takes everything that exists for its own and keeps it from collection
    # when the engine is collected, vLLM would destroy the trainer's process groups with its own
    engine.engine_core._finalizer.detach()
    return engine


def _require_own_model(model_config: Any) -> None:
    """Refuse models that vLLM runs with Transformers' classes: it rewrites those, and the trainer uses them too.

    Raises:
        ConfigError: vLLM has no implementation of its own.
    """
    if model_config.using_transformers_backend():
        raise ConfigError(
            f"vLLM has no implementation of its own for {', '.join(model_config.hf_config.architectures)}, and the one "
            "that borrows from Transformers cannot share a process with the trainer; set "
            "actor_rollout_ref.rollout.name=hf"
        )


def _require_places(model_config: Any) -> None:
    """Refuse models to whose layers vLLM cannot add adapters.

    Raises:
        NoAdapterError: so it is.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_lora

    kind = get_model_cls(model_config)
    if not supports_lora(kind):
        raise NoAdapterError(f"vLLM's {kind.__name__} has no places for adapters")

"""Faults to switch on, so that anyone can see the certificate fail (``verl selftest --model DIR --plant NAME``).

Each is a patch of the library for the length of a ``with`` block, in this process and in the ranks that it starts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface

from verl import model_merger
from verl.data import chat
from verl.errors import ConfigError
from verl.models import attention, families, heads, loading, packing
from verl.selftest import planted_bugs
from verl.utils import tokenizer
from verl.workers.engine import checkpoint as engine_checkpoint
from verl.workers.engine.fsdp import engine as fsdp_engine
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.rollout import batch, sampler, settings
from verl.workers.rollout.hf import engine as hf_engine
from verl.workers.rollout.hf import weights
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import Completion

#: planted now, in this process
ACTIVE: list[str] = []


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        install: puts it in place on an ``ExitStack``; its docstring says what is wrong.
        check: the check that it makes fail.
    """

    install: Callable[[ExitStack], None]
    check: str

    @property
    def what(self) -> str:
        """What is wrong, in one sentence."""
        return " ".join((self.install.__doc__ or "").split())


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Run the block with a fault in the library.

    Raises:
        ConfigError: no such fault.
    """
    if name not in FAULTS:
        raise ConfigError(f"unknown bug {name!r}; the bugs are {', '.join(FAULTS)}")
    with ExitStack() as stack:
        FAULTS[name].install(stack)
        ACTIVE.append(name)
        stack.callback(ACTIVE.remove, name)
        yield


def _patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value))


def _patch_function(stack: ExitStack, original: Any, replacement: Any) -> None:
    """Replace a function in every module that holds it under its own name."""
    name = original.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("verl.") and getattr(module, "__dict__", {}).get(name) is original:
            _patch(stack, module, name, replacement)


def _after_build(stack: ExitStack, change: Callable[[nn.Module], None]) -> None:
    """Change the Transformers model of every FSDP engine that is built."""
    real = FSDPEngine.build

    def build(self: FSDPEngine) -> None:
        real(self)
        change(self.module.model)

    _patch(stack, FSDPEngine, "build", build)


# ---- the trainer ----------------------------------------------------------------------------------------------------


def _sparse_indexer(stack: ExitStack) -> None:
    """Sparse attention attends to all tokens, and nothing compares the model with Transformers when it is built."""
    _patch(stack, loading, "selects_tokens", lambda config: False)
    _patch_function(stack, families.must_verify, lambda *_: False)


def _pad_gradient(stack: ExitStack) -> None:
    """The embedding drops the gradient of pad tokens, inside a row too (Transformers' ``padding_idx``)."""

    def change(model: nn.Module) -> None:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        embedding.padding_idx = model.config.get_text_config().pad_token_id or 0  # type: ignore[union-attr, operator]

    _after_build(stack, change)


def _without_text(stack: ExitStack) -> None:
    """Tokens that the tokenizer does not have are sampled, and share the probability in training."""
    _patch_function(stack, tokenizer.unsampled_tokens, lambda *_: ())
    _patch_function(stack, settings.unsampled_of, lambda *_: ())


def _dropout(stack: ExitStack) -> None:
    """Attention drops a tenth of its weights in training passes."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1  # type: ignore[assignment]

    _after_build(stack, change)
    _patch(stack, fsdp_engine, "set_training", lambda module, *, noise: module.train())


def _row_leak(stack: ExitStack) -> None:
    """Packed rows attend to the rows before them."""
    real = packing._plan_attention

    def plan(
        paths: np.ndarray, lengths: np.ndarray, prompt_lengths: np.ndarray, leader: np.ndarray | None, total: int
    ) -> attention.AttentionPlan:
        return real(np.arange(total)[None], np.array([total]), np.array([1]), None, total)

    _patch(stack, packing, "_plan_attention", plan)


def _positions(stack: ExitStack) -> None:
    """Position ids of packed rows run on from row to row."""
    real = packing.build_layout

    def build(*arguments: Any, **options: Any) -> packing.RowLayout:
        layout = real(*arguments, **options)
        if layout.plan is None:
            return layout
        return replace(layout, position_ids=torch.arange(layout.tokens)[None])

    _patch(stack, fsdp_engine, "build_layout", build)


def _window(stack: ExitStack) -> None:
    """Packed rows ignore the sliding window."""
    real = attention.varlen_mask

    def mask(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **{**options, "local_size": None})

    AttentionMaskInterface.register(attention.IMPLEMENTATION, mask)
    stack.callback(AttentionMaskInterface.register, attention.IMPLEMENTATION, real)


def _head_gradient(stack: ExitStack) -> None:
    """The output embedding gets no gradient; where it is tied, half of it is missing."""
    real = heads.token_log_probs

    def without(hidden: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Any:
        return real(hidden, weight.detach(), *arguments, **options)

    _patch(stack, heads, "token_log_probs", without)


def _router_precision(stack: ExitStack) -> None:
    """The trainer's routers read their input in bfloat16, so that near ties fall to other experts."""

    def rounded(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0].bfloat16().float(), *arguments[1:])

    def change(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith((".gate", ".router")):
                module.register_forward_pre_hook(rounded)

    _after_build(stack, change)


# ---- the rollout engine ---------------------------------------------------------------------------------------------


def _rollout_temperature(stack: ExitStack) -> None:
    """The rollout engine samples at temperature 1 whatever it is asked for."""
    real = sampler.SamplingBatch.build

    def build(params: Iterable[Any], device: torch.device) -> sampler.SamplingBatch:
        return real([replace(item, temperature=1.0) if item.temperature else item for item in params], device)

    _patch(stack, sampler.SamplingBatch, "build", build)


def _sampled(stack: ExitStack, change: Callable[[Tensor, sampler.SamplingBatch, Tensor, Tensor], Tensor]) -> None:
    """Change the log-probs of sampled tokens: (logits, settings, tokens, log-probs) -> log-probs."""
    real = sampler._sample

    def sample(
        logits: Tensor, options: sampler.SamplingBatch, uniform: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        chosen, log_probs = real(logits, options, uniform, seen)
        return chosen, change(logits, options, chosen, log_probs)

    _patch(stack, sampler, "_sample", sample)


def _raw_log_probs(stack: ExitStack) -> None:
    """Log-probs of sampled tokens are those before top-k and top-p."""

    def raw(logits: Tensor, options: sampler.SamplingBatch, chosen: Tensor, log_probs: Tensor) -> Tensor:
        scaled = logits.float() if options.temperature is None else logits.float() / options.temperature
        return scaled.log_softmax(-1).gather(1, chosen[:, None])[:, 0]

    _sampled(stack, raw)


def _rounded_log_probs(stack: ExitStack) -> None:
    """Log-probs of sampled tokens are rounded to bfloat16."""
    _sampled(stack, lambda logits, options, chosen, log_probs: log_probs.bfloat16().float())


def _stop_dropped(stack: ExitStack) -> None:
    """The token that ends a sample is left out of it."""
    real = HFRolloutEngine._deliver

    def deliver(self: HFRolloutEngine, sequence: Any, completion: Completion) -> None:
        if completion.finish_reason == "stop":
            completion = replace(completion, token_ids=completion.token_ids[:-1], log_probs=completion.log_probs[:-1])
        real(self, sequence, completion)

    _patch(stack, HFRolloutEngine, "_deliver", deliver)


def _stop_masked(stack: ExitStack) -> None:
    """The token that ends a sample is not in the mask, so that nothing learns to stop."""
    real = batch.batch_from_completions

    def made(prompts: Any, completions: Any, *arguments: Any, **options: Any) -> Any:
        found = real(prompts, completions, *arguments, **options)
        assert found.batch is not None
        for row, item in enumerate(completions):
            if item.finish_reason == "stop":
                found.batch["response_mask"][row, len(item.token_ids) - 1] = 0
        return found

    _patch_function(stack, real, made)


def _end_lost(stack: ExitStack) -> None:
    """The rollout engine does not know the tokens that end a sequence."""
    real = hf_engine.special_tokens

    def special(*arguments: Any) -> tuple[frozenset[int], int]:
        return frozenset(), real(*arguments)[1]

    _patch(stack, hf_engine, "special_tokens", special)


def _rope_scaling(stack: ExitStack) -> None:
    """The rollout engine ignores the scaling of rotary embeddings."""
    real = hf_engine.build_module

    def build(config: Any, *arguments: Any, **options: Any) -> Any:
        text = config.get_text_config()
        text.rope_parameters = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
        return real(config, *arguments, **options)

    _patch(stack, hf_engine, "build_module", build)


def _adapter_scale(stack: ExitStack) -> None:
    """The rollout engine multiplies adapters by alpha instead of alpha / rank."""
    real = hf_engine.build_module

    def build(*arguments: Any, lora: Any = None, **options: Any) -> Any:
        wrong = None if lora is None else dataclasses.replace(lora, alpha=lora.alpha * lora.rank)
        return real(*arguments, lora=wrong, **options)

    _patch(stack, hf_engine, "build_module", build)


# ---- weights --------------------------------------------------------------------------------------------------------


def _stale_head(stack: ExitStack) -> None:
    """Of tied weights only the first name follows an update; the output embedding keeps its first values."""

    def assign(self: weights._Weight, tensor: Tensor) -> None:
        begun = self.current is not None
        self.current = tensor
        for number, (module, attribute) in enumerate(self.slots):
            if self.persistent_buffer:
                module._buffers[attribute] = tensor
            elif number == 0:
                module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
            elif not begun:
                module._parameters[attribute] = nn.Parameter(tensor.detach().clone(), requires_grad=False)

    _patch(stack, weights._Weight, "assign", assign)


def _expert_order(stack: ExitStack) -> None:
    """The weight sync gives each expert the weights of its neighbour."""
    real = weights.ModuleWeights.load

    def load(self: weights.ModuleWeights, bucket: Iterable[tuple[str, Tensor]], *, live: bool) -> None:
        moved = [
            (name, tensor.detach().roll(1, 0) if tensor.dim() == 3 and "experts" in name else tensor)
            for name, tensor in bucket
        ]
        real(self, moved, live=live)

    _patch(stack, weights.ModuleWeights, "load", load)


def _lost_tensor(stack: ExitStack) -> None:
    """A checkpoint lacks one tensor."""
    real = FSDPEngine.saved_tensors

    def saved(self: FSDPEngine) -> dict[str, Tensor]:
        tensors = real(self)
        lost = next(name for name in reversed(tensors) if ".layers." in name)
        return {name: tensor for name, tensor in tensors.items() if name != lost}

    _patch(stack, FSDPEngine, "saved_tensors", saved)


def _transposed(stack: ExitStack) -> None:
    """The merger writes a square matrix transposed."""
    real = model_merger.load_tensors

    def load(*arguments: Any, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, marker = real(*arguments, **options)
        name = next(name for name, t in tensors.items() if t.dim() == 2 and t.shape[0] == t.shape[1])
        return {**tensors, name: tensors[name].T.contiguous()}, marker

    _patch(stack, model_merger, "load_tensors", load)


def _frame_lost(stack: ExitStack) -> None:
    """Text that no chat template rendered is encoded without the tokenizer's own frame."""
    _patch_function(stack, chat.encode_plain, chat.encode)


def _template_lost(stack: ExitStack) -> None:
    """What is saved has no chat template."""
    real = engine_checkpoint.copy_companions

    def copy(source: Path, target: Path) -> None:
        real(source, target)
        for file in target.glob("chat_template*"):
            file.unlink()
        config = target / "tokenizer_config.json"
        if config.is_file():
            stored = json.loads(config.read_text("utf-8"))
            stored.pop("chat_template", None)
            config.write_text(json.dumps(stored), "utf-8")

    _patch_function(stack, real, copy)


#: name -> the fault and the check that finds it
FAULTS: dict[str, Fault] = {
    "sparse-indexer": Fault(_sparse_indexer, "log-probs"),
    "pad-gradient": Fault(_pad_gradient, "pad token"),
    "dropout": Fault(_dropout, "noise"),
    "tokens-without-text": Fault(_without_text, "vocabulary"),
    "row-leak": Fault(_row_leak, "log-probs"),
    "position-ids": Fault(_positions, "log-probs"),
    "window-ignored": Fault(_window, "log-probs"),
    "training-temperature": Fault(planted_bugs.BUGS["training-temperature"], "gradients"),
    "local-denominators": Fault(planted_bugs.BUGS["local-denominators"], "gradients"),
    "head-gradient": Fault(_head_gradient, "gradients"),
    "router-precision": Fault(_router_precision, "routing"),
    "sequence-gradient": Fault(planted_bugs.BUGS["sequence-gradient"], "sequence parallel"),
    "rollout-temperature": Fault(_rollout_temperature, "sampling"),
    "rounded-log-probs": Fault(_rounded_log_probs, "sampling"),
    "rope-scaling": Fault(_rope_scaling, "sampling"),
    "expert-order": Fault(_expert_order, "sampling"),
    "raw-log-probs": Fault(_raw_log_probs, "filters"),
    "stop-dropped": Fault(_stop_dropped, "stop tokens"),
    "stop-masked": Fault(_stop_masked, "stop tokens"),
    "end-lost": Fault(_end_lost, "stop tokens"),
    "adapter-scale": Fault(_adapter_scale, "sampling"),
    "stale-head": Fault(_stale_head, "weight sync"),
    "lost-tensor": Fault(_lost_tensor, "save and merge"),
    "transposed": Fault(_transposed, "save and merge"),
    "frame-lost": Fault(_frame_lost, "text without a template"),
    "template-lost": Fault(_template_lost, "tokenizer"),
}

"""Low-rank adapters on Megatron-core's linear layers.

The same layers, names, first values and files as in :mod:`verl.models.lora`. Megatron-core has several of Transformers'
layers in one: query, key and value; gate and up projection. Each keeps an adapter of its own here, as in Transformers:
the A matrices of a weight lie one below the other, and the B matrices are ordered as the weight's rows are.

With tensor parallelism a matrix is divided where the weight is: B where the weight makes heads or hidden units
(column parallel), A where it takes them back (row parallel). What crosses ranks besides the layer's own exchange is
the small product between the two.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import linear

from verl.errors import ConfigError
from verl.models.lora import LoraSettings, choose_layers, first_matrix, matching_adapter
from verl.workers.engine.base import ParallelLayout
from verl.workers.engine.megatron.bridge import Bridge, hugging_face_shell, local_modules
from verl.workers.engine.megatron.tensor_layouts import Cut, Form, GateUp, SomeRows, Stacked, Whole
from verl.workers.engine.megatron.weights import AdapterWeights, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_COLUMN, _ROW, _WHOLE = "column", "row", "whole"


class _Adapted(nn.Module):
    """What :func:`_adapted` mixes into a linear layer of Megatron-core: output plus that of the adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    #: how the layer is divided over tensor-parallel ranks, and whether tokens are too
    kind: str
    sequence: bool
    scaling: float
    enabled: bool
    #: (rows of B, adapters) one-hot: whose row it is; None where there is one adapter
    whose: Tensor | None
    #: (rows of B,) where they lie among the layer's rows; None where they are all of them
    rows: Tensor | None
    #: B holds two halves that ranks divide one by one
    halves: bool

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """(T, 1, in) to (T, 1, out), and the bias, if it is left to the caller."""
        out, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        if not self.enabled:
            return out, bias
        small = self._shared(linear(input_, self.lora_A))
        b: Tensor = self.lora_B
        if self.whose is not None:  # each row multiplies the product of its own A
            b = (b[:, None, :] * self.whose[:, :, None].to(b)).flatten(1)
        delta = linear(small, b) * self.scaling
        return (out + delta if self.rows is None else out.index_add(-1, self.rows, delta)), bias

    def _shared(self, small: Tensor) -> Tensor:
        """The product with A as the multiplication with B needs it."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self.kind == _WHOLE or group.size() == 1:
            return small
        if self.kind == _COLUMN:
            if self.sequence:
                return gather_from_sequence_parallel_region(small, group=group)
            return copy_to_tensor_model_parallel_region(small, group=group)
        if self.sequence:
            return reduce_scatter_to_sequence_parallel_region(small, group=group)
        return reduce_from_tensor_model_parallel_region(small, group=group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The adapter for Megatron-core's checkpoints; the layer's own weight does not change and is not in there."""
        axes = {_COLUMN: {"lora_B": 0}, _ROW: {"lora_A": 1}, _WHOLE: {}}[self.kind]
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"lora_A": self.lora_A, "lora_B": self.lora_B},
            prefix,
            axes,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        if self.halves:
            name = f"{prefix}lora_B"
            found[name] = apply_swiglu_sharded_factory(found[name], sharded_offsets)
        return found


_KINDS: dict[type, type] = {}


def _adapted(kind: type) -> type:
    """The class of a layer with an adapter; one for each class without."""
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Lora{kind.__name__}", (_Adapted, kind), {})
    return _KINDS[kind]


def add_adapters(
    bridge: Bridge, config: PreTrainedConfig, settings: LoraSettings, *, head: str, seed: int, sequence_parallel: bool
) -> None:
    """Put adapters into this rank's layers and freeze everything else but a head made for the task. Collective.

    Args:
        bridge: of the model, which has its weights; it learns of the adapters.
        config: of the Hugging Face model.
        settings: which layers, and how.
        head: ``"lm"``, ``"value"`` or ``"classifier"``.
        seed: of the run.
        sequence_parallel: activations between the layers' products are divided over tensor-parallel ranks.

    Raises:
        ConfigError: no layer is chosen, or one that cannot have an adapter.
        CheckpointError: the adapter to go on from is of another shape.
    """
    shell, prefix = hugging_face_shell(config, head)
    sizes = {name: (m.out_features, m.in_features) for name, m in choose_layers(shell, settings, prefix).items()}
    adapters = _adapter_table(bridge, settings, sizes)
    overlaps = getattr(bridge.chunks[0].config, "moe_shared_expert_overlap", False)
    if overlaps and any(".shared_experts." in name for name in adapters):  # its layers get their tokens another way
        raise ConfigError(
            "megatron.override_transformer_config.moe_shared_expert_overlap=True: shared experts with adapters do not "
            "overlap with others; leave it out, or add shared_experts' layers to model.exclude_modules"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in sizes.items():
        shapes |= {f"{name}.lora_A": (settings.rank, inputs), f"{name}.lora_B": (outputs, settings.rank)}
    if settings.adapter_path:
        tensors = matching_adapter(settings.adapter_path, settings, shapes)
    else:
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for name, (_, inputs) in sizes.items():
            tensors[f"{name}.lora_A"] = first_matrix(settings, seed, name, inputs)
    for chunk in bridge.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(head != "lm" and name.startswith("output_layer."))
    modules = local_modules(bridge.chunks)
    for megatron, adapter in adapters.items():
        module = modules.get(megatron.rpartition(".")[0])
        if module is not None:  # not on another stage
            _attach(module, adapter, tensors, bridge.layout, sequence_parallel)
    bridge.adopt(adapters, shapes)
    logger.info("LoRA on %d layers: %d parameters train", len(sizes), sum(t.numel() for t in tensors.values()))


def _attach(
    module: Any, adapter: AdapterWeights, tensors: Mapping[str, Tensor], layout: ParallelLayout, sequence: bool
) -> None:
    """Turn a layer into one with an adapter, and give it this rank's part of the matrices."""
    rank, ranks = layout.tp_rank, layout.tp_size
    weight: Tensor = module.weight
    module.__class__ = _adapted(type(module))
    module.scaling, module.enabled, module.sequence = adapter.scaling, True, sequence
    module.kind, divided = _WHOLE, ""
    module.whose = module.rows = None
    module.halves = False
    if isinstance(adapter.b.form, SomeRows):
        module.kind, divided = _COLUMN, "lora_B"
        _place_rows(module, adapter.b.form, rank, ranks, weight.device)
    elif isinstance(adapter.a.form, Cut):
        module.kind, divided = _ROW, "lora_A"
    for name, part in (("lora_A", adapter.a), ("lora_B", adapter.b)):
        mine = part.form.shard([tensors[n] for n in part.hf], rank, ranks)
        parameter = nn.Parameter(mine.to(weight, copy=True).contiguous())
        if name == divided:
            set_tensor_model_parallel_attributes(parameter, True, 0 if name == "lora_B" else 1, 1)
        # of what is whole on every rank each rank sees a part of the tokens
        parameter.sequence_parallel = sequence and name != divided  # type: ignore[attr-defined]
        setattr(module, name, parameter)


def _adapter_table(
    bridge: Bridge, settings: LoraSettings, sizes: dict[str, tuple[int, int]]
) -> dict[str, AdapterWeights]:
    """The adapters by the Megatron name of their weight, for layers given with their (outputs, inputs)."""
    table: dict[str, AdapterWeights] = {}
    remaining = set(sizes)
    for weight in bridge.table:
        layers = [name.removesuffix(".weight") for name in weight.hf]
        chosen = tuple(i for i, name in enumerate(layers) if name in sizes)
        if not chosen or not weight.megatron.endswith(".weight") or ".router." in weight.megatron:
            continue
        remaining -= {layers[i] for i in chosen}
        here = weight.megatron.removesuffix("weight")
        a, b = _forms(weight, chosen, bridge)
        table[weight.megatron] = AdapterWeights(
            Weight(f"{here}lora_A", tuple(f"{layers[i]}.lora_A" for i in chosen), a),
            Weight(f"{here}lora_B", tuple(f"{layers[i]}.lora_B" for i in chosen), b),
            chosen,
            settings.scaling,
        )
    if remaining:
        raise ConfigError(
            f"model.target_modules={list(settings.targets)} chooses {sorted(remaining)[0]}, which gets no adapter on "
            "Megatron; add it to model.exclude_modules"
        )
    return table


def _forms(weight: Weight, chosen: tuple[int, ...], bridge: Bridge) -> tuple[Form, Form]:
    """How the two matrices beside a weight are divided."""
    if isinstance(weight.form, Whole):
        return Whole(), Whole()
    if weight.form == Cut(1):
        return Cut(1), Whole()
    rows = SomeRows(weight.form, tuple(bridge.shapes[name][0] for name in weight.hf), chosen)
    ranks = bridge.layout.tp_size
    if len({int(rows.mine(rank, ranks).sum()) for rank in range(ranks)}) > 1:
        raise ConfigError(
            f"model.target_modules chooses a part of {', '.join(weight.hf)}, which tensor_model_parallel_size={ranks} "
            "does not divide evenly; choose all of them, or at most as many ranks as key-value heads"
        )
    return Stacked(len(chosen)), rows


def _place_rows(module: Any, form: SomeRows, rank: int, ranks: int, device: torch.device) -> None:
    """Tell a column-parallel layer which of its rows belong to which adapter."""
    owners, mine = form.owners(rank, ranks), form.mine(rank, ranks)
    if not mine.all():
        module.rows = mine.nonzero()[:, 0].to(device)
    if len(form.chosen) > 1:
        module.whose = (owners[mine][:, None] == torch.tensor(form.chosen)).to(device)
        module.halves = isinstance(form.form, GateUp)


def set_adapters(chunks: Any, enabled: bool) -> None:
    """Let the model compute with its adapters or without them."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, _Adapted):
                module.enabled = enabled


def keep_gradients_flowing(chunks: Any) -> None:
    """Let the first layer's input ask for a gradient.

    Nothing before it is trained, and layers that are computed again in the backward pass are only if their input asks.
    """
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

"""Which slices of which Hugging Face tensors a rank of Megatron-core holds, read from the table of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.workers.engine.base import HeldTensor, SlicedWeight
from verl.workers.engine.megatron.tensor_layouts import slices_of

if TYPE_CHECKING:
    from verl.workers.engine.megatron.weights import Weight


@dataclass(frozen=True)
class WeightPlace:
    """Where a rank stands among those that divide weights. Its pipeline stage shows in the weights that it has.

    Attributes:
        tp, ep, etp: (rank, ranks): tensor parallel, expert parallel, tensor parallel within an expert.
    """

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)


def sliced_weights(
    table: Sequence[Weight],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    local: Mapping[str, Tensor],
    place: WeightPlace,
    *,
    tied: bool,
) -> dict[str, SlicedWeight]:
    """What a rank holds of every Hugging Face tensor of the model.

    Args:
        table: of the model's weights, the embedding first.
        shapes: of the Hugging Face tensors, in weight sync order.
        dtypes: of the Megatron weights of all stages; of experts the first one's of a rank.
        local: the rank's own Megatron weights.
        place: of the rank.
        tied: input and output embedding are one; a last stage that is not the first has a copy.
    """
    maker = {name: (weight, index) for weight in table for index, name in enumerate(weight.hf)}
    found = {}
    for name, shape in shapes.items():
        weight, index = maker[name]
        held: dict[int, HeldTensor] = {}
        if weight.experts:
            count = weight.experts // place.ep[1]
            (boxes,) = slices_of(weight.form, (shape[1:],), *place.etp)
            for number in range(count):
                tensor = local.get(weight.megatron.format(expert=number))
                if tensor is not None:
                    held[place.ep[0] * count + number] = HeldTensor(tensor.detach(), boxes)
        else:
            tensor = local.get(weight.megatron)
            if tensor is None and tied and weight is table[0]:
                tensor = local.get("output_layer.weight")
            if tensor is not None:
                boxes = slices_of(weight.form, tuple(shapes[other] for other in weight.hf), *place.tp)[index]
                held[0] = HeldTensor(tensor.detach(), boxes)
        dtype = dtypes[weight.megatron.format(expert=0)]
        found[name] = SlicedWeight(tuple(shape), dtype, weight.megatron, bool(weight.experts), held)
    return found

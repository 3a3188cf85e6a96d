"""Which slices of which weights Megatron's ranks hold, told without running them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tests.models.families import make_config
from verl.workers.engine.megatron.bridge import hugging_face_names
from verl.workers.engine.megatron.slices import WeightPlace, sliced_weights
from verl.workers.engine.megatron.weights import Weight, weight_table
from verl.workers.rollout.types import WeightPart
from verl.workers.sharding_manager.reshard.held_weights import HeldWeights, Piece
from verl.workers.sharding_manager.reshard.layout import replicated_layout
from verl.workers.sharding_manager.reshard.planner import plan

MULTIPLE = 8  # of the vocabulary, which has 61 tokens: 64 rows in two parts
PADDING = 3 * 32 * 4  # bytes of the last part that are no token's


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of four: of 2 tensor-parallel, or 2 expert-parallel ranks, in one of 2 stages."""

    place: WeightPlace
    stage: int
    local: dict[str, Tensor]
    held: HeldWeights


def stage_of(weight: Weight, layers: int) -> int:
    if weight.megatron.startswith("embedding."):
        return 0
    if not weight.megatron.startswith("decoder.layers."):
        return 1
    return int(weight.megatron.split(".")[2]) * 2 // layers


def megatron_rank(
    config: PreTrainedConfig, whole: dict[str, Tensor], place: WeightPlace, stage: int, grouped: bool
) -> Rank:
    """What Megatron would hold there, cut from whole tensors."""
    table = weight_table(config, head="lm", multiple_of=MULTIPLE, grouped=grouped)
    local: dict[str, Tensor] = {}
    for weight in table:
        if stage_of(weight, config.num_hidden_layers) != stage:
            continue
        for number in range(weight.experts // place.ep[1]):
            expert = whole[weight.hf[0]][place.ep[0] * (weight.experts // place.ep[1]) + number]
            local[weight.megatron.format(expert=number)] = weight.form.shard([expert], *place.etp).clone()
        if not weight.experts:
            local[weight.megatron] = weight.form.shard([whole[name] for name in weight.hf], *place.tp).clone()
    if config.tie_word_embeddings and stage == 1:
        local["output_layer.weight"] = table[0].form.shard([whole[table[0].hf[0]]], *place.tp)
    dtypes = {weight.megatron.format(expert=0): torch.float32 for weight in table}
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    weights = sliced_weights(table, shapes, dtypes, local, place, tied=config.tie_word_embeddings)
    return Rank(place, stage, local, HeldWeights(weights))


def four_ranks(config: PreTrainedConfig, *, experts: bool = False, grouped: bool = False) -> tuple[list[Rank], dict]:
    shapes = hugging_face_names(config, "lm")
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    ranks = []
    for stage in (0, 1):
        for number in (0, 1):
            place = WeightPlace(ep=(number, 2)) if experts else WeightPlace(tp=(number, 2), etp=(number, 2))
            ranks.append(megatron_rank(config, whole, place, stage, grouped))
    return ranks, whole


def piece_of(whole: dict[str, Tensor], key: str) -> Tensor:
    name, _, entry = key.partition("[")
    return whole[name][int(entry[:-1])] if entry else whole[name]


CASES = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"experts": True}),
    ("qwen3_moe", {"experts": True, "grouped": True}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {"experts": True}),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_the_layout_is_what_the_ranks_hold(family: str, options: dict[str, bool]) -> None:
    ranks, whole = four_ranks(make_config(family), **options)
    layout, *others = (rank.held.layout([other.held.holdings() for other in ranks]) for rank in ranks)
    for other in others:  # whoever works it out
        assert other.tensors == layout.tensors
        assert all(other.placements[key].key == layout.placements[key].key for key in layout.tensors)
    for number, rank in enumerate(ranks):
        local = rank.held.tensors()
        for key, tensor in local.items():
            for there, here in layout.placements[key].boxes_of(number):
                assert torch.equal(tensor[here], piece_of(whole, key)[there]), key
        # fused tensors count once
        assert layout.local_bytes()[number] == sum(tensor.nbytes for tensor in rank.local.values())

    # each rank of a rollout that does not split the model receives what it does not train
    change = plan(layout, replicated_layout(layout.tensors, range(4)), bucket_bytes=1 << 14)
    model = sum(tensor.nbytes for tensor in whole.values())
    for number, rank in enumerate(ranks):
        first, parts = rank.place.tp
        padding = PADDING if first == parts - 1 else 0  # either stage has one vocabulary: embedding, or head
        assert change.received[number] == model - sum(t.nbytes for t in rank.local.values()) + padding


def test_a_tied_embedding_is_sent_by_either_end() -> None:
    ranks, _ = four_ranks(make_config("qwen2"))
    layout = ranks[0].held.layout([rank.held.holdings() for rank in ranks])
    name = "model.embed_tokens.weight"
    change = plan(layout, replicated_layout(layout.tensors, range(4)), bucket_bytes=1 << 14)
    # ranks 0 and 2 have the first 32 tokens, 1 and 3 the others, and serve their neighbours
    assert {(t.sender, t.receiver, t.start[0], t.stop[0]) for t in change.transfers(name)} == {
        (sender, receiver, *rows)
        for sender, receiver, rows in ((0, 1, (0, 32)), (1, 0, (32, 61)), (2, 3, (0, 32)), (3, 2, (32, 61)))
    }


def test_every_weight_is_watched_by_its_slices() -> None:
    ranks, whole = four_ranks(make_config("qwen3_moe"), experts=True)
    for rank in ranks:
        seen: dict[str, int] = dict.fromkeys(whole, 0)
        for name, tensor in rank.held.slices():
            seen[name] += tensor.nbytes
        assert list(seen) == list(whole)
        assert seen["model.layers.0.mlp.experts.down_proj"] == (4 * 32 * 24 * 4 // 2 if rank.stage == 0 else 0)
        assert seen["model.layers.1.self_attn.q_proj.weight"] == (64 * 32 * 4 if rank.stage == 1 else 0)


def test_an_expert_lies_in_a_part_of_its_stack() -> None:
    memory = torch.arange(24.0).view(2, 3, 4)  # entries 4 and 5, rows 1 to 3
    part = WeightPart((4, 1, 0), (6, 4, 4), memory)
    (found,) = Piece("experts", 5).within([part])
    assert (found.start, found.stop) == ((1, 0), (4, 4))
    assert found.tensor.data_ptr() == memory[1].data_ptr()
    assert Piece("experts", 3).within([part]) == []
    assert Piece("experts").within([part]) == [part]

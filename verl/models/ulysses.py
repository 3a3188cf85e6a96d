"""Ulysses sequence parallelism: several ranks share one packed sequence (arXiv:2309.14509).

Every rank of a sequence group plans the same rows and runs the model on its own stretch of the T packed tokens, padded
to a multiple of the group. Linear layers, norms and experts see single tokens and do not care. Around attention two
all-to-all exchanges trade stretches for heads: a rank then has all T tokens of H / size heads, runs the ordinary
attention of packed rows on them, shared prompts included, and trades back. After the model each rank computes the
results (log-probs, entropies, values) that its own tokens predict, and an all-gather gives every rank all of them.

Images go through the vision tower on every rank of the group; each takes the features that its tokens stand for.

Every rank of the group then computes the same loss. In the backward pass it follows its own results only; the sum of
the ranks' gradients is the whole one. Gradient reduction averages over all ranks, so the part of each is scaled up by
the group's size.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.models.packing import RowLayout
from verl.models.sequence_group import SequenceGroup, Spread, check_heads


def split_sequence(layout: RowLayout, group: SequenceGroup) -> RowLayout:
    """This rank's stretch of a packed layout; the rows, and where results belong, stay those of the whole.

    Args:
        layout: of the group's rows, the same on every rank; on the host.
        group: the ranks.

    Raises:
        ConfigError: rows with padding cannot be split.
    """
    if layout.plan is None:
        raise ConfigError("sequence parallelism works on rows without padding; set model.use_remove_padding=true")
    total = layout.input_ids.shape[1]
    stretch = -(-total // group.size)
    start = group.rank * stretch

    def cut(values: Tensor, fill: int) -> Tensor:
        return pad(values, (0, stretch * group.size - total), value=fill)[..., start : start + stretch].contiguous()

    layout.plan.share(group, total)
    results = Spread(layout.predict_index, total, group)
    last = Spread(layout.last_index, total, group) if layout.rows else None
    return replace(
        layout,
        input_ids=cut(layout.input_ids, 0),
        position_ids=cut(layout.position_ids, 0),
        attention_mask=cut(layout.attention_mask, 1),
        predict_index=results.index,
        targets=results.take(layout.targets),
        last_index=layout.last_index if last is None else last.index,
        tokens=stretch,
        images=None if layout.images is None else layout.images.part(start, start + stretch),
        spread=results,
        last_spread=last,
    )


def check_model(config: PreTrainedConfig, size: int, *, packed: bool) -> None:
    """Refuse at start-up what sequence parallelism cannot run.

    Args:
        config: of the model.
        size: ranks that share a sequence.
        packed: whether the engine runs rows without padding.

    Raises:
        ConfigError: rows are padded, or the heads do not divide.
    """
    if not packed:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: needs rows without padding; set model.use_remove_padding=true, or "
            f"use 1 where a model ({type(config).__name__}) cannot run so"
        )
    check_heads(int(config.get_text_config().num_attention_heads), size)

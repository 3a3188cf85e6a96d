"""Pack padded batches for the model and scatter its outputs back to (B, R).

A batch has prompts padded on the left and responses padded on the right (B, P+R). A model can read it in two ways:

- *packed*: the real tokens of all rows behind each other, one sequence (1, T) whose position ids restart at each row
  (``use_remove_padding``). Prompts that several rows have in common are stored once when that saves enough.
- *padded*: the rows as they are, without the columns that are padding in every row.

Both give the same numbers; :class:`RowLayout` hides the difference from everything after the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.models.attention import AttentionPlan, Block, split_into_blocks

if TYPE_CHECKING:
    from verl.models.sequence_group import Spread
    from verl.models.vision import ImageInputs, RowImages

# Sharing prompts pays when at least this part of all tokens disappears.
_MIN_SHARED = 0.1
# Separate attention for prompts and responses needs a mask; above this many scores rows attend whole, without one.
_MAX_MASK_SCORES = 1 << 24


def sharing_pays(shared_tokens: int, tokens: int) -> bool:
    """Whether rows share equal prompts that would otherwise be ``shared_tokens`` of their ``tokens``."""
    return shared_tokens >= _MIN_SHARED * tokens


@dataclass(frozen=True)
class RowLayout:
    """Model input for some rows, and where their results belong.

    Attributes:
        input_ids: (1, T) packed or (B, S') padded.
        position_ids: same shape; where rows have images, four of them: of text, and the three rotary positions.
        attention_mask: same shape; all ones when packed.
        plan: how packed tokens attend; None when padded.
        predict_index: (N,) positions in the flattened hidden states that predict the N response tokens.
        targets: (N,) those response tokens.
        out_mask: (B, R) bool, where the N results belong, row by row.
        last_index: (B,) position of each row's last token in the flattened hidden states.
        rows: B.
        response_length: R.
        tokens: number of tokens that the model computes.
        results: N.
        spread, last_spread: with sequence parallelism, which ranks have the N results and the B last tokens; the
            tokens, the indices and the targets are then this rank's own.
        images: what replaces placeholder tokens; None without images.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    plan: AttentionPlan | None
    predict_index: Tensor
    targets: Tensor
    out_mask: Tensor
    last_index: Tensor
    rows: int
    response_length: int
    tokens: int
    results: int
    spread: Spread | None = None
    last_spread: Spread | None = None
    images: ImageInputs | None = None

    def to(self, device: torch.device) -> RowLayout:
        """The same layout on ``device``."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in (
                "input_ids",
                "position_ids",
                "attention_mask",
                "predict_index",
                "targets",
                "out_mask",
                "last_index",
            )
        }
        carried = {name: getattr(self, name) for name in ("plan", "spread", "last_spread", "images")}
        moved |= {name: None if value is None else value.to(device) for name, value in carried.items()}
        return replace(self, **moved)

    def scatter(self, values: Tensor) -> Tensor:
        """(N,) results, of all ranks that share the sequence, to (B, R), zero elsewhere; differentiable."""
        if self.spread is not None:
            values = self.spread.join(values)
        return values.new_zeros(self.rows, self.response_length).masked_scatter(self.out_mask, values)

    @property
    def empty(self) -> bool:
        """Whether there is no response token at all; the predictors then hold one stand-in."""
        return self.results == 0


def build_layout(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    *,
    packed: bool,
    share_prompts: bool = True,
    images: RowImages | None = None,
) -> RowLayout:
    """Plan the model's input for some rows.

    Args:
        input_ids: (B, P+R) tokens; anything where ``attention_mask`` is 0.
        attention_mask: (B, P+R), non-zero for real tokens.
        position_ids: (B, P+R).
        response_mask: (B, R), non-zero for the tokens whose results are wanted.
        packed: remove all padding; otherwise keep rows and drop only all-padding columns.
        share_prompts: when packed, let rows with equal prompts share them if that removes a tenth of the tokens.
        images: of the rows, in prompts and responses; prompts are equal only if their images are.

    Raises:
        SchemaError: a shape does not fit, or a token is to be predicted from nothing.
    """
    rows, width = input_ids.shape
    response_length = response_mask.shape[1]
    prompt_length = width - response_length
    if position_ids.shape != input_ids.shape or attention_mask.shape != input_ids.shape or prompt_length < 1:
        raise SchemaError(
            f"input_ids {tuple(input_ids.shape)}, attention_mask {tuple(attention_mask.shape)} and position_ids "
            f"{tuple(position_ids.shape)} must all be (B, P+R) with R={response_length} from response_mask and P >= 1"
        )
    ids = input_ids.cpu().numpy()
    valid = attention_mask.cpu().numpy() != 0
    positions = position_ids.cpu().numpy()
    wanted = response_mask.cpu().numpy() != 0
    if rows == 0 or not valid.any():
        return _dummy_layout(rows, response_length)

    row, col = np.nonzero(wanted)
    predictor = col + (prompt_length - 1)
    reachable = valid[row, predictor] & valid[row, predictor + 1]
    if not reachable.all():
        bad = int(np.flatnonzero(~reachable)[0])
        raise SchemaError(
            f"response_mask selects token {int(col[bad])} of row {int(row[bad])}, but attention_mask is 0 there or at "
            "the token before it; a token needs a predecessor to be predicted from"
        )
    results = len(row)
    targets = ids[row, predictor + 1]
    last_col = width - 1 - np.argmax(valid[:, ::-1], axis=1)
    every_row = np.arange(rows)
    read = positions if images is None else np.concatenate([positions[None], images.positions])

    if not packed:
        columns = np.flatnonzero(valid.any(0))
        first, end = int(columns[0]), int(columns[-1]) + 1
        kept = end - first
        predict = row * kept + (predictor - first)
        last = np.maximum(last_col - first, 0) + every_row * kept
        if not len(predict):  # one stand-in, so that the head takes part in the backward pass on every rank
            predict, targets = last[np.argmax(valid.any(1))][None], np.zeros(1, dtype=np.int64)
        return RowLayout(
            # Padding may hold any number, an index outside the vocabulary too.
            input_ids=_tensor(np.where(valid[:, first:end], ids[:, first:end], 0)),
            position_ids=_tensor(np.where(valid[:, first:end], read[..., first:end], 0)),
            attention_mask=_tensor(valid[:, first:end].astype(np.int64)),
            plan=None,
            predict_index=_tensor(predict),
            targets=_tensor(targets),
            out_mask=torch.from_numpy(wanted),
            last_index=_tensor(last),
            rows=rows,
            response_length=response_length,
            tokens=rows * kept,
            results=results,
            images=None
            if images is None
            else images.take(np.zeros(rows, bool), np.flatnonzero(images.places[:, first:end])),
        )

    lengths = valid.sum(1)
    prompt_lengths = valid[:, :prompt_length].sum(1)
    leader = every_row
    if share_prompts and rows > 1:
        leader = prompt_leaders(
            ids[:, :prompt_length],
            valid[:, :prompt_length],
            positions[:, :prompt_length],
            None if images is None else images.number,
        )
        if not sharing_pays(int(prompt_lengths[leader != every_row].sum()), int(lengths.sum())):
            leader = every_row
    follows = leader != every_row
    shared = bool(follows.any())
    stored = valid
    if shared:
        stored = valid.copy()
        stored[follows, :prompt_length] = False
    # where[i, c]: packed position of the token in row i, column c
    where = (np.cumsum(stored.reshape(-1)) - 1).reshape(rows, width)
    if shared:
        where[follows, :prompt_length] = where[leader[follows], :prompt_length]
    total = int(stored.sum())
    predict = where[row, predictor]
    if not len(predict):
        predict, targets = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    paths = _row_paths(where, valid, lengths)
    plan = _plan_attention(paths, lengths, prompt_lengths, leader if shared else None, total)
    return RowLayout(
        input_ids=_tensor(ids[stored])[None],
        position_ids=_tensor(read[..., stored])[..., None, :],
        attention_mask=torch.ones((1, total), dtype=torch.long),
        plan=plan,
        predict_index=_tensor(predict),
        targets=_tensor(targets),
        out_mask=torch.from_numpy(wanted),
        last_index=_tensor(np.maximum(where[every_row, last_col], 0)),
        rows=rows,
        response_length=response_length,
        tokens=total,
        results=results,
        images=None if images is None else images.take(follows, where[images.places & stored]),
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def _dummy_layout(rows: int, response_length: int) -> RowLayout:
    """One token and no result, for a rank that has nothing to do but must run the same collectives as the others."""
    edges = torch.tensor([0, 1], dtype=torch.int32)
    plan = AttentionPlan([Block(1, 1, 1, 0, 0)], None, None, None, None, None, edges, 1)
    zero = torch.zeros(1, dtype=torch.long)
    return RowLayout(
        input_ids=zero[None],
        position_ids=zero[None],
        attention_mask=torch.ones((1, 1), dtype=torch.long),
        plan=plan,
        predict_index=zero,
        targets=zero,
        out_mask=torch.zeros((rows, response_length), dtype=torch.bool),
        last_index=torch.zeros(rows, dtype=torch.long),
        rows=rows,
        response_length=response_length,
        tokens=1,
        results=0,
    )


def prompt_leaders(
    ids: np.ndarray, valid: np.ndarray, positions: np.ndarray, images: np.ndarray | None = None
) -> np.ndarray:
    """For each row the number of the first row with the same prompt.

    Args:
        ids, valid, positions: (B, P) prompt tokens, which of them are real, and their position ids.
        images: (B,) equal for rows with equal images.
    """
    clean = np.ascontiguousarray(np.where(valid, ids, -1))
    if images is not None:
        clean = np.concatenate([clean, images[:, None]], 1)
    first: dict[bytes, int] = {}
    leader = np.array([first.setdefault(text.tobytes(), number) for number, text in enumerate(clean)], dtype=np.int64)
    same = ((positions == positions[leader]) | ~valid).all(1)
    return np.where(same, leader, np.arange(len(leader)))


def _row_paths(where: np.ndarray, valid: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(B, max length) packed positions of each row's tokens in order; the last one repeats as padding."""
    width = where.shape[1]
    longest = max(int(lengths.max()), 1)
    start = np.argmax(valid, axis=1)
    span = width - np.argmax(valid[:, ::-1], axis=1) - start
    step = np.minimum(np.arange(longest)[None], np.maximum(lengths - 1, 0)[:, None])
    if np.array_equal(span[lengths > 0], lengths[lengths > 0]):
        columns = np.minimum(start[:, None] + step, width - 1)
    else:  # a row with holes: its tokens in order come first in a stable sort
        columns = np.take_along_axis(np.argsort(~valid, axis=1, kind="stable"), step, 1)
    return np.maximum(np.take_along_axis(where, columns, 1), 0)


def _plan_attention(
    paths: np.ndarray,
    lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    leader: np.ndarray | None,
    total: int,
) -> AttentionPlan:
    """Choose attention blocks for packed rows; with ``leader``, prompts are stored once per leader."""
    present = np.flatnonzero(lengths > 0)
    flat = np.concatenate([paths[i, : lengths[i]] for i in present])
    edges = np.zeros(len(present) + 1, dtype=np.int32)
    np.cumsum(lengths[present], out=edges[1:])
    in_order = len(flat) == total
    flat_unpad = None
    if not in_order:
        inverse = np.empty(total, dtype=np.int64)
        inverse[flat[::-1]] = np.arange(len(flat))[::-1]
        flat_unpad = _tensor(inverse)
    max_len = int(lengths.max())

    # (rows, first query, number of queries, number of keys) of every group of rows that attends in one call
    groups: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    responses = lengths - prompt_lengths
    if leader is not None:
        with_response = present[responses[present] > 0]
        scores = len(with_response) * int(responses.max()) * max_len
        if scores <= _MAX_MASK_SCORES:
            heads = present[leader[present] == present]
            heads = heads[prompt_lengths[heads] > 0]
            groups += _grouped(heads, np.zeros_like(lengths), prompt_lengths, prompt_lengths)
            groups += _grouped(with_response, prompt_lengths, responses, lengths)
    if not groups:
        groups = _grouped(present, np.zeros_like(lengths), lengths, lengths)

    blocks: list[Block] = []
    q_parts: list[np.ndarray] = []
    k_parts: list[np.ndarray] = []
    unpad = np.empty(total, dtype=np.int64)
    q_at = k_at = 0
    for rows, first, q_count, k_count in groups:
        q_len, k_len = int(q_count.max()), int(k_count.max())
        step = np.minimum(np.arange(q_len)[None], q_count[:, None] - 1)
        q_positions = first[:, None] + step
        q_slots = np.take_along_axis(paths[rows], q_positions, 1)
        k_slots = paths[rows, :k_len] if k_len <= paths.shape[1] else paths[rows]
        real = np.arange(q_len)[None] < q_count[:, None]
        slot_numbers = q_at + np.arange(len(rows) * q_len).reshape(len(rows), q_len)
        # Backwards, so that of several copies of a shared token the first one is read.
        unpad[q_slots[real][::-1]] = slot_numbers[real][::-1]
        whole = not first.any()
        blocks.append(Block(len(rows), q_len, k_len, q_at, k_at, None if whole else _tensor(q_positions)))
        q_parts.append(q_slots.reshape(-1))
        k_parts.append(k_slots.reshape(-1))
        q_at += q_slots.size
        k_at += k_slots.size
    q_index, k_index = np.concatenate(q_parts), np.concatenate(k_parts)
    plain = len(q_index) == total and in_order and bool((q_index == np.arange(total)).all())
    copies = leader is not None
    return AttentionPlan(
        blocks=blocks,
        q_index=None if plain else _tensor(q_index),
        k_index=_tensor(k_index) if copies else None,
        unpad=None if plain else _tensor(unpad),
        flat_index=None if in_order else _tensor(flat),
        flat_unpad=flat_unpad,
        cu_seqlens=torch.from_numpy(edges),
        max_len=max_len,
    )


def _grouped(
    rows: np.ndarray, first: np.ndarray, q_count: np.ndarray, k_count: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    return [
        (chosen, first[chosen], q_count[chosen], k_count[chosen])
        for group in split_into_blocks(q_count[rows], k_count[rows])
        for chosen in (rows[group],)
    ]

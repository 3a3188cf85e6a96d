"""Layouts on batches small enough to check by hand."""

from __future__ import annotations

import pytest
import torch

from verl.errors import SchemaError
from verl.models.packing import RowLayout, build_layout

# rows: prompt [7 8] response [9 10], prompt [7 8] response [11], prompt [5] response [6 4] with a tool token between
IDS = torch.tensor([[0, 7, 8, 9, 10, 0], [0, 7, 8, 11, 0, 0], [0, 0, 5, 6, 3, 4]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
POSITIONS = (MASK.cumsum(-1) - 1).clamp(min=0)
WANTED = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]])


def layout(packed: bool, share: bool = True) -> RowLayout:
    return build_layout(IDS, MASK, POSITIONS, WANTED, packed=packed, share_prompts=share)


def test_packed_rows_lie_behind_each_other_with_restarting_positions() -> None:
    got = layout(packed=True, share=False)
    assert got.input_ids.tolist() == [[7, 8, 9, 10, 7, 8, 11, 5, 6, 3, 4]]
    assert got.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]]
    assert got.plan.cu_seqlens.tolist() == [0, 4, 7, 11]
    # each response token is predicted by the token before it: 8->9, 9->10, 8->11, 5->6, 3->4
    assert got.predict_index.tolist() == [1, 2, 5, 7, 9]
    assert got.targets.tolist() == [9, 10, 11, 6, 4]
    assert got.last_index.tolist() == [3, 6, 10]
    assert (got.tokens, got.results) == (11, 5)


def test_equal_prompts_are_stored_once() -> None:
    got = layout(packed=True)
    assert got.input_ids.tolist() == [[7, 8, 9, 10, 11, 5, 6, 3, 4]]
    assert got.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3]]
    assert got.predict_index.tolist() == [1, 2, 1, 5, 7]
    assert got.last_index.tolist() == [3, 4, 8]


def test_padded_rows_lose_only_columns_that_are_padding_everywhere() -> None:
    got = layout(packed=False)
    assert got.input_ids.tolist() == [[7, 8, 9, 10, 0], [7, 8, 11, 0, 0], [0, 5, 6, 3, 4]]
    assert got.attention_mask.tolist() == MASK[:, 1:].tolist()
    assert got.predict_index.tolist() == [1, 2, 6, 11, 13]
    assert got.last_index.tolist() == [3, 7, 14]


@pytest.mark.parametrize("packed", [True, False])
def test_results_return_to_their_place(packed: bool) -> None:
    got = layout(packed)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    out = got.scatter(values)
    assert out.tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 5]]
    (out * torch.arange(9.0).view(3, 3)).sum().backward()
    assert values.grad.tolist() == [0, 1, 3, 6, 8]


def test_a_row_with_a_hole_keeps_its_order() -> None:
    ids = torch.tensor([[7, 8, 9, 1, 10]])
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    got = build_layout(ids, mask, torch.tensor([[0, 1, 2, 2, 3]]), torch.tensor([[1, 0, 0]]), packed=True)
    assert got.input_ids.tolist() == [[7, 8, 9, 10]]
    assert got.position_ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("packed", [True, False])
def test_without_response_tokens_one_stand_in_remains(packed: bool) -> None:
    got = build_layout(IDS, MASK, POSITIONS, torch.zeros_like(WANTED), packed=packed)
    assert got.empty
    assert len(got.predict_index) == 1
    empty = build_layout(IDS[:0], MASK[:0], POSITIONS[:0], WANTED[:0], packed=packed)
    assert empty.empty
    assert empty.rows == 0
    assert empty.tokens == 1


def test_a_token_without_a_predecessor_is_an_error() -> None:
    mask = MASK.clone()
    mask[1, :3] = 0
    with pytest.raises(SchemaError, match="token 0 of row 1"):
        build_layout(IDS, mask, POSITIONS, WANTED, packed=True)
    with pytest.raises(SchemaError, match="must all be"):
        build_layout(IDS, MASK[:, 1:], POSITIONS, WANTED, packed=True)


def test_different_positions_are_not_shared() -> None:
    positions = POSITIONS.clone()
    positions[1] += 4
    got = build_layout(IDS, MASK, positions, WANTED, packed=True)
    assert got.tokens == 11

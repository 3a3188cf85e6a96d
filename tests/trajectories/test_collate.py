"""Segments become rows of a batch and come back."""

from __future__ import annotations

import pytest
import torch

from verl.errors import DataError
from verl.trajectories import Segment, collate, uncollate

SEGMENTS = [
    Segment([7, 8], [1, 2, 3], [1, 0, 1], [-1.0, 5.0, -2.0], [3, -1, 4], (3, 4)),
    Segment([9], [], [], None, None, None, overlong=True),
    Segment([4, 5, 6], [1, 1, 1, 1], None, [-0.5] * 4, None, (2, 6)),
]


def test_literal_rows() -> None:
    made = collate(SEGMENTS, prompt_length=3, response_length=4, pad_token_id=50)
    expected = {
        "prompts": [[50, 7, 8], [50, 50, 9], [4, 5, 6]],
        "responses": [[1, 2, 3, 50], [50] * 4, [1] * 4],
        "input_ids": [[50, 7, 8, 1, 2, 3, 50], [50, 50, 9, 50, 50, 50, 50], [4, 5, 6, 1, 1, 1, 1]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0], [1] * 7],
        "position_ids": [[0, 0, 1, 2, 3, 4, 4], [0] * 7, [0, 1, 2, 3, 4, 5, 6]],
        "response_mask": [[1, 0, 1, 0], [0] * 4, [1] * 4],
        "rollout_log_probs": [[-1.0, 0.0, -2.0, 0.0], [0.0] * 4, [-0.5] * 4],
        "policy_version": [[3, 4], [-1, -1], [2, 6]],
        "token_versions": [[3, -1, 4, -1], [-1] * 4, [2] * 4],
        "overlong": [False, True, True],
    }
    assert {name: value.tolist() for name, value in made.items()} == expected
    assert {name: value.dtype for name, value in made.items() if value.dtype != torch.int64} == {
        "rollout_log_probs": torch.float32,
        "policy_version": torch.int32,
        "token_versions": torch.int32,
        "overlong": torch.bool,
    }


def test_prompts_that_are_tensors_already_stay_as_they_are() -> None:
    ids, mask = torch.tensor([[0, 7], [5, 6]]), torch.tensor([[0, 1], [1, 1]])
    made = collate([Segment((), [1]), Segment((), [])], prompts=(ids, mask), response_length=2, pad_token_id=3)
    assert made["prompts"] is ids
    assert made["input_ids"].tolist() == [[0, 7, 1, 3], [5, 6, 3, 3]]
    assert made["attention_mask"].tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]


def test_tokens_come_back() -> None:
    made = collate(SEGMENTS, prompt_length=5, response_length=6, pad_token_id=1)  # a token that is sampled too
    back = uncollate(made)
    assert [(list(one.prompt_ids), list(one.response_ids), [int(bit) for bit in one.sampled]) for one in back] == [
        (list(one.prompt_ids), list(one.response_ids), list(one.sampled)) for one in SEGMENTS
    ]
    del made["response_mask"]
    assert all(all(one.sampled) for one in uncollate(made))


@pytest.mark.parametrize(("prompt", "response", "words"), [(2, 4, "a prompt has 3"), (3, 3, "a response has 4")])
def test_what_is_too_long_is_refused(prompt: int, response: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        collate(SEGMENTS, prompt_length=prompt, response_length=response, pad_token_id=0)

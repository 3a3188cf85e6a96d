"""Small batches of responses, with what a reward manager reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fixtures.tiny import make_tokenizer
from verl import DataProto

TOKENIZER = make_tokenizer()
P, R = 4, 6


def batch(responses: list[str], *, ground_truth: Any = "7", **more: Any) -> DataProto:
    """Prompts "ab", the given responses ending in the end token where there is room, anything in the padding."""
    rows, masks = [], []
    for text in responses:
        ids = TOKENIZER(text)["input_ids"] + ([1] if text and len(text) < R else [])
        rows.append(ids + [50] * (R - len(ids)))
        masks.append([1] * len(ids) + [0] * (R - len(ids)))
    count = len(responses)
    prompt = [0, 0, *TOKENIZER("ab")["input_ids"]]
    response_mask = torch.tensor(masks)
    tensors = {
        "prompts": torch.tensor([prompt] * count),
        "responses": torch.tensor(rows),
        "attention_mask": torch.cat([torch.tensor([[0, 0, 1, 1]] * count), response_mask], 1),
        "response_mask": response_mask,
    }
    non_tensors = {
        "data_source": np.array(["d"] * count, dtype=object),
        "reward_model": np.array([{"style": "rule", "ground_truth": ground_truth}] * count, dtype=object),
        "extra_info": np.array([{"index": i} for i in range(count)], dtype=object),
    }
    return DataProto.from_dict(tensors, {**non_tensors, **more})

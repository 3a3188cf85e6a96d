"""Turns of a conversation as seen in the mask: each run of sampled tokens between tool output is one turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked


@dataclass(frozen=True)
class Turns:
    """The turns of a batch, numbered over all of it.

    Attributes:
        of_token: ``(B, R)`` int64, turn of each sampled token; outside the mask a number without meaning.
        row: ``(T,)`` int64, the row of each turn.
        number: ``(T,)`` int64, its place among the turns of its row, from 0.
        first: ``(T,)`` int64, the column of its first token.
        mask: ``(B, R)`` bool.
    """

    of_token: Tensor
    row: Tensor
    number: Tensor
    first: Tensor
    mask: Tensor

    @classmethod
    def from_mask(cls, response_mask: Tensor) -> Turns:
        """Find the turns of ``response_mask`` ``(B, R)``."""
        mask = response_mask.bool()
        starts = mask.clone()
        starts[:, 1:] &= ~mask[:, :-1]
        place = starts.long().cumsum(-1) - 1
        row, first = starts.nonzero(as_tuple=True)
        turns = starts.sum(-1)
        offset = turns.cumsum(0) - turns
        return cls((offset.unsqueeze(-1) + place).clamp(min=0), row, place[row, first], first, mask)

    def __len__(self) -> int:
        return len(self.row)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of token values ``(B, R)`` in each turn, ``(T,)`` float64."""
        kept = keep_masked(values.double(), self.mask)
        return kept.new_zeros(len(self)).index_add_(0, self.of_token[self.mask], kept[self.mask])

    def spread(self, values: Tensor) -> Tensor:
        """Give each sampled token its turn's value: ``(T,)`` to ``(B, R)``, 0 outside the mask."""
        out = torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device)
        out[self.mask] = values[self.of_token[self.mask]]
        return out

    def discounted(self, values: Tensor, gamma: float) -> Tensor:
        """Sum of a turn's value ``(T,)`` and the discounted ones of the later turns of its row, ``(T,)`` float64."""
        out = values.double().clone()
        # Turns lie row by row, so the next one of the same row is the next number.
        for turn in reversed(range(len(self) - 1)):
            if self.row[turn] == self.row[turn + 1]:
                out[turn] += gamma * out[turn + 1]
        return out

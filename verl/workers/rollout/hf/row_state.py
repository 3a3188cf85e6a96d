"""What the running batch knows about its rows, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass
class RowState:
    """Numbers per row, and per row and cache column: what belongs to a token is kept in the token's column.

    Attributes:
        tokens: (rows, columns) int64, sampled tokens.
        log_probs: (rows, columns) float32, of the sampled tokens.
        uniform: (rows, columns) float64, the random number that draws the column's token.
        pad_bias: (rows, columns) in the model's dtype, -inf before the row's first token, else 0.
        start: (rows,) int64, column of the prompt's first token.
        ahead: (rows,) int64, what a sampled token's position is ahead of its number in the row; not 0 behind images.
        last_column: (rows,) int64, column where the row's budget ends.
        stop_set: (rows,) int64, which set of stop tokens applies.
        alive: (rows,) bool, not finished.
        seen: (rows, vocabulary) bool, tokens of the row's prompt and completion; (rows, 0) until a row's repetitions
            are penalised.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    uniform: torch.Tensor
    pad_bias: torch.Tensor
    start: torch.Tensor
    ahead: torch.Tensor
    last_column: torch.Tensor
    stop_set: torch.Tensor
    alive: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def allocate(
        cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, vocabulary: int = 0
    ) -> RowState:
        """Zeros for ``rows`` × ``columns``; ``dtype`` is the model's."""

        def grid(kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=device)

        def column(kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, dtype=kind, device=device)

        return cls(
            tokens=grid(torch.int64),
            log_probs=grid(torch.float32),
            uniform=grid(torch.float64),
            pad_bias=grid(dtype),
            start=column(torch.int64),
            ahead=column(torch.int64),
            last_column=column(torch.int64),
            stop_set=column(torch.int64),
            alive=column(torch.bool),
            seen=torch.zeros(rows, vocabulary, dtype=torch.bool, device=device),
        )

    @property
    def rows(self) -> int:
        """Rows that fit."""
        return self.tokens.shape[0]

    @property
    def columns(self) -> int:
        """Columns that fit."""
        return self.tokens.shape[1]

    def note_contexts(self, first: int, contexts: Sequence[list[int] | None], vocabulary: int) -> None:
        """Mark the tokens that rows from ``first`` on have; None: the row's repetitions are not penalised."""
        if all(context is None for context in contexts):
            return
        if not self.seen.shape[1]:
            self.seen = self.seen.new_zeros(self.rows, vocabulary)
        for row, context in enumerate(contexts, start=first):
            self.seen[row] = False
            if context is not None:
                self.seen[row, torch.tensor(context, device=self.seen.device)] = True

    def move_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows ``source`` over rows ``target``."""
        for item in fields(self):
            tensor = getattr(self, item.name)
            tensor[target] = tensor[source]

    def begin(self, first: int, starts: list[int]) -> None:
        """New rows from ``first`` on, whose contexts begin in the columns ``starts``."""
        rows = slice(first, first + len(starts))
        self.start[rows] = torch.tensor(starts, device=self.start.device)
        self.ahead[rows] = 0
        self.alive[rows] = True
        before = torch.arange(self.columns, device=self.start.device) < self.start[rows].unsqueeze(1)
        self.pad_bias[rows] = torch.zeros_like(self.pad_bias[rows]).masked_fill_(before, float("-inf"))

    def relaid(self, rows: int, columns: int, *, live: int, first_column: int, column: int, shift: int) -> RowState:
        """A state for ``rows`` × ``columns`` with the first ``live`` rows moved ``shift`` columns to the right.

        Columns before ``first_column`` belong to no row and are not kept, nor are those behind ``column``, the last
        one that has a token.
        """
        new = RowState.allocate(rows, columns, self.pad_bias.dtype, self.tokens.device, vocabulary=self.seen.shape[1])
        end = column + 1
        for item in fields(self):
            before, after = getattr(self, item.name), getattr(new, item.name)
            if before.dim() == 1 or item.name == "seen":
                after[:live] = before[:live]
            else:
                after[:live, first_column + shift : end + shift] = before[:live, first_column:end]
        new.start[:live] += shift
        new.last_column[:live] += shift
        new.pad_bias[:live, : first_column + shift] = float("-inf")
        return new

"""Preallocated keys and values of the running batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


class RolloutCache(Cache):
    """The cache that the model's forward writes to and reads from.

    Per layer two tensors (rows, heads, columns, width), made when the layer first runs, because only the model knows
    what it stores (DeepSeek's latent attention stores compressed vectors of two widths). All rows share the column of
    the next token; see :mod:`~verl.workers.rollout.hf.attention`. Rows ``0 .. live-1`` are in use.

    The memory is kept between batches and viewed in the shape that a batch needs.

    Args:
        num_layers: layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self._storage: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._view: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.rows = 0
        self.columns = 0
        # set before a forward; see `plan_prefill` and `plan_decode`
        self._decode = False
        self._live = 0
        self._first_column = 0
        self._column = 0
        self._row_range = (0, 0)
        self._runs: Sequence[tuple[int, int, int]] = ()
        self._source_rows: torch.Tensor | None = None

    # -- what the runner does

    def relayout(self, rows: int, columns: int, *, live: int, first_column: int, column: int, new_column: int) -> None:
        """Have room for ``rows`` × ``columns``, and move the live part.

        Columns ``[first_column, column)`` of the first ``live`` rows move so that they end before ``new_column``.
        """
        if (rows, columns) == (self.rows, self.columns) and (not live or column == new_column):
            return
        for index, pair in enumerate(self._view):
            if pair is None:
                continue
            kept = [tensor[:live, :, first_column:column].clone() for tensor in pair] if live else []
            fresh = self._make_view(index, pair[0], pair[1], rows, columns)
            for tensor, old in zip(fresh, kept, strict=False):
                tensor[:live, :, new_column - old.shape[2] : new_column] = old
            self._view[index] = fresh
        self.rows, self.columns = rows, columns

    def plan_prefill(
        self,
        column: int,
        row_range: tuple[int, int],
        runs: Sequence[tuple[int, int, int]],
        source_rows: torch.Tensor | None,
    ) -> None:
        """Say where the next forward's keys and values go.

        Args:
            column: prompts end just before this column.
            row_range: the rows to fill.
            runs: (first row, last row + 1, prompt length): the rows in stretches of one length.
            source_rows: (rows,) which row of the forward fills each row; None when they are the same.
        """
        self._decode, self._column, self._row_range, self._runs = False, column, row_range, runs
        self._source_rows = source_rows

    def plan_decode(self, column: int, first_column: int, live: int) -> None:
        """The next forward writes ``column`` of the first ``live`` rows and reads from ``first_column`` up to it."""
        self._decode, self._column, self._first_column, self._live = True, column, first_column, live

    def move_rows(self, target: torch.Tensor, source: torch.Tensor, first_column: int, column: int) -> None:
        """Copy rows ``source`` over rows ``target`` in columns ``[first_column, column)``."""
        for pair in self._view:
            if pair is not None:
                for tensor in pair:
                    part = tensor[:, :, first_column:column]
                    part[target] = part[source]

    def release(self) -> None:
        """Give the memory back."""
        self._storage = [None] * len(self._storage)
        self._view = [None] * len(self._view)
        self.rows = self.columns = 0

    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for pair in self._storage if pair is not None for tensor in pair)

    # -- what the model does

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new (B,K,L,D) states; returns what the layer attends to."""
        pair = self._view[layer_idx]
        if pair is None:
            pair = self._make_view(layer_idx, key_states, value_states, self.rows, self.columns)
            self._view[layer_idx] = pair
        keys, values = pair
        column = self._column
        if self._decode:
            live, first = self._live, self._first_column
            keys[:live, :, column : column + 1] = key_states
            values[:live, :, column : column + 1] = value_states
            return keys[:live, :, first : column + 1], values[:live, :, first : column + 1]
        first_row = self._row_range[0]
        for start, stop, length in self._runs:
            for tensor, states in ((keys, key_states), (values, value_states)):
                if self._source_rows is None:
                    new = states[start - first_row : stop - first_row, :, :length]
                else:
                    new = states[:, :, :length].index_select(0, self._source_rows[start - first_row : stop - first_row])
                tensor[start:stop, :, column - length : column] = new
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens cached so far, as far as a model may want to know; positions are always given explicitly."""
        return self._column - self._first_column if self._decode else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset that a mask would have."""
        return self.get_seq_length() + query_length, 0

    @property
    def is_compileable(self) -> bool:
        """Slices change from step to step."""
        return False

    def _make_view(
        self, index: int, key: torch.Tensor, value: torch.Tensor, rows: int, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [(rows, like.shape[1], columns, like.shape[3]) for like in (key, value)]
        sizes = [shape[0] * shape[1] * shape[2] * shape[3] for shape in shapes]
        storage = self._storage[index]
        if storage is None or any(have.numel() < need for have, need in zip(storage, sizes, strict=True)):
            # zeros, not empty: columns before a row's start are masked by adding -inf, which NaN would survive
            storage = (key.new_zeros(sizes[0]), value.new_zeros(sizes[1]))
            self._storage[index] = storage
        first, second = (have[:need].view(shape) for have, need, shape in zip(storage, sizes, shapes, strict=True))
        return first, second

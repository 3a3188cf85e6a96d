"""Preallocated keys and values of the running batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True)
class Write:
    """Where keys and values of a forward go.

    Attributes:
        rows: of the cache.
        end: column behind the last token.
        length: tokens of each row.
        source: rows of the forward; one of them fills all rows.
    """

    rows: slice
    end: int
    length: int
    source: slice | torch.Tensor


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
        self._reserve = 0  # tokens
        # set before a forward; see `plan_prefill`, `plan_extension` and `plan_decode`
        self._writes: Sequence[Write] = ()
        self._read: tuple[slice, slice] | None = None
        self._left_padded = False

    # -- what the runner does

    def relayout(
        self,
        rows: int,
        columns: int,
        *,
        live: int,
        first_column: int,
        column: int,
        new_column: int,
        reserve: int = 0,
    ) -> None:
        """Have room for ``rows`` × ``columns``, and move the live part.

        Columns ``[first_column, column)`` of the first ``live`` rows move so that they end before ``new_column``.
        Memory that has to be taken is enough for ``reserve`` tokens, so that later shapes find it there.
        """
        self._reserve = max(reserve, rows * columns)
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

    def plan_prefill(self, writes: Sequence[Write]) -> None:
        """Say where the next forward's keys and values go; it attends to nothing else.

        Args:
            writes: rows of the forward begin with the tokens that are kept.
        """
        self._writes, self._read, self._left_padded = writes, None, False

    def plan_extension(self, writes: Sequence[Write], rows: slice, first_column: int, column: int) -> None:
        """The next forward goes on behind cached tokens: it attends to ``[first_column, column)`` of ``rows``.

        Args:
            writes: rows of the forward end with the tokens that are kept, just before ``column``.
            rows: of the cache, one for each row of the forward.
            first_column: column of the first token of any of the rows.
            column: column of the next token.
        """
        self._writes, self._read, self._left_padded = writes, (rows, slice(first_column, column)), True

    def plan_decode(self, column: int, first_column: int, live: int) -> None:
        """The next forward writes ``column`` of the first ``live`` rows and reads from ``first_column`` up to it."""
        rows = slice(0, live)
        self._writes = (Write(rows, column + 1, 1, slice(None)),)
        self._read, self._left_padded = (rows, slice(first_column, column + 1)), False

    def copy_prefix(self, source: int, start: int, target: int, new_start: int, length: int) -> None:
        """Copy ``length`` columns of a row from ``start`` on to another row from ``new_start`` on."""
        for pair in self._view:
            if pair is not None:
                for tensor in pair:
                    tensor[target, :, new_start : new_start + length] = tensor[source, :, start : start + length]

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
        for write in self._writes:
            kept = slice(-write.length, None) if self._left_padded else slice(0, write.length)
            columns = slice(write.end - write.length, write.end)
            keys[write.rows, :, columns] = key_states[:, :, kept][write.source]
            values[write.rows, :, columns] = value_states[:, :, kept][write.source]
        if self._read is None:
            return key_states, value_states
        rows, columns = self._read
        return keys[rows, :, columns], values[rows, :, columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens cached so far, as far as a model may want to know; positions are always given explicitly."""
        if self._read is None:
            return 0
        columns = self._read[1]
        return columns.stop - columns.start - max(write.length for write in self._writes)

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
            widths = [shape[1] * shape[3] for shape in shapes]
            storage = (key.new_zeros(self._reserve * widths[0]), value.new_zeros(self._reserve * widths[1]))
            self._storage[index] = storage
        first, second = (have[:need].view(shape) for have, need, shape in zip(storage, sizes, shapes, strict=True))
        return first, second

"""What a model chooses while it computes: experts of tokens, and keys of sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):
    """Records every ``topk`` of a forward pass: routers and the indexers of sparse attention choose with it.

    Attributes:
        calls: for each call the number of candidates and the chosen indices, (..., tokens, k), sorted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            indices = result[1].detach().cpu()
            self.calls.append((args[0].shape[-1], indices.sort(-1).values))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        with self:
            yield


def compare_choices(got: Choices, want: Choices) -> Iterator[tuple[str, float, str]]:
    """Share of the tokens whose choices differ, for each kind of choice.

    Both ran the same rows, one at a time. Padding of the one that has it comes before the tokens.

    Yields:
        Kind, share, and the first place with a difference.
    """
    if len(got.calls) != len(want.calls):
        yield "choices", 1.0, f"{len(got.calls)} choices were made instead of {len(want.calls)}"
        return
    different: dict[str, int] = {}
    total: dict[str, int] = {}
    first: dict[str, str] = {}
    for number, ((candidates, mine), (expected_candidates, theirs)) in enumerate(
        zip(got.calls, want.calls, strict=True)
    ):
        # experts are the same for every row; keys are as many as the row has tokens
        tokens = theirs.shape[-2] if theirs.dim() > 1 else 1
        mine, theirs = mine.reshape(-1, mine.shape[-1])[-tokens:], theirs.reshape(-1, theirs.shape[-1])[-tokens:]
        kind = "keys" if expected_candidates == tokens and candidates != expected_candidates else "experts"
        if mine.shape != theirs.shape:
            apart = torch.ones(tokens, dtype=torch.bool)
        else:
            apart = (mine != theirs).any(-1)
        different[kind] = different.get(kind, 0) + int(apart.sum())
        total[kind] = total.get(kind, 0) + tokens
        if bool(apart.any()) and kind not in first:
            place = int(apart.nonzero()[0])
            first[kind] = f"choice {number}, token {place}: {mine[place].tolist()} against {theirs[place].tolist()}"
    for kind, count in total.items():
        yield kind, different[kind] / count, first.get(kind, f"{count} choices")

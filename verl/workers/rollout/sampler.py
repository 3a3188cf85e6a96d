"""From logits to tokens and their log-probabilities, row by row and independent of the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.workers.rollout.types import SamplingParams

#: tokens summed together in the first level of the inverse-CDF search
_BLOCK = 128
#: logits handled at once, so that float32 temporaries of a large vocabulary stay small
_CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of the rows of a batch as tensors; None where a setting changes nothing for any row.

    Attributes:
        greedy: (B,) bool.
        all_greedy: every row is greedy.
        temperature: (B,1) float32; 1 for greedy rows.
        top_k: (B,1) int64; the vocabulary size or more keeps all.
        max_top_k: the largest of ``top_k``.
        top_p: (B,1) float32; 1 keeps all.
        min_p: (B,1) float32; 0 keeps all.
        repetition_penalty: (B,1) float32; 1 changes nothing.
    """

    greedy: torch.Tensor | None
    all_greedy: bool
    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    max_top_k: int
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    repetition_penalty: torch.Tensor | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
        """Collect the settings of ``params``, one per row."""
        greedy = [item.temperature == 0.0 for item in params]
        all_greedy, any_greedy = all(greedy), any(greedy)

        def column(values: list[float], neutral: float, dtype: torch.dtype) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        def drawn(values: list[float], neutral: float) -> list[float]:
            return [neutral if is_greedy else value for value, is_greedy in zip(values, greedy, strict=True)]

        no_limit = 1 << 40
        top_k = drawn([item.top_k if item.top_k > 0 else no_limit for item in params], no_limit)
        return cls(
            greedy=torch.tensor(greedy, device=device) if any_greedy else None,
            all_greedy=all_greedy,
            temperature=column(drawn([item.temperature for item in params], 1.0), 1.0, torch.float32),
            top_k=column(top_k, no_limit, torch.int64),
            max_top_k=int(max(top_k, default=no_limit)),
            top_p=column(drawn([item.top_p for item in params], 1.0), 1.0, torch.float32),
            min_p=column(drawn([item.min_p for item in params], 0.0), 0.0, torch.float32),
            repetition_penalty=column([item.repetition_penalty for item in params], 1.0, torch.float32),
        )

    def rows(self, start: int, stop: int) -> SamplingBatch:
        """The settings of rows ``[start, stop)``."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start:stop]

        return SamplingBatch(
            cut(self.greedy),
            self.all_greedy,
            cut(self.temperature),
            cut(self.top_k),
            self.max_top_k,
            cut(self.top_p),
            cut(self.min_p),
            cut(self.repetition_penalty),
        )


def sample(
    logits: torch.Tensor, settings: SamplingBatch, uniform: torch.Tensor, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: (B,V), any floating dtype; not changed.
        settings: of the B rows.
        uniform: (B,) float64 in [0, 1); row b's token is the inverse of its cumulative distribution there.
        seen: (B,V) bool, tokens that each row has already; for the repetition penalty.

    Returns:
        tokens (B,) int64 and log-probabilities (B,) float32 of the processed distribution (for greedy rows: at
        temperature 1 without filters). A token whose probability is 0 is never drawn.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    if logits.shape[0] <= rows:
        return _sample(logits, settings, uniform, seen)
    pieces = []
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        chosen = None if seen is None else seen[part]
        pieces.append(_sample(logits[part], settings.rows(start, start + rows), uniform[part], chosen))
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


def _sample(
    logits: torch.Tensor, settings: SamplingBatch, uniform: torch.Tensor, seen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if settings.repetition_penalty is not None and seen is not None:
        logits = penalise_repetition(logits, settings.repetition_penalty, seen)
    if settings.all_greedy:
        tokens = logits.argmax(dim=-1)
        return tokens, _gather(logits, tokens) - logits.logsumexp(dim=-1)
    processed = process_logits(logits, settings)
    highest = processed.amax(dim=-1, keepdim=True)
    weights = torch.exp(processed - highest)
    tokens, total = inverse_cdf(weights, uniform)
    log_probs = (_gather(processed, tokens) - highest.squeeze(1)) - total.log().float()
    if settings.greedy is not None:
        # greedy rows pass through processing unchanged, so `total` is their normaliser too
        best = logits.argmax(dim=-1)
        tokens = torch.where(settings.greedy, best, tokens)
        greedy_log_probs = (_gather(logits, best) - highest.squeeze(1)) - total.log().float()
        log_probs = torch.where(settings.greedy, greedy_log_probs, log_probs)
    return tokens, log_probs


def penalise_repetition(logits: torch.Tensor, penalty: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Make tokens that a row has already less likely: positive logits are divided, negative ones multiplied.

    Args:
        logits: (B,V) float32; not changed.
        penalty: (B,1) float32.
        seen: (B,V) bool.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def process_logits(logits: torch.Tensor, settings: SamplingBatch) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order.

    Each filter looks at the renormalised result of the one before. Tokens tied with the last one kept by top-k are
    kept too; the most likely token always stays.

    Args:
        logits: (B,V) float32; not changed.

    Returns:
        (B,V) float32 with -inf for dropped tokens; ``logits`` itself when no setting changes anything.
    """
    if settings.temperature is not None:
        logits = logits / settings.temperature
    vocabulary = logits.shape[-1]
    if settings.top_k is not None:
        limit = min(settings.max_top_k, vocabulary)
        if limit < vocabulary:
            best = torch.topk(logits, limit, dim=-1).values
            threshold = best.gather(1, settings.top_k.clamp(max=limit) - 1)
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        else:  # some rows keep all tokens
            ordered = logits.sort(dim=-1, descending=True).values
            threshold = ordered.gather(1, settings.top_k.clamp(max=vocabulary) - 1)
            logits = logits.masked_fill(logits < threshold, float("-inf"))
    if settings.top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = torch.softmax(ordered, dim=-1)
        before = running_sum(probs) - probs
        dropped = (before >= settings.top_p) & (settings.top_p < 1.0)
        dropped[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), float("-inf"))
    if settings.min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + settings.min_p.log()
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits


def inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative weight exceeds ``uniform`` × the total.

    Two levels, sums of blocks and then one block, so that a large vocabulary is read once and accumulated in float64
    only where it matters. The result never has weight 0 and never decreases as ``uniform`` grows.

    Args:
        weights: (B,V) float32, not negative, at least one positive per row.
        uniform: (B,) float64 in [0, 1).

    Returns:
        indices (B,) int64 and totals (B,) float64.
    """
    batch, size = weights.shape
    if size <= 4 * _BLOCK:
        cumulative = running_sum(weights, torch.float64)
        total = cumulative[:, -1]
        return _first_above(cumulative, uniform * total), total
    padded = torch.nn.functional.pad(weights, (0, -size % _BLOCK)) if size % _BLOCK else weights
    blocks = padded.view(batch, -1, _BLOCK)
    edges = running_sum(blocks.sum(dim=-1), torch.float64)
    total = edges[:, -1]
    target = uniform * total
    block = _first_above(edges, target)
    inside = running_sum(blocks[torch.arange(batch, device=weights.device), block], torch.float64)
    start = torch.where(block > 0, edges.gather(1, (block - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    return (block * _BLOCK + _first_above(inside, target - start)).clamp_(max=size - 1), total


def running_sum(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Cumulative sum over the last dimension; torch's own may vary on CUDA, and then it is done by doubling."""
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(dim=-1, dtype=dtype)
    return sum_by_doubling(values if dtype is None else values.to(dtype))


def sum_by_doubling(values: torch.Tensor) -> torch.Tensor:
    """Cumulative sum over the last dimension, always added in the same order: sums of 1, 2, 4, ... values."""
    reach = 1
    while reach < values.shape[-1]:
        longer = values[..., reach:] + values[..., :-reach]
        values = torch.cat([values[..., :reach], longer], dim=-1)
        reach *= 2
    return values


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per row, the first index with ``cumulative > target``; targets at or past the end count as just below it.

    A step of the cumulative sum that adds nothing is never the first to exceed anything, so weight 0 is never chosen.
    """
    last = cumulative[:, -1]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return index.clamp_(max=cumulative.shape[1] - 1)  # only NaN gets past the end; the caller reports it


def _gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(1, index.unsqueeze(1)).squeeze(1)

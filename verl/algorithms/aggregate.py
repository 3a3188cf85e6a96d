"""Masked reductions, and the four ways to turn a matrix of token losses into one number.

Two rules hold throughout:

* A position outside the mask may hold anything, NaN included, and changes neither value nor gradient. Hence
  ``torch.where`` instead of a product with the mask (``0 * nan`` is NaN).
* A loss is a sum over this piece of the batch divided by a count over *all* of it, so that pieces add up.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from verl.errors import ConfigError

Count: TypeAlias = int | float | Tensor

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def keep_masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return ``values`` where ``mask`` is non-zero and ``fill`` elsewhere; nothing flows back from elsewhere.

    Apply it to the *inputs* of a non-linear function as well: the gradient of ``exp`` at NaN is NaN even when the
    result is masked afterwards.
    """
    return torch.where(mask.bool(), values, fill)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values whose mask is non-zero, over all dimensions or over ``dim``."""
    kept = keep_masked(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values whose mask is non-zero; the mean over nothing is 0."""
    selected = mask.bool().expand_as(values)
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, selected, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Variance (divided by n - 1) of the values whose mask is non-zero; 0 for fewer than two values."""
    centred = values - masked_mean(values, mask)
    count = mask.bool().expand_as(values).sum()
    return masked_sum(centred.square(), mask) / (count - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Scale the masked values to variance 1 and, if ``shift_mean``, to mean 0; 0 outside the mask.

    Statistics run over every masked value of the tensor, in float64, with variance divided by n - 1. Pass the whole
    batch: whitened pieces are not the whitened batch. A single value has variance 0 and only loses its mean.
    """
    precise = values.double()
    mean = masked_mean(precise, mask)
    white = (precise - mean) * torch.rsqrt(masked_var(precise, mask) + epsilon)
    if not shift_mean:
        white = white + mean
    return keep_masked(white, mask).to(values.dtype)


def _at_least_one(count: Count) -> Count:
    # A piece, or a whole batch, without a single response token has loss 0 rather than 0/0.
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    r"""Aggregate token losses ``(B, R)`` into a scalar.

    With :math:`S_i=\sum_t m_{it} l_{it}` over sequence *i*, :math:`T_i=\sum_t m_{it}`, *N* tokens and *G* sequences:

    ============================  ====================================
    ``token-mean``                :math:`\sum_i S_i / N`
    ``seq-mean-token-sum``        :math:`\sum_i S_i / G`
    ``seq-mean-token-mean``       :math:`\sum_i (S_i / T_i) / G`
    ``seq-mean-token-sum-norm``   :math:`\sum_i S_i / (G L)`
    ============================  ====================================

    ``token-mean`` gives each token the same weight (DAPO, arXiv:2503.14476), ``seq-mean-token-mean`` each sequence
    (GRPO, arXiv:2402.03300), and ``seq-mean-token-sum-norm`` divides by a constant *L* instead of a length, which
    removes the length bias (Dr. GRPO, arXiv:2503.20783).

    *N* and *G* belong to the whole mini-batch over all data-parallel ranks; the result is multiplied by ``dp_size``
    because data-parallel gradient reduction averages over ranks. Summed over micro-batches and averaged over ranks it
    is then exactly the loss of the undivided mini-batch. Without them, the counts of the given tensors are used.

    Args:
        loss_mat: ``(B, R)`` loss of each token.
        loss_mask: ``(B, R)``; a non-zero entry counts.
        loss_agg_mode: one of :data:`LOSS_AGG_MODES`.
        dp_size: number of data-parallel ranks.
        batch_num_tokens: *N*; default: tokens in ``loss_mask``.
        global_batch_size: *G*; default: sequences with at least one token in ``loss_mask``.
        loss_scale_factor: *L*; default: ``R``, the width that responses are padded to.

    Raises:
        ConfigError: unknown mode, or ``loss_scale_factor`` not positive.
    """
    if loss_agg_mode == "token-mean":
        tokens = loss_mask.bool().sum() if batch_num_tokens is None else batch_num_tokens
        return masked_sum(loss_mat, loss_mask) / _at_least_one(tokens) * dp_size
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(f"unknown loss_agg_mode {loss_agg_mode!r}; choose one of {', '.join(LOSS_AGG_MODES)}")

    sequences = loss_mask.bool().any(dim=-1).sum() if global_batch_size is None else global_batch_size
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = masked_mean(loss_mat, loss_mask, dim=-1)
    else:
        per_sequence = masked_sum(loss_mat, loss_mask, dim=-1)
    loss = per_sequence.sum() / _at_least_one(sequences) * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        if scale <= 0:
            raise ConfigError(f"loss_scale_factor is {scale}; it divides the loss and must be positive")
        loss = loss / scale
    return loss

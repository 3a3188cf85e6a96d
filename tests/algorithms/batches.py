"""Small random batches for the tests of the algorithm layer."""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def ragged_mask(batch: int, width: int, seed: int = 0) -> Tensor:
    """(B, R) float mask: responses of different lengths, one of them with a hole (tool output), one empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (batch,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).float()
    mask[0] = 1.0
    mask[0, 1 : width // 2] = 0.0
    mask[-1] = 0.0
    return mask


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale


def poison(values: Tensor, mask: Tensor, value: float = float("nan")) -> Tensor:
    """``values`` with garbage outside the mask."""
    return torch.where(mask.bool(), values, value)


def counts(mask: Tensor) -> dict[str, int]:
    """Global counts of a mini-batch with this mask."""
    return {"batch_num_tokens": int(mask.sum()), "global_batch_size": int((mask.sum(-1) > 0).sum())}

"""Log-probabilities and entropies of given tokens from hidden states, without keeping the logits.

For hidden states h (N,H), an output embedding W (V,H) and a temperature T the model's distribution is
softmax(f(h W^T) / T), with f the model's own transformation of logits (scale, soft cap) or the identity. Needed are
log p(target) and the entropy -sum p log p, (N,) each. The logits are N x V numbers, far more than everything else
in a step; they are computed in chunks of rows and recomputed in the backward pass. A batch that fits one chunk keeps
its log-softmax instead, so that small models pay nothing for the scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

# Numbers in one chunk of logits: 64 MiB in float32 on CPU, 512 MiB on an accelerator.
CHUNK_NUMBERS_CPU = 1 << 24
CHUNK_NUMBERS_DEVICE = 1 << 27


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits before they mean anything.

    Attributes:
        scale: factor (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        softcap: c in c*tanh(x/c), after the scale (Gemma's ``final_logit_softcapping``); None for no cap.
        unsampled: (K,) int64, tokens that generation never samples: their probability is 0, and the others share it.
            None: all tokens are sampled.
    """

    scale: float = 1.0
    softcap: float | None = None
    unsampled: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitTransform:
        """Read the transformation from a Transformers causal LM and its config."""
        config = model.config.get_text_config()
        scale = float(getattr(model, "logit_scale", None) or getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(scale, None if cap is None else float(cap))

    def without(self, tokens: Sequence[int], device: torch.device) -> LogitTransform:
        """The same transformation for a policy that never samples ``tokens``."""
        return replace(self, unsampled=torch.tensor(tokens, device=device)) if len(tokens) else self


IDENTITY = LogitTransform()

#: logit of a token that is never sampled; finite, so that 0 * log 0 is 0
NEVER = -1e30


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    chunk_numbers: int | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and optionally the entropy of each distribution, in float32.

    Args:
        hidden: (N, H) states that predict the targets.
        weight: (V, H) output embedding.
        bias: (V,) or None.
        targets: (N,) int64.
        temperature: divides the logits; must be positive.
        transform: the model's own change to its logits.
        entropy: also return entropies, in nats.
        chunk_numbers: most logits to hold at a time; by default a size that suits the device.
        keep: keep the log-softmax for the backward pass where one chunk holds it; False recomputes it.

    Returns:
        (N,) log-probabilities and (N,) entropies or None; both differentiable.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive; at 0 a distribution is a single choice")
    if chunk_numbers is None:
        chunk_numbers = CHUNK_NUMBERS_CPU if hidden.device.type == "cpu" else CHUNK_NUMBERS_DEVICE
    rows = max(1, chunk_numbers // weight.shape[0])
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, weight, bias, targets, float(temperature), transform, entropy, rows, keep
    )
    return log_probs, entropies if entropy else None


@torch.no_grad()
def token_sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    chunk_numbers: int | None = None,
) -> Tensor:
    """Sum of the squared probabilities of each distribution, (N,) float32, without gradient.

    It is the chance that two draws agree: 1 for a certain token, 1/V for an even distribution.

    Args: as :func:`token_log_probs`.
    """
    if chunk_numbers is None:
        chunk_numbers = CHUNK_NUMBERS_CPU if hidden.device.type == "cpu" else CHUNK_NUMBERS_DEVICE
    rows = max(1, chunk_numbers // weight.shape[0])
    sums = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    for start in range(0, hidden.shape[0], rows):
        part = hidden[start : start + rows]
        log_p, _ = _log_softmax(part, weight, bias, transform, temperature)
        sums[start : start + rows] = log_p.mul_(2.0).exp_().sum(-1)
    return sums


def _log_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    temperature: float,
    need_slope: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Float32 log-softmax of the transformed logits, and the soft cap's derivative if asked for."""
    x = linear(hidden, weight, bias).float()
    scale, softcap = transform.scale, transform.softcap
    slope: Tensor | None = None
    if softcap is None:
        if scale != temperature:
            x.mul_(scale / temperature)
    else:
        x.mul_(scale / softcap).tanh_()
        if need_slope:  # of c*tanh(x/c)
            slope = 1.0 - x * x
        x.mul_(softcap / temperature)
    if transform.unsampled is not None:
        x.index_fill_(-1, transform.unsampled, NEVER)
    return torch.log_softmax(x, -1), slope


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        transform: LogitTransform,
        entropy: bool,
        rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_probs = hidden.new_empty(count, dtype=torch.float32)
        entropies = hidden.new_empty(count if entropy else 0, dtype=torch.float32)
        single = count <= rows
        kept: Tensor | None = None
        for start in range(0, count, rows):
            end = min(start + rows, count)
            log_p, _ = _log_softmax(hidden[start:end], weight, bias, transform, temperature)
            log_probs[start:end] = log_p.gather(1, targets[start:end, None])[:, 0]
            if entropy:
                entropies[start:end] = log_p.exp().mul_(log_p).sum(-1).neg_()
            if keep and single and transform.softcap is None:
                kept = log_p
            del log_p  # before the next chunk is made
        ctx.save_for_backward(hidden, weight, bias, targets, kept, entropies)
        ctx.settings = (temperature, transform, entropy, rows)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, kept, entropies = ctx.saved_tensors
        temperature, transform, entropy, rows = ctx.settings
        scale = transform.scale
        count = hidden.shape[0]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        single = count <= rows
        grad_hidden = torch.empty_like(hidden) if need_hidden and not single else None
        # Sums over chunks are kept in float32; with one chunk there is nothing to sum.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and not single else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and not single else None
        for start in range(0, count, rows):
            end = min(start + rows, count)
            part = hidden[start:end]
            slope: Tensor | None = None
            if kept is None:
                log_p, slope = _log_softmax(part, weight, bias, transform, temperature, need_slope=True)
            else:
                log_p = kept
            grad = grad_log_probs[start:end, None]
            if entropy:
                # dH/dx_j = -p_j (log p_j + H);  d log p_t/dx_j = [j=t] - p_j
                d_logits = log_p.exp().neg_()
                weighted = log_p if kept is None else log_p.clone()
                d_logits.mul_(
                    weighted.add_(entropies[start:end, None]).mul_(grad_entropies[start:end, None]).add_(grad)
                )
                del weighted
            else:
                d_logits = (log_p.exp_() if kept is None else log_p.exp()).mul_(-grad)
            del log_p
            d_logits.scatter_add_(1, targets[start:end, None], grad)
            if slope is not None:
                d_logits.mul_(slope)
            if scale != temperature:
                d_logits.mul_(scale / temperature)
            d_logits = d_logits.to(weight.dtype)
            if single:
                return (
                    d_logits @ weight if need_hidden else None,
                    d_logits.t() @ part if need_weight else None,
                    d_logits.sum(0) if need_bias else None,
                    *([None] * 6),
                )
            if grad_hidden is not None:
                torch.mm(d_logits, weight, out=grad_hidden[start:end])
            if grad_weight is not None:
                grad_weight += d_logits.t() @ part
            if grad_bias is not None:
                grad_bias += d_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *([None] * 6),
        )

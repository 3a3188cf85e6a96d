"""Losses over pairs of answers of which one was preferred: DPO and the Bradley-Terry reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.errors import ConfigError


def dpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290).

    With the implicit rewards :math:`r = \beta(\log\pi(y) - \log\pi_{ref}(y))` and the margin
    :math:`m = r_{chosen} - r_{rejected}`:

    .. math::
        l_{sigmoid} = -(1-\epsilon)\log\sigma(m) - \epsilon\log\sigma(-m), \qquad
        l_{hinge} = \max(0, 1 - m), \qquad
        l_{ipo} = \Bigl(\frac{m}{\beta} - \frac{1}{2\beta}\Bigr)^2

    :math:`\epsilon` is ``label_smoothing`` (conservative DPO, :math:`\epsilon = 0` in the paper); ``hinge`` is that of
    SLiC-HF (Zhao et al., arXiv:2305.10425); ``ipo`` is that of Azar et al. (arXiv:2310.12036), here on summed
    log-probabilities.

    Args:
        chosen: ``(N,)`` log-probability of the better answer, summed over its tokens.
        rejected: ``(N,)`` of the worse one.
        ref_chosen: ``(N,)`` under the reference model.
        ref_rejected: ``(N,)`` under the reference model.
        beta: strength of the pull to the reference.
        loss_type: ``sigmoid``, ``hinge`` or ``ipo``.
        label_smoothing: share of pairs that may be the wrong way round; for ``sigmoid``.

    Returns:
        ``(losses, chosen rewards, rejected rewards)``, ``(N,)`` each; the rewards carry no gradient.

    Raises:
        ConfigError: unknown ``loss_type``.
    """
    chosen_reward = beta * (chosen - ref_chosen.detach())
    rejected_reward = beta * (rejected - ref_rejected.detach())
    margin = chosen_reward - rejected_reward
    if loss_type == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    elif loss_type == "hinge":
        losses = torch.relu(1 - margin)
    elif loss_type == "ipo":
        losses = (margin / beta - 1 / (2 * beta)).square()
    else:
        raise ConfigError(f"loss.loss_type={loss_type!r}: choose sigmoid, hinge or ipo")
    return losses, chosen_reward.detach(), rejected_reward.detach()


def pairwise_reward_losses(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, center_coef: float = 0.0
) -> Tensor:
    r"""Bradley-Terry loss of a reward model (Ouyang et al., arXiv:2203.02155).

    .. math:: l = -\log\sigma(s_{chosen} - s_{rejected} - m) + c\,(s_{chosen} + s_{rejected})^2

    The margin *m* asks for a larger difference where people were sure (Llama 2, arXiv:2307.09288). Only differences of
    scores matter to the first term; the second keeps their level at 0 (Eisenstein et al., arXiv:2312.09244).

    Args:
        chosen: ``(N,)`` score of the better answer.
        rejected: ``(N,)`` of the worse one.
        margin: ``(N,)`` least difference, or None for 0.
        center_coef: *c*.

    Returns:
        ``(N,)`` losses.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -logsigmoid(difference)
    return losses + center_coef * (chosen + rejected).square() if center_coef else losses

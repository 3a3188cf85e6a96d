"""What is likely wrong when rollout and training give the same tokens other probabilities.

The numbers of a mismatch look alike whatever its cause; its *pattern* over tokens tells causes apart. With
d = log-prob of training less log-prob of rollout, over the sampled tokens:

* **temperature**: dividing logits by another number scales log-probs, so d is nearly a straight line in the
  training log-prob. A line that explains most of d with a slope far from 0 is this and hardly anything else.
* **top-p, top-k**: cutting off a tail raises the probabilities of all that is left: no d is positive.
* **end of sequence**: only the last token of responses that ended differs, because one side treats the end token
  another way.
* **stale weights**: the batch itself says which weights sampled it (``policy_version``). If it says they are current
  and differences are large without a pattern, weights did not arrive as they were sent.
* **numeric types**: small differences without direction or pattern on all tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.fields import tensors_of

logger = logging.getLogger(__name__)

#: mean difference in nats up to which rounding in a 16-bit type explains it
ROUNDING = 0.1


@dataclass(frozen=True)
class Finding:
    """A likely cause.

    Attributes:
        cause: ``temperature``, ``truncation``, ``eos``, ``stale``, ``dtype`` or ``weights``.
        text: what was seen and what to look at.
    """

    cause: str
    text: str


def diagnose(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    versions: Tensor | None = None,
    current_version: int | None = None,
    full_width: bool = True,
) -> list[Finding]:
    """Likely causes of a mismatch, the surest first; never empty.

    Args:
        train_log_prob: ``(B, R)``.
        rollout_log_prob: ``(B, R)``.
        response_mask: ``(B, R)``.
        versions: ``(B, 2)`` oldest and newest weights that sampled a row.
        current_version: version of the weights that ``train_log_prob`` comes from.
        full_width: a response that fills all R columns was cut off and has no end token.
    """
    mask = response_mask.bool()
    train, rollout = train_log_prob[mask].double(), rollout_log_prob[mask].double()
    findings: list[Finding] = []
    if versions is not None and current_version is not None:
        age = current_version - versions[mask.any(-1), 0].double()
        if len(age) and age.max() > 0:
            findings.append(
                Finding(
                    "stale",
                    f"{(age > 0).double().mean():.0%} of the responses were sampled by older weights, up to "
                    f"{int(age.max())} steps old: expected with asynchronous generation or kept groups "
                    "(algorithm.filter_groups); algorithm.rollout_correction.rollout_is=token corrects for it",
                )
            )
    difference = train - rollout
    mean = difference.abs().mean().item()
    by_place = _at_the_end(train_log_prob.double() - rollout_log_prob.double(), mask, full_width)
    if by_place is not None:
        last, others = by_place
        if last > 10 * others and last > 3 * mean:
            findings.append(
                Finding(
                    "eos",
                    f"the last token of finished responses differs by {last:.3g} nats, the others by {others:.3g}: "
                    "rollout and training do not agree on the end of sequence; compare the tokenizer's and the "
                    "generation config's eos_token_id, rollout.ignore_eos, and special tokens that the rollout bans",
                )
            )
            return findings
    slope, explained = _line(train, difference)
    # unrelated log-probs lie on a line too, one that leaves nothing of the rollout's in the training's
    related = _line(train, rollout)[1] > 0.5
    if related and explained > 0.5 and abs(slope) > 0.02:
        findings.append(
            Finding(
                "temperature",
                f"differences grow in proportion to the log-prob (slope {slope:+.2f}, {explained:.0%} explained): "
                f"rollout and training divide logits by different temperatures, by a factor of about {1 - slope:.2f}; "
                "check actor_rollout_ref.rollout.temperature in both places, and logit scaling or soft-capping",
            )
        )
    elif (difference <= 1e-6).all() and mean > 0:
        findings.append(
            Finding(
                "truncation",
                "the rollout gives every sampled token a higher probability: its log-probs are those of a distribution "
                "cut by top-p or top-k; with actor_rollout_ref.rollout.top_p=1 and top_k=-1 they agree",
            )
        )
    elif not findings:
        if mean <= ROUNDING and abs(difference.mean().item()) < 0.5 * mean:
            findings.append(
                Finding(
                    "dtype",
                    f"differences of {mean:.3g} nats have no direction and no pattern: rounding in other numeric "
                    "types or kernels; compare rollout.dtype with actor.fsdp_config.mixed_precision.param_dtype, "
                    "or set rollout.dtype=float32 to see them vanish",
                )
            )
        else:
            findings.append(
                Finding(
                    "weights",
                    f"differences of {mean:.3g} nats have no pattern although the weights count as current: the "
                    "rollout does not compute with the weights it was given; VERL_SYNC_CHECK=1 compares checksums "
                    "after each weight sync. Otherwise compare model, position ids and chat template of both sides",
                )
            )
    return findings


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Slope of y over x, and the share of y's variance that the line explains; 0 for too few or equal points."""
    if len(x) < 3:
        return 0.0, 0.0
    dx, dy = x - x.mean(), y - y.mean()
    var_x, var_y = dx.square().sum(), dy.square().sum()
    if var_x == 0 or var_y == 0:
        return 0.0, 0.0
    slope = (dx * dy).sum() / var_x
    return slope.item(), (slope.square() * var_x / var_y).item()


def _at_the_end(difference: Tensor, mask: Tensor, full_width: bool) -> tuple[float, float] | None:
    """Mean absolute difference at the last token of finished responses, and at all other tokens."""
    width = mask.shape[1]
    last = (mask * torch.arange(1, width + 1, device=mask.device)).argmax(-1)
    finished = mask.any(-1) & ((last < width - 1) | (not full_width))
    ends = torch.zeros_like(mask)
    ends[torch.nonzero(finished).flatten(), last[finished]] = True
    others = mask & ~ends
    if not ends.any() or not others.any():
        return None
    return difference[ends].abs().mean().item(), difference[others].abs().mean().item()


class MismatchMonitor:
    """Warns when the mean difference of log-probs passes a threshold, and again when the likely cause changes.

    Args:
        threshold: mean absolute difference per token in nats; None never warns.
    """

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold
        self._told: tuple[str, ...] = ()

    def look(self, batch: DataProto, difference: float, *, step: int) -> list[Finding]:
        """Look at a batch with ``old_log_probs`` and ``rollout_log_probs`` before the update of ``step``.

        Args:
            batch: the batch.
            difference: its mean absolute difference of log-probs.
            step: the weights are those of the step before.

        Returns:
            What was found; empty below the threshold.
        """
        if self.threshold is None or difference <= self.threshold:
            self._told = ()
            return []
        tensors = tensors_of(batch)
        findings = diagnose(
            tensors["old_log_probs"],
            tensors["rollout_log_probs"],
            tensors["response_mask"],
            versions=tensors.get("policy_version", None),
            current_version=step - 1,
        )
        causes = tuple(finding.cause for finding in findings)
        if causes != self._told:
            self._told = causes
            logger.warning(
                "step %d: rollout and training log-probs of the same tokens differ by %.3g nats on average, more than "
                "algorithm.rollout_correction.report_threshold=%g:%s",
                step,
                difference,
                self.threshold,
                "".join(f"\n  - {finding.text}" for finding in findings),
            )
        return findings

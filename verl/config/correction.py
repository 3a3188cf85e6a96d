"""Correcting for a rollout whose probabilities are not the training policy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.base import Config, opt

IS_LEVELS = ("token", "sequence", "geometric", "icepop")
RS_LEVELS = ("token", "sequence", "geometric")
LOSS_TYPES = ("ppo_clip", "reinforce")


@dataclass
class RolloutCorrectionConfig(Config):
    """Importance weights and rejection for samples of a policy that is stale or computed differently."""

    rollout_is: str | None = opt(
        None,
        "Importance weights: token = one per token; sequence = their product; geometric = their geometric mean; "
        "icepop = per token, 0 outside the bounds; not given = no weights.",
        choices=IS_LEVELS,
    )
    rollout_is_threshold: float = opt(
        2.0, "Largest importance weight; a greater one is cut to it (icepop: to 0).", gt=0
    )
    rollout_is_threshold_lower: float | None = opt(
        None, "icepop: smallest weight that is kept; not given = 1 / rollout_is_threshold.", gt=0
    )
    rollout_is_batch_normalize: bool = opt(False, "Divide the weights by their mean over the batch.")
    rollout_rs: str | None = opt(
        None,
        "Rejection: token = tokens whose ratio is out of bounds; sequence, geometric = responses whose product, or "
        "geometric mean, of ratios is; not given = no rejection.",
        choices=RS_LEVELS,
    )
    rollout_rs_threshold: float | None = opt(
        None, "Largest ratio that is not rejected; not given = rollout_is_threshold.", gt=0
    )
    rollout_rs_threshold_lower: float | None = opt(
        None, "Smallest ratio that is not rejected; not given = 1 / rollout_rs_threshold.", gt=0
    )
    rollout_token_veto_threshold: float | None = opt(
        None, "Reject a response with a token whose ratio is below this; not given = no veto.", gt=0
    )
    bypass_mode: bool = opt(
        False, "Take the rollout's log-probabilities as the old ones; the policy's are not computed a second time."
    )
    loss_type: str = opt(
        "ppo_clip",
        "With bypass_mode: ppo_clip = clipped ratio to the rollout policy; reinforce = "
        "weighted policy gradient without clipping.",
        choices=LOSS_TYPES,
    )
    report_threshold: float | None = opt(
        0.05,
        "Mean difference of log-probabilities per token, in nats, from which the log says what is likely wrong; "
        "null = never.",
        gt=0,
        affects="report",
    )

    @property
    def rs_upper(self) -> float:
        """Upper bound of rejection."""
        return self.rollout_is_threshold if self.rollout_rs_threshold is None else self.rollout_rs_threshold

    @property
    def rs_lower(self) -> float:
        """Lower bound of rejection."""
        return 1.0 / self.rs_upper if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower

    @property
    def is_lower(self) -> float:
        """Lower bound of the weights that icepop keeps."""
        lower = self.rollout_is_threshold_lower
        return 1.0 / self.rollout_is_threshold if lower is None else lower

    @property
    def rejects(self) -> bool:
        """Whether tokens may be left out of the update."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None

    @property
    def corrects(self) -> bool:
        """Whether anything but reporting is asked for."""
        return self.rollout_is is not None or self.rejects

    @property
    def clips(self) -> bool:
        """Whether bypass mode keeps PPO's clipped ratio."""
        return self.loss_type == "ppo_clip"

    def problems(self) -> Iterator[str]:
        if self.rollout_rs is not None and self.rs_lower >= self.rs_upper:
            yield (
                f"rollout_rs_threshold_lower={self.rs_lower:g}: must be below rollout_rs_threshold={self.rs_upper:g}; "
                "ratios around 1 are those that agree"
            )
        if self.rollout_is == "icepop" and self.is_lower >= self.rollout_is_threshold:
            yield (
                f"rollout_is_threshold_lower={self.is_lower:g}: must be below rollout_is_threshold="
                f"{self.rollout_is_threshold:g}; 0.5 and 5 are the values of the method's authors"
            )
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            yield "rollout_is_batch_normalize=True: there are no weights to normalise; set rollout_is"
        if self.rollout_is_threshold_lower is not None and self.rollout_is != "icepop":
            yield (
                f"rollout_is_threshold_lower={self.rollout_is_threshold_lower:g}: only rollout_is=icepop has a lower "
                "bound; use rollout_rs to reject small ratios"
            )
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            yield (
                f"rollout_is={self.rollout_is!r}: with bypass_mode=True and loss_type=ppo_clip the clipped ratio is "
                "already that of the policy to the rollout, so weights would count it twice; leave rollout_is out or "
                "use loss_type=reinforce"
            )
        if self.bypass_mode and self.rollout_is_batch_normalize:
            yield (
                "rollout_is_batch_normalize=True: with bypass_mode=True weights are known only within the update, "
                "piece by piece; use bypass_mode=False, which knows them for the whole batch"
            )
        if not self.bypass_mode and self.loss_type != "ppo_clip":
            yield f"loss_type={self.loss_type!r}: is read only with bypass_mode=True"

"""What a check of the certificate finds: one figure beside its tolerance, or the reason why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from verl.selftest.compare import Deviation

Verdict = Literal["passed", "failed", "not applicable", "refused"]


TEMPERATURE = 0.8
TRANSFORMERS = "plain Transformers"


@dataclass(frozen=True)
class Tolerances:
    """Largest allowed figures, float32.

    Attributes:
        log_probs: absolute difference of a log-probability or an entropy.
        gradients: distance of a parameter's gradient from the reference, relative to the norm of the reference; of
            gradients below 1% of the whole gradient's norm, relative to that 1%.
        exact: of what must be equal in every bit.
        routing: part of the tokens whose experts or selected keys differ.
    """

    log_probs: float = 5e-5
    gradients: float = 1e-4
    exact: float = 0.0
    routing: float = 1e-3


@dataclass(frozen=True)
class Measure:
    """The result of one comparison.

    Attributes:
        check: name of the check that it belongs to.
        case: what was varied, such as ``"packed"``.
        against: what it was compared with.
        deviation: quantity, figure and tolerance; None where the comparison could not be made.
        where: the first place beyond the tolerance, or the place of the largest difference.
        error: why the comparison could not be made; an error counts as a failure.
        reason: why the check says nothing about this model.
        refused: a start-up check refused the model with the sentence in ``error``.
    """

    check: str
    case: str
    against: str = ""
    deviation: Deviation | None = None
    where: str = ""
    error: str = ""
    reason: str = ""
    refused: bool = False

    @property
    def verdict(self) -> Verdict:
        """``passed``, ``failed``, ``not applicable`` or ``refused``."""
        if self.refused:
            return "refused"
        if self.reason:
            return "not applicable"
        return "passed" if self.deviation is not None and self.deviation.ok else "failed"

    @property
    def severity(self) -> float:
        """Orders measures of a check: the largest one is shown."""
        if self.error:
            return math.inf
        return -1.0 if self.deviation is None else self.deviation.excess

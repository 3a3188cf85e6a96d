"""Whether two mathematical answers are equal, by computer algebra, within a time and memory limit.

``math-verify`` (extra ``math``) does the algebra. It runs in a helper process that is killed when an answer such as
``9^{9^{9}}`` keeps it busy: signals, its own means, work in a main thread only.
"""

from __future__ import annotations

import logging
import threading
from importlib.util import find_spec

from verl.errors import RewardError
from verl.rewards.function import ScoreFunction
from verl.rewards.outcome import OutcomeKind
from verl.rewards.policy import ScoringOptions
from verl.rewards.process_scorer import ProcessScorer

logger = logging.getLogger(__name__)

LIMIT_S = 5.0
_MEMORY_BYTES = 4 << 30
LONGEST = 2000
"""Characters of a text that is compared."""

_lock = threading.Lock()
_helper: ProcessScorer | None = None


def installed() -> bool:
    """Whether ``math-verify`` is there."""
    return find_spec("math_verify") is not None


def equal(answer: str, reference: str) -> bool:
    """Whether ``math-verify`` finds the answer in ``answer`` equal to the one in ``reference``.

    An answer that is not decided within 5 seconds and 4 GiB, or is longer than 2000 characters, is not equal.

    Raises:
        RewardError: the helper process cannot be started.
    """
    if len(answer) > LONGEST or len(reference) > LONGEST:
        return False
    (outcome,) = _scorer().score([{"answer": answer, "reference": reference}])
    if outcome.fatal:
        raise RewardError(outcome.message)
    if outcome.kind is not OutcomeKind.SCORE:
        logger.debug("math-verify did not decide about %r and %r: %s", answer[:100], reference[:100], outcome.message)
    return outcome.score == 1.0


def _scorer() -> ProcessScorer:
    global _helper
    with _lock:
        if _helper is None:
            _warm_up = ProcessScorer(ScoreFunction(verify), ScoringOptions(timeout_s=None, num_workers=1))
            # the first call imports sympy, which takes longer than a comparison may
            _warm_up.score([{"answer": "1", "reference": "1"}])
            _warm_up.timeout_s = LIMIT_S
            _helper = _warm_up
        return _helper


def verify(answer: str, reference: str) -> float:
    """In the helper process: 1.0 or 0.0."""
    import resource

    from math_verify import parse
    from math_verify import verify as same

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no time limit; it has one, outside
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))
    gold = parse(reference, parsing_timeout=None)
    return float(same(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

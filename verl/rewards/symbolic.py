"""Whether two mathematical answers are equal, by computer algebra, within a time and memory limit.

``math-verify`` (extra ``math``) does the algebra. It runs in a helper process that is killed when an answer such as
``9^{9^{9}}`` keeps it busy: signals, its own means, work in a main thread only.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from verl.rewards.helper import Helper, limit_memory
from verl.rewards.outcome import OutcomeKind

logger = logging.getLogger(__name__)

LIMIT_S = 5.0
LONGEST = 2000
"""Characters of a text that is compared."""


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
    outcome = HELPER(answer=answer, reference=reference)
    if outcome.kind is not OutcomeKind.SCORE:
        logger.debug("math-verify did not decide about %r and %r: %s", answer[:100], reference[:100], outcome.message)
    return outcome.score == 1.0


def verify(answer: str, reference: str) -> float:
    """In the helper process: 1.0 or 0.0."""
    from math_verify import parse
    from math_verify import verify as same

    limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no time limit; it has one, outside
    gold = parse(reference, parsing_timeout=None)
    return float(same(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


# the first call imports sympy, which takes longer than a comparison may
HELPER = Helper(verify, LIMIT_S, warm_up={"answer": "1", "reference": "1"})

"""The choice of a scorer for a reward function: threads, worker processes or an event loop."""

from __future__ import annotations

from verl.rewards.function import ScoreFunction
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.rate import RateLimiter
from verl.rewards.scoring import Scorer, ThreadScorer


def make_scorer(function: ScoreFunction, options: ScoringOptions, limiter: RateLimiter | None = None) -> Scorer:
    """The scorer that fits the function and the number of worker processes.

    Raises:
        ConfigError: processes are asked for, but the function cannot be sent to one.
    """
    if function.is_async:
        from verl.rewards.async_scorer import AsyncScorer

        return AsyncScorer(function, options, limiter)
    if options.num_workers > 1:
        from verl.rewards.process_scorer import ProcessScorer

        return ProcessScorer(function, options, limiter)
    return ThreadScorer(function, options, limiter)

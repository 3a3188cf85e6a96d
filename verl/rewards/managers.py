"""The built-in reward managers: naive, prime, batch, dapo, streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.rewards.default import default_compute_score
from verl.rewards.function import BATCH_ARGUMENTS, BATCH_OPTIONAL, ScoreFunction
from verl.rewards.make_scorer import make_scorer
from verl.rewards.manager import RewardManager, register
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.outcome import OutcomeKind, RewardOutcome, as_outcome
from verl.rewards.samples import Sample
from verl.rewards.scoring import Scorer
from verl.rewards.streaming import StreamScorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@register("naive")
class NaiveRewardManager(RewardManager):
    """Calls the reward function once per sample, after the whole batch is there."""

    _scorer: Scorer | None = None
    _stream: StreamScorer | None = None

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        if self._scorer is None:
            self._scorer = make_scorer(self.compute_score, self.scoring)
        outcomes = self._scorer.score([self.call_of(sample) for sample in samples])
        return [self.shaped(outcome, sample) for outcome, sample in zip(outcomes, samples, strict=True)]

    def submit(self, sample: Sample) -> Future[RewardOutcome]:
        """Start scoring one sample and return at once; callable from any thread.

        The outcome, or the future itself, goes into the batch's column ``score_outcome``, where the call for the whole
        batch finds it and applies the consequences of missing scores.
        """
        if self._stream is None:
            self._stream = StreamScorer(self.compute_score, self.scoring)
        future: Future[RewardOutcome] = Future()
        source = self._stream.submit(self.call_of(sample))

        def pass_on(done: Future[RewardOutcome]) -> None:
            if done.cancelled():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                future.set_result(self.shaped(done.result(), sample))

        source.add_done_callback(pass_on)
        return future

    async def score(self, sample: Sample) -> RewardOutcome:
        """:meth:`submit` for event loops."""
        return await asyncio.wrap_future(self.submit(sample))

    def shaped(self, outcome: RewardOutcome, sample: Sample) -> RewardOutcome:
        """The outcome as it counts; subclasses add what depends on more than the text."""
        return outcome

    def close(self) -> None:
        for owner in (self._scorer, self._stream):
            if owner is not None:
                owner.close()
        self._scorer = self._stream = None


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive manager with several processes even where ``reward.num_workers`` is 1: at least two."""

    def __init__(self, *args: Any, scoring: ScoringOptions | None = None, **kwargs: Any) -> None:
        given = scoring or ScoringOptions()
        options = {**vars(given), "num_workers": max(2, given.num_workers)}
        super().__init__(*args, scoring=ScoringOptions(**options), **kwargs)


@register("batch")
class BatchRewardManager(RewardManager):
    """Calls the reward function once for the whole batch.

    The function is called with the lists ``data_sources``, ``solution_strs``, ``ground_truths`` and ``extra_infos``
    (and ``prompt_strs``, ``full_solution_strs`` if its signature names them) and returns a list with one result per
    sample. It may take ``timeout_s`` times the number of samples; if it raises or runs out of time, every sample fails.
    """

    arguments = BATCH_ARGUMENTS
    optional = BATCH_OPTIONAL

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        scoring: ScoringOptions | None = None,
    ) -> None:
        plain = getattr(compute_score, "function", compute_score)
        if plain in (None, default_compute_score):
            raise ConfigError(
                "reward manager 'batch' needs a function that scores a whole batch; set custom_reward_function.path, "
                "or use reward_manager=naive with the built-in rules"
            )
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, scoring=scoring)

    def call_of_all(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """The keywords that the function is called with."""
        columns: dict[str, Callable[[Sample], Any]] = {
            "data_sources": lambda sample: sample.data_source,
            "solution_strs": lambda sample: sample.response,
            "ground_truths": lambda sample: sample.ground_truth,
            "extra_infos": lambda sample: sample.extra_info,
            "prompt_strs": lambda sample: sample.prompt,
            "full_solution_strs": lambda sample: sample.full_response,
        }
        return {name: list(map(columns[name], samples)) for name in (*BATCH_ARGUMENTS, *self._asked)}

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        limit = self.scoring.timeout_s
        options = {**vars(self.scoring), "timeout_s": None if limit is None else limit * len(samples), "num_workers": 1}
        wrapper = _AsyncAsOneValue if self.compute_score.is_async else _AsOneValue
        scorer = make_scorer(ScoreFunction(wrapper(self.compute_score)), ScoringOptions(**options))
        try:
            (whole,) = scorer.score([self.call_of_all(samples)])
        finally:
            scorer.close()
        if whole.kind is not OutcomeKind.SCORE:
            return [whole] * len(samples)
        results = whole.extra["results"]
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(samples):
            size = len(results) if hasattr(results, "__len__") else "no"
            return [
                RewardOutcome.error(f"the reward function returned {size} results for {len(samples)} samples")
            ] * len(samples)
        return [as_outcome(result) for result in results]


class _AsOneValue:
    """Wraps a batch function's list, so that the scorer sees one result."""

    def __init__(self, function: ScoreFunction) -> None:
        self.function = function

    def __call__(self, **arguments: Any) -> RewardOutcome:
        return _one_value(self.function(**arguments))


class _AsyncAsOneValue(_AsOneValue):
    """The same for an ``async`` function."""

    async def __call__(self, **arguments: Any) -> RewardOutcome:  # type: ignore[override]
        return _one_value(await self.function(**arguments))


def _one_value(results: Any) -> RewardOutcome:
    return RewardOutcome.scored(0.0, {"results": results.tolist() if hasattr(results, "tolist") else results})


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft punishment of long responses (Yu et al. 2025, arXiv:2503.14476, equation 13).

    A response of n tokens loses ``factor * clip((n - (max_length - buffer)) / buffer, 0, 1)``: nothing up to
    ``max_length - buffer`` tokens, the full factor from ``max_length`` on.

    Attributes:
        max_length: the longest response, in tokens.
        buffer: the last tokens of it, over which the punishment grows.
        factor: the largest punishment.
        log: report it per sample.
    """

    max_length: int
    buffer: int
    factor: float = 1.0
    log: bool = False

    @classmethod
    def from_config(cls, max_resp_len: int | None, section: Mapping[str, Any] | None) -> OverlongPenalty | None:
        """Read ``max_resp_len`` and ``overlong_buffer_cfg``; ``None`` when it is not enabled.

        Raises:
            ConfigError: an unknown key, or a buffer that does not fit.
        """
        given = dict(section or {})
        unknown = set(given) - {"enable", "len", "penalty_factor", "log"}
        if unknown:
            raise ConfigError(
                f"overlong_buffer_cfg has the unknown key {sorted(unknown)[0]!r}; "
                "it takes enable, len, penalty_factor, log"
            )
        if not given.get("enable", False):
            return None
        buffer = int(given.get("len", 0))
        if max_resp_len is None or not 0 < buffer <= max_resp_len:
            raise ConfigError(
                f"overlong_buffer_cfg.len={buffer} with max_resp_len={max_resp_len}: the buffer needs "
                "0 < len <= max_resp_len; set reward.reward_kwargs.max_resp_len to data.max_response_length"
            )
        return cls(max_resp_len, buffer, float(given.get("penalty_factor", 1.0)), bool(given.get("log", False)))

    def __call__(self, length: int) -> float:
        """What a response of ``length`` tokens is punished with, 0 or negative."""
        over = length - (self.max_length - self.buffer)
        return -self.factor * min(max(over / self.buffer, 0.0), 1.0)


class _Overlong(NaiveRewardManager):
    """A manager that may punish long responses.

    Args:
        max_resp_len: the longest response, in tokens.
        overlong_buffer_cfg: ``enable``, ``len`` (tokens), ``penalty_factor``, ``log``; not given = no punishment.
    """

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.overlong = OverlongPenalty.from_config(max_resp_len, overlong_buffer_cfg)

    def shaped(self, outcome: RewardOutcome, sample: Sample) -> RewardOutcome:
        if outcome.score is None or self.overlong is None:
            return outcome
        penalty = self.overlong(sample.length)
        extra = {"acc": outcome.score, **outcome.extra}
        if self.overlong.log:
            extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return RewardOutcome.scored(outcome.score + penalty, extra)


@register("dapo")
class DAPORewardManager(_Overlong):
    """The naive manager with :class:`OverlongPenalty`.

    ``reward_extra_info`` has the function's own score as ``acc``, unless the function reports an ``acc`` itself, and
    ``overlong_reward`` and ``overlong`` if ``log`` is set.
    """

    def shaped(self, outcome: RewardOutcome, sample: Sample) -> RewardOutcome:
        shaped = super().shaped(outcome, sample)
        if outcome.score is None or "acc" in shaped.extra:
            return shaped
        return RewardOutcome.scored(outcome.score, {"acc": outcome.score, **outcome.extra})


@register("streaming")
class StreamingRewardManager(_Overlong):
    """Scores every sample as soon as it is there, several at once.

    An agent loop hands finished responses to :meth:`submit` (or awaits :meth:`score`) while others are still being
    generated. A batch that comes as a whole is scored on the same lanes: ``reward.max_concurrent`` at a time, or in
    ``reward.num_workers`` processes. Takes the same arguments for long responses as ``dapo``.
    """

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        return [future.result() for future in [self.submit(sample) for sample in samples]]

"""Reward managers: from a batch of responses to token-level scores."""

from __future__ import annotations

import logging
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from verl.errors import ConfigError, RewardError
from verl.rewards.default import default_compute_score
from verl.rewards.function import ARGUMENTS, BATCH_ARGUMENTS, ScoreFunction
from verl.rewards.outcome import OutcomeKind, RewardOutcome, as_outcome
from verl.rewards.samples import Sample, decode_samples, last_scored_position
from verl.rewards.scoring import Scorer, make_scorer
from verl.utils.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class RewardFunction(Protocol):
    """What the trainer calls to score a batch; every reward manager is one."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Token-level scores (B,R), or with ``return_dict`` a dictionary, see :class:`RewardManager`."""


REWARD_MANAGERS: Registry[type] = Registry("reward manager")
register = REWARD_MANAGERS.register


def get_reward_manager_cls(name: str) -> type:
    """The reward manager registered under a name; an unknown name raises :class:`ConfigError`."""
    return REWARD_MANAGERS[name]


@dataclass(frozen=True)
class ScoringOptions:
    """How samples are scored and what a missing score means.

    Attributes:
        timeout_s: seconds that one sample may take; ``None`` for no limit.
        num_workers: processes that score; 1 scores in this process.
        on_error: ``"fail"`` raises, ``"score"`` gives ``error_score``, ``"abstain"`` takes the sample out of the loss.
        on_timeout: the same, for time-outs.
        error_score: the score of ``"score"``.
        max_failed_fraction: more errors and time-outs than this part of a batch raise, whatever the policy.
    """

    timeout_s: float | None = None
    num_workers: int = 1
    on_error: str = "fail"
    on_timeout: str = "fail"
    error_score: float = 0.0
    max_failed_fraction: float = 0.5

    def action(self, kind: OutcomeKind) -> str:
        """What happens to a sample whose scoring ended so: ``fail``, ``score`` or ``abstain``."""
        return {
            OutcomeKind.SCORE: "score",
            OutcomeKind.ABSTAIN: "abstain",
            OutcomeKind.ERROR: self.on_error,
            OutcomeKind.TIMEOUT: self.on_timeout,
        }[kind]


class RewardManager(ABC):
    """Scores a batch of responses.

    Args:
        tokenizer: decodes responses.
        num_examine: samples per data source whose text and score are logged in each call.
        compute_score: the reward function; default: the built-in rules by data source.
        reward_fn_key: per-sample field that names the data source.
        scoring: time limit, processes and policies.

    A score is placed on the last token that the policy sampled (see :func:`last_scored_position`). A response without
    any such token is scored too and appears in ``reward_extra_info``, but its row stays 0: there is no token for a
    reward, and no loss sees the sample.

    A batch that already has ``rm_scores``, from a reward model or an agent loop, is returned as it is: rules add
    nothing to it.
    """

    arguments: tuple[str, ...] = ARGUMENTS

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        scoring: ScoringOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self.scoring = scoring or ScoringOptions()
        chosen = compute_score or default_compute_score
        self.compute_score = chosen if isinstance(chosen, ScoreFunction) else ScoreFunction(chosen)
        self.compute_score.check_signature(self.arguments)

    @abstractmethod
    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """One outcome per sample."""

    def close(self) -> None:
        """Give back processes; a manager without any has nothing to do."""
        return

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Score a batch.

        Returns:
            The token-level scores (B,R) float32; with ``return_dict`` a dictionary with

            * ``reward_tensor``: those scores;
            * ``reward_extra_info``: lists of length B, ``score`` and what the function reported; where a sample did not
              report a key, NaN among numbers and ``None`` otherwise;
            * ``sample_mask``: (B,) bool, False where there is no score: no loss and no statistic may count the sample;
            * ``reward_metrics``: numbers to log.

        Raises:
            RewardError: a failure under the policy ``fail``, too many failures, or no sample scored.
        """
        if "rm_scores" in data.batch:
            return self._ready_made(data, return_dict)
        samples = decode_samples(data, self.tokenizer, self.reward_fn_key)
        outcomes = self.outcomes(samples)
        self._apply_policy(samples, outcomes)
        position = last_scored_position(data)
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        scores = [self._score(outcome) for outcome in outcomes]
        for row, score in enumerate(scores):
            column = int(position[row])
            if score is not None and column >= 0:
                rewards[row, column] = score
        self._log_examples(samples, scores)
        rewards = rewards.to(data.batch["responses"].device)
        if not return_dict:
            return rewards
        return {
            "reward_tensor": rewards,
            "reward_extra_info": self._extra_info(outcomes, scores),
            "sample_mask": torch.tensor([score is not None for score in scores], dtype=torch.bool),
            "reward_metrics": self._metrics(outcomes, position),
        }

    def _ready_made(self, data: DataProto, return_dict: bool) -> torch.Tensor | dict[str, Any]:
        scores = data.batch["rm_scores"]
        if not return_dict:
            return scores
        keys = data.meta_info.get("reward_extra_keys", [])
        return {
            "reward_tensor": scores,
            "reward_extra_info": {key: list(data.non_tensor_batch[key]) for key in keys},
            "sample_mask": torch.ones(scores.shape[0], dtype=torch.bool),
            "reward_metrics": {},
        }

    def _apply_policy(self, samples: Sequence[Sample], outcomes: Sequence[RewardOutcome]) -> None:
        failed = [i for i, o in enumerate(outcomes) if o.kind in (OutcomeKind.ERROR, OutcomeKind.TIMEOUT)]
        if not failed:
            return
        first = failed[0]
        about = (
            f"{len(failed)} of {len(outcomes)} samples; the first is sample {first} with data_source="
            f"{samples[first].data_source!r} and response {_shorten(samples[first].response)}:\n"
            f"{outcomes[first].message}"
        )
        fatal = next((o for o in outcomes if o.fatal), None)
        if fatal is not None:
            raise RewardError(f"the reward function {self.compute_score!r} cannot be used: {fatal.message}")
        if len(failed) == len(outcomes):
            raise RewardError(f"the reward function {self.compute_score!r} failed on every sample: {about}")
        fraction = len(failed) / len(outcomes)
        if fraction > self.scoring.max_failed_fraction:
            raise RewardError(
                f"the reward function {self.compute_score!r} failed on {fraction:.0%} of the batch, more than "
                f"{self.scoring.max_failed_fraction:.0%}: {about}"
            )
        stopping = [i for i in failed if self.scoring.action(outcomes[i].kind) == "fail"]
        if stopping:
            kind = "on_timeout" if outcomes[stopping[0]].kind is OutcomeKind.TIMEOUT else "on_error"
            raise RewardError(
                f"the reward function {self.compute_score!r} failed on {about}\n"
                f"Set reward.{kind}=score (with reward.error_score) or reward.{kind}=abstain to go on in such cases."
            )
        logger.warning("the reward function failed on %s", about)

    def _score(self, outcome: RewardOutcome) -> float | None:
        if outcome.score is not None:
            return outcome.score
        return self.scoring.error_score if self.scoring.action(outcome.kind) == "score" else None

    def _extra_info(self, outcomes: Sequence[RewardOutcome], scores: Sequence[float | None]) -> dict[str, list[Any]]:
        info: dict[str, list[Any]] = {"score": [math.nan if score is None else score for score in scores]}
        for key in dict.fromkeys(key for outcome in outcomes for key in outcome.extra):
            values = [outcome.extra[key] for outcome in outcomes if key in outcome.extra]
            missing = math.nan if all(isinstance(value, numbers.Real) for value in values) else None
            info[key] = [outcome.extra.get(key, missing) for outcome in outcomes]
        return info

    def _metrics(self, outcomes: Sequence[RewardOutcome], position: torch.Tensor) -> dict[str, float]:
        counts = {kind: sum(o.kind is kind for o in outcomes) for kind in OutcomeKind}
        return {
            "reward/errors": float(counts[OutcomeKind.ERROR]),
            "reward/timeouts": float(counts[OutcomeKind.TIMEOUT]),
            "reward/abstained": float(sum(self._score(o) is None for o in outcomes)),
            "reward/empty_responses": float((position < 0).sum()),
        }

    def _log_examples(self, samples: Sequence[Sample], scores: Sequence[float | None]) -> None:
        seen: dict[str, int] = {}
        for sample, score in zip(samples, scores, strict=True):
            if seen.get(sample.data_source, 0) >= self.num_examine:
                continue
            seen[sample.data_source] = seen.get(sample.data_source, 0) + 1
            logger.info(
                "[%s] prompt: %r | response: %r | ground truth: %r | score: %s",
                sample.data_source,
                sample.prompt,
                sample.response,
                sample.ground_truth,
                score,
            )


@register("naive")
class NaiveRewardManager(RewardManager):
    """Calls the reward function once per sample."""

    _scorer: Scorer | None = None

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        if self._scorer is None:
            workers = self.scoring.num_workers
            self._scorer = make_scorer(
                self.compute_score,
                timeout_s=self.scoring.timeout_s,
                num_workers=workers if workers > 1 else 0,
            )
        return self._scorer.score([dict(zip(ARGUMENTS, _arguments(sample), strict=True)) for sample in samples])

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None


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

    The function is called with the lists ``data_sources``, ``solution_strs``, ``ground_truths`` and ``extra_infos`` and
    returns a list with one result per sample. It may take ``timeout_s`` times the number of samples; if it raises or
    runs out of time, every sample fails.
    """

    arguments = BATCH_ARGUMENTS

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        scoring: ScoringOptions | None = None,
    ) -> None:
        if compute_score in (None, default_compute_score):
            raise ConfigError(
                "reward manager 'batch' needs a function that scores a whole batch; set custom_reward_function.path, "
                "or use reward_manager=naive with the built-in rules"
            )
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, scoring=scoring)

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        limit = self.scoring.timeout_s
        columns = zip(*(_arguments(sample) for sample in samples), strict=True)
        call = {name: list(column) for name, column in zip(BATCH_ARGUMENTS, columns, strict=True)}
        scorer = make_scorer(
            ScoreFunction(_AsOneValue(self.compute_score)),
            timeout_s=None if limit is None else limit * len(samples),
            num_workers=0,
        )
        (whole,) = scorer.score([call])
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
        results = self.function(**arguments)
        return RewardOutcome.scored(0.0, {"results": results.tolist() if hasattr(results, "tolist") else results})


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """The naive manager with DAPO's soft punishment of long responses (Yu et al. 2025, arXiv:2503.14476, equation 13).

    A response of n tokens loses ``penalty_factor * clip((n - (max_resp_len - len)) / len, 0, 1)``: nothing up to
    ``max_resp_len - len`` tokens, the full factor from ``max_resp_len`` on. ``reward_extra_info`` has the function's
    own score as ``acc``, and ``overlong_reward`` and ``overlong`` if ``log`` is set.

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
        buffer = dict(overlong_buffer_cfg or {})
        unknown = set(buffer) - {"enable", "len", "penalty_factor", "log"}
        if unknown:
            raise ConfigError(
                f"overlong_buffer_cfg has the unknown key {sorted(unknown)[0]!r}; "
                "it takes enable, len, penalty_factor, log"
            )
        self.enabled = bool(buffer.get("enable", False))
        self.log = bool(buffer.get("log", False))
        self.penalty_factor = float(buffer.get("penalty_factor", 1.0))
        self.max_resp_len = max_resp_len
        self.buffer_len = int(buffer.get("len", 0))
        if self.enabled and (max_resp_len is None or not 0 < self.buffer_len <= max_resp_len):
            raise ConfigError(
                f"overlong_buffer_cfg.len={self.buffer_len} with max_resp_len={max_resp_len}: the buffer needs "
                "0 < len <= max_resp_len; set reward.reward_kwargs.max_resp_len to data.max_response_length"
            )

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        return [
            self._shaped(outcome, sample.length)
            for outcome, sample in zip(super().outcomes(samples), samples, strict=True)
        ]

    def _shaped(self, outcome: RewardOutcome, length: int) -> RewardOutcome:
        if outcome.score is None:
            return outcome
        extra = {"acc": outcome.score, **outcome.extra}
        penalty = self.penalty(length)
        if self.enabled and self.log:
            extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return RewardOutcome.scored(outcome.score + penalty, extra)

    def penalty(self, length: int) -> float:
        """What a response of ``length`` tokens is punished with, 0 or negative."""
        if not self.enabled or self.max_resp_len is None:
            return 0.0
        over = length - (self.max_resp_len - self.buffer_len)
        return -self.penalty_factor * min(max(over / self.buffer_len, 0.0), 1.0)


def _arguments(sample: Sample) -> tuple[Any, ...]:
    return sample.data_source, sample.response, sample.ground_truth, sample.extra_info


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")

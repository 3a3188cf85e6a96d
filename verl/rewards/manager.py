"""The frame of every reward manager: from a batch of responses to token-level scores."""

from __future__ import annotations

import logging
import math
import numbers
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import torch

from verl.errors import RewardError
from verl.rewards.default import default_compute_score
from verl.rewards.function import ARGUMENTS, OPTIONAL, ScoreFunction
from verl.rewards.missing_scores import Action, ScoringOptions, resolve
from verl.rewards.outcome import OutcomeKind, RewardOutcome, as_outcome
from verl.rewards.samples import Sample, decode_samples, last_scored_position
from verl.schema import SCORE_OUTCOME
from verl.utils.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import DataProto

logger = logging.getLogger(__name__)

OUTCOME_FIELD = SCORE_OUTCOME
"""Column of outcomes (or futures of them) that were made while the batch was still being generated."""


#: argument of a reward function -> attribute of a sample
_TEXTS = {"prompt_str": "prompt", "full_solution_str": "full_response"}
_TEXTS |= {f"{name}s": attribute for name, attribute in _TEXTS.items()}


class RewardFunction(Protocol):
    """What the trainer calls to score a batch; every reward manager is one."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Token-level scores (B,R), or with ``return_dict`` a dictionary, see :class:`RewardManager`."""


REWARD_MANAGERS: Registry[type] = Registry("reward manager")
register = REWARD_MANAGERS.register


def get_reward_manager_cls(name: str) -> type:
    """The reward manager registered under a name; an unknown name raises :class:`ConfigError`."""
    return REWARD_MANAGERS[name]


class RewardManager(ABC):
    """Scores a batch of responses.

    Args:
        tokenizer: decodes responses.
        num_examine: samples per data source whose text and score are logged in each call.
        compute_score: the reward function; default: the built-in rules by data source.
        reward_fn_key: per-sample field that names the data source.
        scoring: time limit, processes and consequences of missing scores.

    The function sees only what the policy wrote; one whose signature names ``full_solution_str`` is also given the text
    with the words of tools and environments in it, and one that names ``prompt_str`` the prompt.

    A score is placed on the last token that the policy sampled (see :func:`last_scored_position`). A response without
    any such token is scored too and appears in ``reward_extra_info``, but its row stays 0: there is no token for a
    reward, and no loss sees the sample.

    A batch that already has ``rm_scores``, from a reward model or an agent loop, is returned as it is: rules add
    nothing to it. Samples that have an outcome in the column ``score_outcome`` are not scored again.
    """

    arguments: tuple[str, ...] = ARGUMENTS
    optional: tuple[str, ...] = OPTIONAL

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
        self._asked = self.compute_score.named(self.optional)
        self.compute_score.check_signature((*self.arguments, *self._asked))

    def check_reference(
        self, data_source: Any, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> str | None:
        """What is wrong with the reference of a row, before anything is scored; None if nothing is.

        Functions of users that declare nothing (:func:`~verl.rewards.references.reads_reference`) take any reference.
        """
        return self.compute_score.reference_problem(data_source, ground_truth, extra_info)

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
            * ``reward_extra_info``: lists of length B, ``score`` and, in the order in which they first appear, whatever
              keys the function reported; where a sample did not report a key, NaN among numbers and ``None`` otherwise;
            * ``sample_mask``: (B,) bool, False for samples that do not count in any loss or statistic;
            * ``reward_metrics``: numbers to log.

        Raises:
            RewardError: a failure whose consequence is ``stop``, too many failures, or no sample scored.
        """
        return self.begin(data).result(return_dict)

    def begin(self, data: DataProto, *, background: bool = False) -> PendingRewards:
        """Start scoring a batch.

        Args:
            data: the batch; what is needed of it is read before this returns.
            background: score in another thread, while the caller does something else.
        """
        if "rm_scores" in data.batch:
            return PendingRewards(self, data, [], _finished([]))
        samples = decode_samples(data, self.tokenizer, self.reward_fn_key)
        given = data.non_tensor_batch.get(OUTCOME_FIELD)
        ready = [None] * len(samples) if given is None else list(given)
        if background:
            for row, sample in enumerate(samples):  # a tokenizer belongs to one thread
                if ready[row] is None:
                    self.read(sample)
            return PendingRewards(self, data, samples, _in_thread(lambda: self._complete(samples, ready)))
        return PendingRewards(self, data, samples, _finished(self._complete(samples, ready)))

    def _complete(self, samples: Sequence[Sample], ready: Sequence[Any]) -> list[RewardOutcome]:
        missing = [row for row, value in enumerate(ready) if value is None]
        made = iter(self.outcomes([samples[row] for row in missing]) if missing else [])
        values = [next(made) if value is None else value for value in ready]
        return [as_outcome(value.result() if isinstance(value, Future) else value) for value in values]

    def call_of(self, sample: Sample) -> dict[str, Any]:
        """The keywords that the function is called with."""
        values = (sample.data_source, sample.response, sample.ground_truth, sample.extra_info)
        call = dict(zip(ARGUMENTS, values, strict=True))
        return call | {name: getattr(sample, _TEXTS[name]) for name in self._asked}

    def read(self, sample: Sample) -> None:
        """Decode the texts of a sample that the function is given."""
        for name in ("response", *(_TEXTS[name] for name in self._asked)):
            getattr(sample, name)

    def _finish(
        self, data: DataProto, samples: Sequence[Sample], outcomes: Sequence[RewardOutcome], return_dict: bool
    ) -> torch.Tensor | dict[str, Any]:
        if "rm_scores" in data.batch:
            return self._ready_made(data, return_dict)
        self._stop_if_asked(samples, outcomes)
        uids = data.non_tensor_batch.get("uid")
        scores = resolve(outcomes, None if uids is None else list(uids), self.scoring)
        if all(score is None for score in scores):
            logger.warning("no sample of this batch has a score, so nothing is learnt from it")
        position = last_scored_position(data)
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
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
            "reward_metrics": self._metrics(outcomes, scores, position),
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

    def _stop_if_asked(self, samples: Sequence[Sample], outcomes: Sequence[RewardOutcome]) -> None:
        fatal = next((o for o in outcomes if o.fatal), None)
        if fatal is not None:
            raise RewardError(f"the reward function {self.compute_score!r} cannot be used: {fatal.message}")
        failed = [i for i, o in enumerate(outcomes) if o.kind in (OutcomeKind.ERROR, OutcomeKind.TIMEOUT)]
        stopping = [i for i, o in enumerate(outcomes) if self.scoring.action(o.kind) is Action.STOP]
        if failed and len(failed) == len(outcomes):
            about = _about(samples, outcomes, failed)
            raise RewardError(f"the reward function {self.compute_score!r} failed on every sample: {about}")
        fraction = len(failed) / max(len(outcomes), 1)
        if fraction > self.scoring.max_failed_fraction:
            raise RewardError(
                f"the reward function {self.compute_score!r} failed on {fraction:.0%} of the batch, more than "
                f"{self.scoring.max_failed_fraction:.0%}: {_about(samples, outcomes, failed)}"
            )
        if stopping:
            kind = outcomes[stopping[0]].kind
            key = self.scoring.key(kind)
            did = "abstained" if kind is OutcomeKind.ABSTAIN else "failed"
            raise RewardError(
                f"the reward function {self.compute_score!r} {did} on {_about(samples, outcomes, stopping)}\n"
                f"Set reward.{key}=penalise (with reward.error_score), reward.{key}=drop_sample or "
                f"reward.{key}=drop_group to go on in such cases."
            )
        if failed:
            logger.warning("the reward function failed on %s", _about(samples, outcomes, failed))

    def _extra_info(self, outcomes: Sequence[RewardOutcome], scores: Sequence[float | None]) -> dict[str, list[Any]]:
        info: dict[str, list[Any]] = {"score": [math.nan if score is None else score for score in scores]}
        for key in dict.fromkeys(key for outcome in outcomes for key in outcome.extra):
            values = [outcome.extra[key] for outcome in outcomes if key in outcome.extra]
            missing = math.nan if all(isinstance(value, numbers.Real) for value in values) else None
            info[key] = [outcome.extra.get(key, missing) for outcome in outcomes]
        return info

    def _metrics(
        self, outcomes: Sequence[RewardOutcome], scores: Sequence[float | None], position: torch.Tensor
    ) -> dict[str, float]:
        counts = {kind: sum(o.kind is kind for o in outcomes) for kind in OutcomeKind}
        return {
            "reward/errors": float(counts[OutcomeKind.ERROR]),
            "reward/timeouts": float(counts[OutcomeKind.TIMEOUT]),
            "reward/abstained": float(sum(score is None for score in scores)),
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


class PendingRewards:
    """A batch whose scoring has begun."""

    def __init__(
        self,
        manager: RewardManager,
        data: DataProto,
        samples: Sequence[Sample],
        outcomes: Future[list[RewardOutcome]],
    ) -> None:
        self._manager, self._data, self._samples, self._outcomes = manager, data, samples, outcomes

    def result(self, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Wait for all scores; returns and raises what :meth:`RewardManager.__call__` does."""
        return self._manager._finish(self._data, self._samples, self._outcomes.result(), return_dict)

    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._outcomes.done()


def _finished(outcomes: list[RewardOutcome]) -> Future[list[RewardOutcome]]:
    future: Future[list[RewardOutcome]] = Future()
    future.set_result(outcomes)
    return future


def _in_thread(work: Callable[[], list[RewardOutcome]]) -> Future[list[RewardOutcome]]:
    future: Future[list[RewardOutcome]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="verl-reward-batch", daemon=True).start()
    return future


def _about(samples: Sequence[Sample], outcomes: Sequence[RewardOutcome], rows: Sequence[int]) -> str:
    first = rows[0]
    return (
        f"{len(rows)} of {len(outcomes)} samples; the first is sample {first} with data_source="
        f"{samples[first].data_source!r} and response {_shorten(samples[first].response)}:\n{outcomes[first].message}"
    )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")

"""Tasks of the package ``reasoning-gym`` as environments (an optional extra)."""

from __future__ import annotations

from typing import Any

from verl.errors import ConfigError
from verl.interactions.base import seed_of_row
from verl.rewards.reasoning_gym import extract_answer, reasoning_gym_package, score_of


class ReasoningGymEnv:
    r"""A question that the task makes from the row's seed; the model may answer it several times.

    For :class:`~verl.interactions.gym_env.GymInteraction`, as ``env: verl.interactions.ReasoningGymEnv``. An answer is
    what ``<answer>`` tags or ``\boxed{}`` hold, without either the whole turn. The last answer is what the task's own
    score is given for, 0 to 1; a full score ends the episode.

    Args:
        task: name of the task, for example ``chain_sum``.
        attempts: most answers.
        retry: what the model is told after an answer without a full score.
        settings: of the task, for example ``min_terms``.

    Raises:
        ConfigError: the package is missing, or has no such task or setting.
    """

    def __init__(
        self, task: str, attempts: int = 1, retry: str = "That is not right. Try again.", **settings: Any
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"reasoning-gym task {task!r}: attempts={attempts}: must be at least 1")
        self._package = reasoning_gym_package()
        self.task = task
        self.attempts = attempts
        self.retry = retry
        self.settings = settings
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._left = 0

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The question of a seed.

        Raises:
            ConfigError: the task does not exist or refuses its settings.
            DataError: no seed.
        """
        self._dataset = self._make(seed_of_row(seed, f"reasoning-gym task {self.task!r}"))
        self._entry = self._dataset[0]
        self._left = self.attempts
        return str(self._entry["question"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge an answer."""
        self._left -= 1
        answer = extract_answer(action)
        score = score_of(self.task, action if answer is None else answer, self._entry, self.settings)
        right = score >= 1.0
        ends = right or not self._left
        return "" if ends else self.retry, score if ends else 0.0, right, ends and not right, {}

    def _make(self, seed: int) -> Any:
        try:
            return self._package.create_dataset(self.task, seed=seed, size=1, **self.settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym does not make the task {self.task!r} with {self.settings}: {error}"
            ) from error

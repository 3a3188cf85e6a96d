"""Signs that a run goes wrong, read from the metrics of its steps.

Each cause is reported once, with the step, the numbers and the key that is likely to help. A sign must hold for three
steps, so that one odd batch says nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

#: steps for which a sign must hold
PATIENCE = 3
#: mean KL divergence of the updates of one step, in nats per token: above it the policy is soon another one
LARGE_KL = 0.1
#: of its first value: entropy below it leaves nothing to explore
ENTROPY_FLOOR = 0.02
#: share of responses that the length limit cuts off
MANY_CUT_OFF = 0.5
#: times the first value: a training loss above it does not come from one batch
LOSS_FACTOR = 3.0

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """Something that goes wrong.

    Attributes:
        cause: one word for it.
        step: at which it was found.
        text: what was seen, and the likely key.
    """

    cause: str
    step: int
    text: str


class HealthMonitor:
    """Looks at the metrics of every step.

    Args:
        lr_key: dotted path of the learning rate.
    """

    def __init__(self, lr_key: str = "actor_rollout_ref.actor.optim.lr") -> None:
        self.lr_key = lr_key
        self.findings: list[Finding] = []
        self.steps = 0
        self.without_signal = 0  # steps from which nothing was learned
        self._recent: deque[dict[str, float]] = deque(maxlen=PATIENCE)
        self._first: dict[str, float] = {}  # means over the first steps
        self._signs: dict[str, int] = Counter()
        self._best_reward = -math.inf
        self._lowest_reward = math.inf
        self._told: set[str] = set()
        self._values: dict[str, list[float]] = defaultdict(list)

    def look(self, metrics: Mapping[str, object], step: int) -> list[Finding]:
        """Look at the metrics of a training step; logs and returns what is found for the first time."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        if not any(name in numbers for name in ("actor/grad_norm", "train/grad_norm")):
            return []  # a validation, or a step that trains the critic alone
        self.steps += 1
        self._recent.append(numbers)
        self.without_signal += self._learns_nothing(numbers)
        found = []
        for cause, check in self._checks().items():
            text = check(numbers)
            self._signs[cause] = self._signs[cause] + 1 if text else 0
            if text and self._signs[cause] >= PATIENCE and cause not in self._told:
                self._told.add(cause)
                found.append(Finding(cause, step, text))
        self._remember(numbers)
        for finding in found:
            logger.warning("step %d: %s", finding.step, finding.text)
        self.findings += found
        return found

    def _checks(self) -> dict[str, Callable[[Metrics], str | None]]:
        return {
            "no_signal": self._no_signal,
            "skipped": self._skipped,
            "large_steps": self._large_steps,
            "reward_collapse": self._reward_collapse,
            "entropy_collapse": self._entropy_collapse,
            "entropy_explosion": self._entropy_explosion,
            "length": self._length,
            "loss": self._loss,
        }

    def _remember(self, numbers: Metrics) -> None:
        for name in ("actor/entropy", "response_length/mean", "response_length/clip_ratio", "train/loss"):
            values = self._values[name]
            if name in numbers and math.isfinite(numbers[name]) and len(values) < PATIENCE:
                values.append(numbers[name])
                self._first[name] = sum(values) / len(values)
        if math.isfinite(reward := numbers.get("critic/rewards/mean", math.nan)):
            self._best_reward = max(self._best_reward, reward)
            self._lowest_reward = min(self._lowest_reward, numbers.get("critic/rewards/min", reward))

    # ---- signs --------------------------------------------------------------------------------------------------

    @staticmethod
    def _learns_nothing(numbers: Metrics) -> bool:
        gradient = numbers.get("actor/grad_norm", numbers.get("train/grad_norm", math.nan))
        if numbers.get("actor/lr", numbers.get("train/lr", 1.0)) == 0.0:
            return False  # the schedule says so
        return gradient == 0.0 or _skipped_all(numbers)

    def _lr(self, numbers: Metrics) -> str:
        rate = numbers.get("actor/lr", numbers.get("train/lr"))
        return self.lr_key if rate is None else f"{self.lr_key} (now {rate:.2g})"

    def _no_signal(self, numbers: Metrics) -> str | None:
        if not self._learns_nothing(numbers) or _skipped_all(numbers):
            return None
        begin = f"no learning signal for {PATIENCE} steps: the gradient is 0.000"
        high, low = numbers.get("critic/rewards/max"), numbers.get("critic/rewards/min")
        if high is None or low is None:
            return f"{begin}; is the loss mask of the data empty, or is everything frozen?"
        if high != low:
            return (
                f"{begin}, because all samples of each prompt have the same score (rewards {low:.3g} to {high:.3g}); "
                "more samples (actor_rollout_ref.rollout.n), a higher rollout.temperature or prompts of other "
                "difficulty differ, and algorithm.filter_groups.enable=True draws on until some do"
            )
        if self._best_reward > high:
            return (
                f"{begin} and every reward is {high:.3g}, while the mean was {self._best_reward:.3g} before: the "
                f"policy has collapsed; lower {self._lr(numbers)} and go back to an earlier checkpoint"
            )
        return (
            f"{begin} and every reward is {high:.3g}: look at samples (trainer.rollout_data_dir); the reward function "
            "may not read the answers (reward.custom_reward_function.path, data.reward_fn_key), the prompts may be "
            "too hard or too easy, or responses too short (data.max_response_length)"
        )

    def _skipped(self, numbers: Metrics) -> str | None:
        roles = [name.partition("/")[0] for name in numbers if _is_skipped(name) and numbers[name] > 0]
        if not roles:
            return None
        return (
            f"updates of {', '.join(sorted(roles))} were left out in {PATIENCE} steps in a row, because the loss or "
            f"the gradient is not finite; lower {self._lr(numbers)}, or look for NaN in rewards and log-probabilities "
            "(trainer.on_nonfinite=stop ends the run at the first one)"
        )

    def _large_steps(self, numbers: Metrics) -> str | None:
        if not numbers.get("actor/ppo_kl", 0.0) > LARGE_KL:
            return None
        seen = ", ".join(f"{recent.get('actor/ppo_kl', math.nan):.2g}" for recent in self._recent)
        return (
            f"the updates of each step move the policy too far: actor/ppo_kl {seen} is above {LARGE_KL:g} nats per "
            f"token for {PATIENCE} steps; lower {self._lr(numbers)}, or take fewer updates a step "
            "(actor.ppo_epochs, a larger actor.ppo_mini_batch_size)"
        )

    def _reward_collapse(self, numbers: Metrics) -> str | None:
        reward = numbers.get("critic/rewards/mean", math.nan)
        lost, scale = self._best_reward - reward, self._best_reward - self._lowest_reward
        if not (math.isfinite(lost) and scale > 0 and lost > 0.5 * scale):
            return None
        return (
            f"the mean reward has fallen from {self._best_reward:.3g} to {reward:.3g} and stays there for {PATIENCE} "
            f"steps; lower {self._lr(numbers)}"
        )

    def _entropy_collapse(self, numbers: Metrics) -> str | None:
        entropy, first = numbers.get("actor/entropy", math.nan), self._first.get("actor/entropy", 0.0)
        if not (first > 0 and entropy < ENTROPY_FLOOR * first):
            return None
        return (
            f"the entropy of the policy is {entropy:.2g}, {entropy / first:.1%} of {first:.2g} at the start: "
            "samples of a prompt are all the same; raise actor_rollout_ref.actor.entropy_coeff or clip_ratio_high, or "
            f"lower {self._lr(numbers)}"
        )

    def _entropy_explosion(self, numbers: Metrics) -> str | None:
        entropy, first = numbers.get("actor/entropy", math.nan), self._first.get("actor/entropy", math.inf)
        if not (entropy > 2.5 * first and entropy > first + 0.5):
            return None
        return (
            f"the entropy of the policy has grown from {first:.2g} to {entropy:.2g} nats: its text becomes random; "
            f"lower {self._lr(numbers)} or actor_rollout_ref.actor.entropy_coeff"
        )

    def _length(self, numbers: Metrics) -> str | None:
        cut, first_cut = numbers.get("response_length/clip_ratio", 0.0), self._first.get("response_length/clip_ratio")
        mean, first = numbers.get("response_length/mean", math.nan), self._first.get("response_length/mean", math.nan)
        if first_cut is None:
            return None
        if cut > MANY_CUT_OFF and cut > first_cut + 0.3:
            return (
                f"responses run into the length limit: {cut:.0%} are cut off, {first_cut:.0%} were at the start (mean "
                f"length {first:.0f} -> {mean:.0f} tokens); raise data.max_response_length, penalise length "
                f"(reward_kwargs.overlong_buffer_cfg), or lower {self._lr(numbers)}"
            )
        if first >= 8 and mean < 0.25 * first:
            return (
                f"responses have shrunk from {first:.0f} to {mean:.1f} tokens on average; does the reward function pay "
                "for empty answers (reward.custom_reward_function.path)?"
            )
        return None

    def _loss(self, numbers: Metrics) -> str | None:
        loss, first = numbers.get("train/loss", math.nan), self._first.get("train/loss", math.nan)
        if not (first > 0 and loss > LOSS_FACTOR * first):
            return None
        return f"the training loss has grown from {first:.3g} to {loss:.3g}; lower {self._lr(numbers)}"

    # ---- the end ------------------------------------------------------------------------------------------------

    def summary(self) -> Iterator[str]:
        """Lines for the end of the run: what was found, and how many steps taught nothing."""
        if self.without_signal:
            yield f"{self.without_signal} of {self.steps} steps had no learning signal (gradient 0.000, or no update)"
        for finding in self.findings:
            yield f"warning of step {finding.step}: {finding.text}"


def _is_skipped(name: str) -> bool:
    return name.endswith("/skipped_steps")


def _skipped_all(numbers: Metrics) -> bool:
    """Whether every update of the policy in a step was left out: then the gradient is no number."""
    gradient = numbers.get("actor/grad_norm", numbers.get("train/grad_norm", 0.0))
    return not math.isfinite(gradient)

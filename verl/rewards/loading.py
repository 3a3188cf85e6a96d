"""Build the reward manager that a configuration asks for; everything that can be wrong is found here, at start-up."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.rewards import managers as _managers  # noqa: F401  registers the built-in ones
from verl.rewards.default import default_compute_score
from verl.rewards.function import ScoreFunction
from verl.rewards.manager import REWARD_MANAGERS, RewardManager
from verl.rewards.missing_scores import ScoringOptions
from verl.rewards.sandbox.local import LocalSandbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import PPOConfig
    from verl.config.reward import ScoringConfig


def load_reward_function(config: ScoringConfig) -> ScoreFunction | None:
    """The function of ``custom_reward_function.{path,name,reward_kwargs}``, or ``None`` if no path is given.

    Raises:
        ConfigError: the file or the function does not exist.
    """
    custom = config.custom_reward_function
    if not custom.path:
        return None
    return ScoreFunction.from_file(custom.path, custom.name, custom.reward_kwargs)


def configured_function(config: ScoringConfig) -> ScoreFunction:
    """The user's function, or the built-in one that chooses by data source."""
    return load_reward_function(config) or ScoreFunction(
        default_compute_score, {"sandbox": dataclasses.asdict(config.sandbox)}
    )


def load_reward_manager(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int = 0, **reward_kwargs: Any
) -> Any:
    """The reward manager of ``reward.reward_manager.name`` with the configured reward function.

    Args:
        config: the whole configuration; reads ``reward`` and ``data.reward_fn_key``.
        tokenizer: decodes responses.
        num_examine: samples per data source to log in each call.
        reward_kwargs: further constructor arguments, over those of ``reward.reward_kwargs``.

    Returns:
        A callable ``(data, return_dict=False)``, see :class:`verl.rewards.manager.RewardManager`.

    Raises:
        ConfigError: unknown manager, missing file or function, a signature that does not fit, or an argument that the
            manager does not take.
    """
    reward = config.reward
    cls = REWARD_MANAGERS[reward.reward_manager.name]
    kwargs: dict[str, Any] = {**reward.reward_kwargs, **reward_kwargs}
    if isinstance(cls, type) and issubclass(cls, RewardManager):
        kwargs["scoring"] = scoring_options(reward)
    function = configured_function(reward)
    if not reward.custom_reward_function.path and reward.sandbox.isolation != "auto" and not reward.sandbox.url:
        LocalSandbox(isolation=reward.sandbox.isolation).close()  # what the kernel refuses is said now
    arguments = {
        "tokenizer": tokenizer,
        "num_examine": num_examine,
        "compute_score": function,
        "reward_fn_key": config.data.reward_fn_key,
        **kwargs,
    }
    try:
        inspect.signature(cls).bind(**arguments)
        return cls(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward manager {reward.reward_manager.name!r} ({cls.__name__}) cannot be made with the arguments "
            f"{', '.join(arguments)}: {error}; check reward.reward_kwargs"
        ) from error


def scoring_options(reward: ScoringConfig) -> ScoringOptions:
    """Time limit, processes, retries and consequences from the ``reward`` section."""
    return ScoringOptions(
        timeout_s=reward.timeout_s,
        num_workers=reward.num_workers,
        max_concurrent=reward.max_concurrent,
        max_rpm=reward.max_rpm,
        max_retries=reward.max_retries,
        retry_wait_s=reward.retry_wait_s,
        on_error=reward.on_error,
        on_timeout=reward.on_timeout,
        on_abstain=reward.on_abstain,
        error_score=reward.error_score,
        max_failed_fraction=reward.max_failed_fraction,
    )

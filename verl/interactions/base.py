"""The base class of simulated users and environments, and those that a configuration names."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError, DataError
from verl.utils.dynamic_import import load_target, read_yaml

_KEY = "rollout.multi_turn.interaction_config_path"
_ENTRY = {"name", "class_name", "config"}
REWARDS = ("report", "step", "trajectory")


class BaseInteraction:
    """Answers turns in which the model calls no tool: a user, a game, a judge that asks again.

    One object serves all trajectories of a process; what belongs to one is kept under its ``instance_id``.

    Args:
        config: the entry's settings. ``timeout_s`` limits each call. ``reward`` says what rewards are for: ``report`` =
            the reward function sees them (default), ``step`` = each counts on the turn that earned it and the reward
            function is not asked, ``trajectory`` = their sum is the trajectory's score.
    """

    default_reward = "report"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name = str(self.config.get("name", type(self).__name__))
        self.reward = str(self.config.get("reward", self.default_reward))
        if self.reward not in REWARDS:
            raise ConfigError(f"interaction {self.name!r}: reward={self.reward!r}: use one of {', '.join(REWARDS)}")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a trajectory; ``kwargs`` are the row's ``interaction_kwargs``."""
        return instance_id or uuid.uuid4().hex

    async def opening(self, instance_id: str) -> str | None:
        """What the model is told before its first turn, after the prompt; None for nothing."""
        return None

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the model's turn, the last of ``messages``.

        Returns:
            Whether this ends the trajectory (the answer is then not shown), the answer, the turn's reward, and more:
            ``state`` names the state that the answer shows (GiGPO), else the answer itself does.
        """
        return True, "", 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory: forget what belongs to it."""
        return


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """The interactions of a YAML file, by name: a list ``interaction`` of ``name``, ``class_name`` and ``config``.

    Raises:
        ConfigError: the file or a class does not exist, or an entry is not of this form.
    """
    if path is None:
        return {}
    content = read_yaml(path, _KEY)
    entries = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{_KEY}={path}: expected a list under 'interaction', got {content!r}")
    found: dict[str, BaseInteraction] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or "class_name" not in entry or set(entry) - _ENTRY:
            raise ConfigError(f"{path}, interaction {number}: expected name, class_name and config, got {entry!r}")
        cls = load_target(str(entry["class_name"]))
        if not (isinstance(cls, type) and issubclass(cls, BaseInteraction)):
            raise ConfigError(
                f"{path}, interaction {number}: {entry['class_name']} is not derived from BaseInteraction"
            )
        name = str(entry.get("name", cls.__name__))
        if name in found:
            raise ConfigError(f"{path}: two interactions are called {name!r}")
        found[name] = cls({**(entry.get("config") or {}), "name": name})
    return found


def choose(interactions: Mapping[str, BaseInteraction], kwargs: Mapping[str, Any] | None) -> BaseInteraction | None:
    """The interaction that a row names in ``interaction_kwargs["name"]``; the only one for rows that name none.

    Raises:
        ConfigError: there is no such interaction, or a row has to name one of several.
    """
    name = (kwargs or {}).get("name")
    if name is None:
        if len(interactions) > 1:
            raise ConfigError(
                f"interaction_kwargs names no interaction; there are {', '.join(interactions)}: set extra_info."
                "interaction_kwargs.name"
            )
        return next(iter(interactions.values()), None)
    if name not in interactions:
        raise ConfigError(
            f"interaction_kwargs.name={name!r}: {_KEY} has {', '.join(interactions) or 'no such file is configured'}"
        )
    return interactions[name]


def seed_of_row(seed: Any, what: str) -> int:
    """The seed that a row gives.

    Raises:
        DataError: it gives none. The samples of a prompt are compared, so they have to meet the same episode.
    """
    if seed is None:
        raise DataError(
            f"{what} needs a seed, so that all samples of a prompt meet the same episode; set "
            "extra_info.interaction_kwargs.seed"
        )
    return int(seed)

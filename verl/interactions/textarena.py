"""Games of the package ``textarena`` as environments, for one player and for several (an optional extra)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from verl.errors import ConfigError
from verl.interactions.base import seed_of_row

#: games draw from the generators of the modules random and numpy.random: one moves at a time, with a state of its own
_MOVING = threading.Lock()


class _Game:
    """A game and what its players have been shown.

    Args:
        game: its name in the package, for example ``GuessTheNumber-v0``.
        settings: arguments of the game.

    Raises:
        ConfigError: the package is missing, or has no such game or setting.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        package = _textarena()
        self.game = game
        self._own = package.GAME_ID
        self._states: tuple[Any, Any] | None = None
        with self._random():
            try:
                self._env = package.make(game, **settings)
            except (ValueError, TypeError, ImportError) as error:
                raise ConfigError(f"textarena does not make the game {game!r} with {settings}: {error}") from error
        # wrappers of actions are the game's; those of observations repeat all that was shown before
        self._bare = self._env
        while isinstance(self._bare, package.Wrapper):
            self._bare = self._bare.env

    def start(self, players: int, seed: int | None) -> None:
        """Begin with this many players.

        Raises:
            ConfigError: the game is not for so many.
            DataError: no seed.
        """
        number = seed_of_row(seed, f"game {self.game!r}")
        with self._random():
            np.random.seed(number % 2**32)
            try:
                self._env.reset(num_players=players, seed=number)
            except AssertionError as error:
                raise ConfigError(
                    f"game {self.game!r} is not for {players} player(s): {error}. Games for one are interactions; "
                    "games for several are for the agent loop multi_agent, with rollout.agent.multi_agent.players"
                ) from error

    def look(self) -> tuple[int, str]:
        """The player whose turn it is, and what they have not been shown yet, their own words left out."""
        with self._random():
            player, messages = self._bare.get_observation()
        names = self._bare.state.role_mapping
        shown = [
            text if sender == self._own else f"[{names.get(sender, sender)}] {text}"
            for sender, text, _ in messages
            if sender != player
        ]
        return int(player), "\n".join(shown).strip()

    def act(self, action: str) -> bool:
        """Carry out the turn; returns whether the game is over."""
        with self._random():
            done, _ = self._env.step(action)
        return bool(done)

    def result(self) -> dict[int, float]:
        """What each player has earned, when the game is over."""
        with self._random():
            rewards, _ = self._bare.close()
        return {int(player): float(reward) for player, reward in (rewards or {}).items()}

    @contextmanager
    def _random(self) -> Iterator[None]:
        with _MOVING:
            before = random.getstate(), np.random.get_state()
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


class TextArenaEnv(_Game):
    """A game for one player.

    For :class:`~verl.interactions.gym_env.GymInteraction`, as ``env: verl.interactions.TextArenaEnv``. The game's
    result is the reward of the last turn.
    """

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Begin; the rules are the first observation."""
        self.start(1, seed)
        return self.look()[1], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        if self.act(action):
            return "", self.result().get(0, 0.0), True, False, {}
        return self.look()[1], 0.0, False, False, {}


class TextArenaGame(_Game):
    """A game for several players, for the agent loop ``multi_agent``: ``env: verl.interactions.TextArenaGame``.

    Its players are numbered as the loop's. Each one's result is the reward of their last turn.
    """

    def reset(self, players: list[str], seed: int | None = None, options: Any = None) -> tuple[int, str]:
        """Begin: whose turn it is, and what they see."""
        self.start(len(players), seed)
        return self.look()

    def step(self, action: str) -> tuple[int, str, dict[int, float], bool]:
        """Make a move: whose turn is next, what they see, what was earned, and whether the game is over."""
        if self.act(action):
            return 0, "", self.result(), True
        return *self.look(), {}, False


def _textarena() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(
            f"games of textarena need the package ({error}); install it with: pip install 'verl[textarena]'"
        ) from error
    return textarena

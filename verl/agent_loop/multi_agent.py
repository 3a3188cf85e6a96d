"""Several players in one episode, all of them the policy: self-play, or roles that work together."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import AgentContext, AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.conversation import Conversation, open_conversation
from verl.agent_loop.environment_session import limited, with_opening
from verl.agent_loop.tool_agent import messages_of_row, need_chat_template
from verl.errors import ConfigError, RolloutError
from verl.rewards.outcome import checked_score
from verl.tools.threads import run_in_thread
from verl.trajectories.batch import PLAYER
from verl.utils.dynamic_import import load_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import RolloutConfig
    from verl.config.multi_turn import MultiAgentConfig

logger = logging.getLogger(__name__)


@register("multi_agent")
class MultiAgentLoop(AgentLoopBase):
    """Players take their turns in an environment, ``rollout.agent.multi_agent``; each trained one becomes a row.

    Every player has a conversation of its own: the row's prompt, what the environment has shown to this player, and
    what it has said. Samples of a prompt are compared player by player: the rows of a player are a group.

    The environment has ``reset(players=..., seed=..., options=...) -> (player, observation)`` and ``step(action) ->
    (player, observation, rewards, done)``: whose turn is next, what they see, what players have earned by this step
    (a mapping), and whether the episode is over. Players are names, or their numbers. Functions that block run in
    threads; coroutine functions are awaited. ``close()`` is called at the end where there is one.

    The episode also ends when the player whose turn it is has no room or turn left.
    """

    def __init__(self, context: AgentContext, **settings: Any) -> None:
        super().__init__(context, **settings)
        self.settings = context.config.agent.multi_agent

    @classmethod
    def check(cls, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look at the environment and the chat template."""
        _maker(config.agent.multi_agent)
        need_chat_template(tokenizer)

    @classmethod
    def nothing(cls, config: RolloutConfig, prompt_ids: Sequence[int]) -> list[AgentLoopOutput]:
        """A row without tokens for each trained player."""
        return [_empty(name, prompt_ids) for name in config.agent.multi_agent.trained_players]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Run the episode of one row, which needs ``raw_prompt``; ``interaction_kwargs`` as for interactions."""
        messages = messages_of_row(kwargs.get("raw_prompt"))
        seats = {name: _Seat(name, self.context, messages) for name in self.settings.players}
        episode = _Episode(self.context, kwargs.get("interaction_kwargs") or {})
        try:
            player, seen = await episode.start()
            done = False
            while not done:
                seat = _seat(seats, player)
                if not seat.told(seen):
                    self.context.trace.count("truncated")
                    break
                action = seat.spoke(await self.generate(seat.context_ids, sampling_params, max_tokens=seat.room))
                player, seen, rewards, done = await episode.step(action)
                for name, reward in rewards.items():
                    who = f"environment {self.settings.env} for player {name!r}"
                    _seat(seats, name).earn(checked_score(reward, who))
        finally:
            await episode.close()
        return self._rows(seats, list(kwargs["raw_prompt_ids"]))

    def _rows(self, seats: Mapping[str, _Seat], prompt_ids: list[int]) -> list[AgentLoopOutput]:
        trained = [seats[name] for name in self.settings.trained_players]
        # where a player has not spoken there is nothing to train on; such a row is never the first
        trained.sort(key=lambda seat: not seat.scores)
        if not trained[0].scores:
            names = ", ".join(seat.name for seat in trained)
            raise RolloutError(f"the episode ended before a trained player had a turn ({names})")
        rows = [seat.row(self.settings.reward, prompt_ids) for seat in trained]
        rows[0].metrics = {f"score/{seat.name}": sum(seat.scores) for seat in seats.values() if seat.scores}
        if any(seat.conversation is not None and seat.conversation.rewrites for seat in seats.values()):
            self.context.trace.count("history_rewrites")
        return rows


class _Seat:
    """A player: its conversation and what its turns have earned."""

    def __init__(self, name: str, context: AgentContext, messages: Sequence[dict[str, Any]]) -> None:
        self.name = name
        self.scores: list[float] = []
        self.conversation: Conversation | None = None
        self._context = context
        self._messages = messages
        self._early = 0.0  # earned before the first turn

    def told(self, seen: str) -> bool:
        """Show an observation; False when the player cannot go on."""
        seen = self._context.tool_limits.shown(seen)
        if self.conversation is None:
            self.conversation = open_conversation(self._context, with_opening(self._messages, seen), ())
            return True
        if self._context.config.multi_turn.out_of_turns(len(self.scores)):
            return False
        return self.conversation.add([{"role": "user", "content": seen}])

    @property
    def context_ids(self) -> list[int]:
        """What the model reads as this player."""
        return self._open.token_trajectory.context

    @property
    def room(self) -> int:
        """Tokens that the player may still use."""
        return self._open.room

    def spoke(self, completion: Any) -> str:
        """Take a turn of the player; returns its text."""
        text = self._open.add_sampled(completion)
        self.scores.append(self._early)
        self._early = 0.0
        return text.strip()

    def earn(self, reward: float) -> None:
        """A reward counts on the player's last turn, or on its first if it has had none."""
        if self.scores:
            self.scores[-1] += reward
        else:
            self._early += reward

    def row(self, reward: str, prompt_ids: list[int]) -> AgentLoopOutput:
        """The training row; of a player without a turn, the row's prompt alone."""
        if self.conversation is None:
            return _empty(self.name, prompt_ids)
        extra: dict[str, Any] = {PLAYER: self.name, "interaction_rewards": self.scores}
        total = None
        if reward == "step":
            extra["turn_scores"], total = self.scores, 0.0
        elif reward == "trajectory":
            total = sum(self.scores)
        return AgentLoopOutput.from_token_trajectory(
            self.conversation.token_trajectory,
            earlier=self.conversation.earlier,
            overlong=self.conversation.overlong,
            reward_score=total,
            extra_fields=extra,
        )

    @property
    def _open(self) -> Conversation:
        assert self.conversation is not None
        return self.conversation


class _Episode:
    """The environment of one trajectory, its calls within their time limit."""

    def __init__(self, context: AgentContext, about: Mapping[str, Any]) -> None:
        self._settings = context.config.agent.multi_agent
        self._trace = context.trace
        self._about = about
        self._env: Any = None

    async def start(self) -> tuple[Any, str]:
        """Make and reset the environment: whose turn it is, and what they see."""
        arguments = {**self._settings.env_kwargs, **(self._about.get("env_kwargs") or {})}
        maker = _maker(self._settings)
        self._env = await self._limited("start", run_in_thread(maker, **arguments))
        player, seen = await self._call(
            "reset",
            players=list(self._settings.players),
            seed=self._about.get("seed"),
            options=self._about.get("options"),
        )
        return player, str(seen)

    async def step(self, action: str) -> tuple[Any, str, Mapping[Any, float], bool]:
        """Carry out a turn."""
        result = await self._call("step", action)
        try:
            player, seen, rewards, done = result
        except (TypeError, ValueError):
            raise RolloutError(
                f"step of {self._settings.env} returned {result!r}, expected (player, observation, rewards, done)"
            ) from None
        return player, str(seen), rewards or {}, bool(done)

    async def close(self) -> None:
        """Let the environment give back what it holds; a failure is logged, nothing depends on it any more."""
        if not hasattr(self._env, "close"):
            return
        try:
            await self._call("close")
        except Exception as error:  # noqa: BLE001 - see above
            logger.warning("closing %s failed: %s: %s", self._settings.env, type(error).__name__, error)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(self._env, name)
        call = (
            method(*args, **kwargs) if inspect.iscoroutinefunction(method) else run_in_thread(method, *args, **kwargs)
        )
        return await self._limited(name, call)

    async def _limited(self, what: str, call: Awaitable[Any]) -> Any:
        return await limited(
            call,
            f"environment.{what}",
            self._settings.timeout_s,
            trace=self._trace,
            about=f"environment {self._settings.env!r}",
            key="rollout.agent.multi_agent.timeout_s",
        )


def _empty(name: str, prompt_ids: Sequence[int]) -> AgentLoopOutput:
    return AgentLoopOutput(list(prompt_ids), [], [], [], extra_fields={PLAYER: name})


def _seat(seats: Mapping[str, _Seat], player: Any) -> _Seat:
    """The seat of a player, given by name or number.

    Raises:
        RolloutError: there is no such player.
    """
    names = list(seats)
    name = names[player] if isinstance(player, int) and 0 <= player < len(names) else player
    if name not in seats:
        raise RolloutError(
            f"the environment names the player {player!r}; rollout.agent.multi_agent.players are {', '.join(names)}"
        )
    return seats[name]


def _maker(settings: MultiAgentConfig) -> Callable[..., Any]:
    """What makes an environment.

    Raises:
        ConfigError: none is configured, or it does not exist.
    """
    if settings.env is None:
        raise ConfigError("the agent loop multi_agent needs an environment; set rollout.agent.multi_agent.env")
    maker: Callable[..., Any] = load_target(settings.env)
    return maker

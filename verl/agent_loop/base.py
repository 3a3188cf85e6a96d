"""What an agent loop is, what it returns, and how it is found by name."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from verl.agent_loop.token_trajectory import TokenTrajectory
from verl.errors import ConfigError, RolloutError
from verl.tools.toolbox import ToolLimits
from verl.trajectories import Segment, Trajectory
from verl.utils.dynamic_import import load_target, read_yaml
from verl.utils.registry import Registry
from verl.utils.seeding import derive_seed
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.agent_loop.trace import Trace
    from verl.config import RolloutConfig
    from verl.data.images import ImageReader
    from verl.interactions.base import BaseInteraction
    from verl.models.vision import PromptImages
    from verl.tools.base_tool import BaseTool


class TokenGenerator(Protocol):
    """Turns tokens into sampled tokens: a client of rollout servers, or an engine in this process."""

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        """Serve one request; requests of one ``session`` go to the server that has their prefix in its cache."""


class EngineGenerator:
    """A rollout engine of this process as a :class:`TokenGenerator`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        """Serve one request."""
        completion: Completion = await self.engine.generate(request)
        return completion

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests now (all when None); they complete with the tokens so far."""
        await self.engine.abort(request_ids)


@dataclass
class AgentLoopOutput:
    """A finished trajectory: one training row.

    Attributes:
        prompt_ids: the prompt's tokens.
        response_ids: tokens after it, those of tools and environments included.
        response_mask: 1 where the model sampled the token, else 0.
        response_logprobs: log-probability of each sampled token, 0.0 elsewhere; None only where none was sampled.
        reward_score: score of the trajectory; None leaves it to the reward function.
        num_turns: turns of both sides, the prompt's last message included.
        metrics: numbers about the trajectory, by name.
        extra_fields: further columns of the batch. ``turn_scores`` is a list of one reward for each turn of the model,
            which counts on the turn's last token; ``state_hashes`` one hashable for each, the state that it acted in.
        policy_versions: oldest and newest weights that sampled it.
        token_versions: weights that sampled each token, -1 elsewhere; not given = the oldest.
        overlong: whether it was cut off at a limit of length; not given = whether the response is as long as it may be.
        images: all images of the row, with their places, where it shows others than those of its prompt.
        earlier: rows of the same trajectory before this one, with tokens alone, where its history was rewritten
            (``rollout.multi_turn.on_history_rewrite=fork``). Their turns come first in ``turn_scores`` and
            ``state_hashes``.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    policy_versions: tuple[int, int] | None = None
    token_versions: list[int] | None = None
    overlong: bool | None = None
    images: PromptImages | None = None
    earlier: list[AgentLoopOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask)}
        if self.token_versions is not None:
            lengths.add(len(self.token_versions))
        if self.response_logprobs is not None:
            lengths.add(len(self.response_logprobs))
        if len(lengths) > 1:
            given = ["none" if v is None else str(len(v)) for v in (self.response_logprobs, self.token_versions)]
            raise RolloutError(
                f"an agent loop returned {len(self.response_ids)} response_ids, {len(self.response_mask)} entries in "
                f"response_mask, {given[0]} response_logprobs and {given[1]} token_versions; they belong together "
                "token by token"
            )

    @classmethod
    def from_token_trajectory(
        cls, token_trajectory: TokenTrajectory, *, earlier: Sequence[TokenTrajectory] = (), **fields: Any
    ) -> AgentLoopOutput:
        """The row of a token trajectory, or the rows of several; ``state_hashes`` are theirs unless given.

        A last row in which the model did not speak any more is left out.
        """
        lines = [*earlier, token_trajectory]
        while len(lines) > 1 and not any(lines[-1].mask):
            lines.pop()
        token_trajectory = lines[-1]
        hashes = [name for one in lines for name in one.state_hashes()]
        extra = {"state_hashes": hashes, **fields.pop("extra_fields", {})}
        return cls(
            prompt_ids=token_trajectory.prompt_ids,
            response_ids=token_trajectory.ids,
            response_mask=token_trajectory.mask,
            response_logprobs=token_trajectory.log_probs,
            policy_versions=token_trajectory.version_range(),
            token_versions=token_trajectory.versions,
            num_turns=fields.pop("num_turns", sum(one.num_turns for one in lines) + 1),
            extra_fields=extra,
            images=token_trajectory.images,
            earlier=[cls._tokens(one) for one in lines[:-1]],
            **fields,
        )

    def trajectory(self) -> Trajectory:
        """The record that scoring and training read."""
        columns = dict(self.extra_fields)
        turn_scores = columns.pop("turn_scores", None)
        return Trajectory(
            [one._segment() for one in (*self.earlier, self)],
            score=self.reward_score,
            turn_scores=turn_scores,
            num_turns=self.num_turns,
            columns=columns,
            images=self._images_behind_prompt(),
        )

    def _segment(self) -> Segment:
        return Segment(
            self.prompt_ids,
            self.response_ids,
            self.response_mask,
            self.response_logprobs,
            self.token_versions,
            self.policy_versions,
            self.overlong,
        )

    def _images_behind_prompt(self) -> dict[str, Any] | None:
        images = self.images
        if images is None:
            return None
        assert images.starts is not None
        count = sum(at < len(self.prompt_ids) for at in images.starts)
        if count == len(images.keys):
            return None
        more = images.behind(count)
        return {
            "pixel_values": more.pixel_values,
            "image_grid_thw": more.grid_thw,
            "image_starts": list(images.starts),
        }

    @classmethod
    def _tokens(cls, token_trajectory: TokenTrajectory) -> AgentLoopOutput:
        return cls(
            token_trajectory.prompt_ids,
            token_trajectory.ids,
            token_trajectory.mask,
            token_trajectory.log_probs,
            policy_versions=token_trajectory.version_range(),
            token_versions=token_trajectory.versions,
        )


@dataclass
class AgentContext:
    """What an agent loop is given for one trajectory.

    Attributes:
        config: the ``rollout`` section.
        tokenizer: the policy's tokenizer.
        generator: samples tokens.
        session: name of the trajectory, unique among those in progress.
        trace: record of the trajectory.
        tools: the tools of the run, by name.
        tool_limits: limits of their calls.
        interactions: simulated users and environments of the run, by name.
        template_kwargs: arguments of the chat template, ``data.apply_chat_template_kwargs``.
        image_reader: opens images as the policy reads them; None where it reads none.
    """

    config: RolloutConfig
    tokenizer: PreTrainedTokenizerBase
    generator: TokenGenerator
    session: str
    trace: Trace
    tools: Mapping[str, BaseTool] = field(default_factory=dict)
    tool_limits: ToolLimits = field(default_factory=ToolLimits)
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_reader: ImageReader | None = None


class AgentLoopBase(ABC):
    """One trajectory: talks with the model in tokens and with the world however it likes.

    An instance lives for one trajectory. Tokens that :meth:`generate` returns are to be trained as they are; a
    :class:`~verl.agent_loop.conversation.Conversation` keeps the account.

    A class that gives the images of its row to :meth:`generate` says so by ``reads_images = True``; others get no rows
    with images.

    Args:
        context: what the run offers.
        settings: what the configuration file gives this loop besides its class.
    """

    reads_images: ClassVar[bool] = False

    def __init__(self, context: AgentContext, **settings: Any) -> None:
        if settings:
            raise ConfigError(
                f"{type(self).__name__} takes no settings, but the agent loop's configuration gives {sorted(settings)}"
            )
        self.context = context
        self.config = context.config
        self.tokenizer = context.tokenizer
        self._generations = 0

    @classmethod
    def check(cls, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise :class:`ConfigError` or :class:`DataError` for what would fail in every trajectory."""
        return

    @classmethod
    def nothing(cls, config: RolloutConfig, prompt_ids: Sequence[int]) -> list[AgentLoopOutput]:
        """The rows of a trajectory that has no result."""
        return [AgentLoopOutput(list(prompt_ids), [], [], [])]

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """Run the trajectory of one row.

        Args:
            sampling_params: arguments of :class:`~verl.workers.rollout.types.SamplingParams`, without ``max_tokens``.
            kwargs: the row: ``raw_prompt`` (messages), ``raw_prompt_ids`` (the prompt's tokens as the data set made
                them), ``tools_kwargs``, ``interaction_kwargs``, ``extra_info``, ``reward_model``, ``data_source``,
                ``uid``, ``index`` and ``sample_index`` as far as the batch has them, and ``images`` (of the prompt, a
                :class:`~verl.models.vision.PromptImages`, or None).

        Returns:
            The training row, or several: at most ``rollout.agent.rows_per_sample``, the first with tokens.
        """

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        max_tokens: int | None = None,
        images: PromptImages | None = None,
    ) -> Completion:
        """Let the model go on from ``prompt_ids``.

        Each call of a trajectory draws from a random stream of its own; the first one from the row's.

        Args:
            prompt_ids: all tokens so far.
            sampling_params: as given to :meth:`run`.
            max_tokens: most tokens to sample; not given = what the response length leaves.
            images: that placeholders in ``prompt_ids`` stand for.
        """
        params = dict(sampling_params)
        if params.get("seed") is not None and self._generations:
            params["seed"] = derive_seed(int(params["seed"]), "turn", self._generations)
        limit = params.pop("max_tokens", self.config.response_length) if max_tokens is None else max_tokens
        name = f"{self.context.session}-{self._generations}"
        self._generations += 1
        sampling = SamplingParams(**{**params, "max_tokens": limit})
        request = GenerationRequest(list(prompt_ids), sampling, name, images=images)
        started = time.time()
        completion = await self.context.generator.generate(request, session=self.context.session)
        self.context.trace.generated(started, len(prompt_ids), completion)
        if completion.finish_reason == "abort":
            raise GenerationAborted(f"generation of {name} was aborted after {len(completion.token_ids)} tokens")
        return completion


class GenerationAborted(RolloutError):
    """The engine ended a request before it was done."""


L = TypeVar("L", bound=type)
AGENT_LOOPS: Registry[Callable[..., AgentLoopBase]] = Registry("agent loop")


def register(agent_name: str) -> Callable[[L], L]:
    """Class decorator: make an agent loop known under a name, for ``agent_name`` of a row."""
    return AGENT_LOOPS.register(agent_name)  # type: ignore[return-value]


@dataclass(frozen=True)
class LoopSpec:
    """An agent loop and its settings."""

    cls: Callable[..., AgentLoopBase]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, context: AgentContext) -> AgentLoopBase:
        """The loop of one trajectory."""
        return self.cls(context, **self.settings)


def read_agent_loops(path: str | None) -> dict[str, LoopSpec]:
    """Agent loops of a YAML file: a list of mappings with ``name``, ``_target_`` and the loop's settings.

    ``_target_`` is a class as ``package.module.Class``, or ``file.py:Class``.

    Raises:
        ConfigError: the file or a class does not exist, or an entry is not of this form.
    """
    if path is None:
        return {}
    entries = read_yaml(path, "rollout.agent.agent_loop_config_path")
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: expected a list of agent loops, each with name and _target_, got {entries!r}")
    specs: dict[str, LoopSpec] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not {"name", "_target_"} <= entry.keys():
            raise ConfigError(f"{path}: agent loop {number} is {entry!r}; it needs name and _target_")
        settings = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        specs[str(entry["name"])] = LoopSpec(load_target(str(entry["_target_"])), settings)
    return specs


def find_loop(name: str, own: Mapping[str, LoopSpec]) -> LoopSpec:
    """The agent loop called ``name``, of the configuration's file or registered.

    Raises:
        ConfigError: there is none.
    """
    if name in own:
        return own[name]
    return LoopSpec(AGENT_LOOPS[name])

"""Agents: several turns, tools, environments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.base import Config, opt, section

TRUNCATE_SIDES = ("left", "right", "middle")
HISTORY_REWRITES = ("refuse", "append", "fork")
TOOL_REWARDS = ("report", "add")
PLAYER_REWARDS = ("step", "trajectory", "report")


@dataclass
class MultiTurnConfig(Config):
    """How the model talks with tools, users and environments."""

    enable: bool = opt(False, "Let the model act over several turns; rows go through an agent loop.")
    max_assistant_turns: int | None = opt(
        None, "Most turns of the model in a conversation; not given = no limit.", ge=1
    )
    max_user_turns: int | None = opt(
        None, "Most turns of tools, users or environments in a conversation; not given = no limit.", ge=1
    )
    max_parallel_calls: int = opt(
        1, "Most tool calls of one turn that are carried out; they run at the same time.", ge=1
    )
    max_tool_calls: int | None = opt(None, "Most tool calls of a conversation; not given = no limit.", ge=1)
    max_tool_response_length: int = opt(256, "Longest text that a tool may answer, in characters.", ge=1)
    tool_response_truncate_side: str = opt("middle", "Part of a longer text that is left out.", choices=TRUNCATE_SIDES)
    format: str = opt(
        "hermes",
        "Form of tool calls: hermes, llama3_json, qwen3_coder, deepseek, gpt-oss, glm, kimi, or a plug-in.",
    )
    tool_config_path: str | None = opt(None, "YAML file with the tools; not given = none.", affects="file")
    function_tool_path: str | None = opt(
        None, "Python file whose function tools are offered; not given = none.", affects="file"
    )
    interaction_config_path: str | None = opt(
        None, "YAML file with simulated users and environments; not given = none.", affects="file"
    )
    tool_timeout_s: float = opt(
        60.0, "Time limit of one tool call, in seconds, unless the tool sets its own.", gt=0, affects="limit"
    )
    tool_rewards: str = opt(
        "report",
        "What rewards that tools give are for: report = the reward function sees them, add = they also count, on the "
        "turn that earned them.",
        choices=TOOL_REWARDS,
    )
    on_history_rewrite: str = opt(
        "refuse",
        "What happens when the chat template would write earlier turns differently from what was sampled: refuse = "
        "the trajectory is aborted, append = sampled tokens stay as they are and the conversation goes on, fork = it "
        "goes on in a further training row that begins with what the template writes.",
        choices=HISTORY_REWRITES,
    )

    def problems(self) -> Iterator[str]:
        given = [
            key
            for key in ("tool_config_path", "function_tool_path", "interaction_config_path")
            if getattr(self, key) is not None
        ]
        if given and not self.enable:
            yield f"{given[0]}={getattr(self, given[0])!r}: has no use with enable=False; set multi_turn.enable=True"

    def out_of_turns(self, assistant_turns: int) -> bool:
        """Whether a limit on turns is reached; every turn of the model but the last is answered by one turn."""
        return (self.max_assistant_turns is not None and assistant_turns >= self.max_assistant_turns) or (
            self.max_user_turns is not None and assistant_turns > self.max_user_turns
        )


@dataclass
class OpenAIAgentConfig(Config):
    """The program that the agent loop ``openai_agent`` runs for each row."""

    path: str | None = opt(
        None, "Python file, or pkg://package.module, with the agent function; not given = none.", affects="file"
    )
    name: str = opt(
        "run",
        "Function of that file, called as run(base_url, api_key, row); a coroutine function runs in the event loop, "
        "any other in a thread.",
    )


@dataclass
class MultiAgentConfig(Config):
    """Several players in one episode, all of them the policy: the agent loop multi_agent."""

    env: str | None = opt(
        None,
        "What makes the environment of an episode, package.module.name or file.py:name; not given = no such episodes.",
        affects="file",
    )
    env_kwargs: dict[str, Any] = opt({}, "Its arguments; a row's interaction_kwargs.env_kwargs go before.")
    players: list[str] = opt([], "Names of the players, in the order in which the environment numbers them.")
    trained: list[str] = opt([], "Players whose turns are trained on; empty = all.")
    reward: str = opt(
        "step",
        "What the environment's rewards are for: step = each counts on the turn that earned it, trajectory = their "
        "sum is a player's score, report = the reward function sees them.",
        choices=PLAYER_REWARDS,
    )
    timeout_s: float = opt(60.0, "Time limit of one call of the environment, in seconds.", gt=0, affects="limit")

    def problems(self) -> Iterator[str]:
        if self.env is None:
            given = [key for key in ("env_kwargs", "players", "trained") if getattr(self, key)]
            if given:
                yield f"{given[0]}={getattr(self, given[0])!r}: has no use without an environment; set multi_agent.env"
            return
        if len(self.players) < 2 or len(set(self.players)) < len(self.players):
            yield f"players={self.players}: name at least two players, each once, for example [first,second]"
        unknown = [name for name in self.trained if name not in self.players]
        if unknown:
            yield f"trained={self.trained}: {', '.join(unknown)} is none of the players {', '.join(self.players)}"

    @property
    def trained_players(self) -> list[str]:
        """Names of the players whose turns are trained on, in the order of the players."""
        return [name for name in self.players if not self.trained or name in self.trained]


@dataclass
class AgentConfig(Config):
    """Which agent loop handles a row, and within which limits."""

    default_agent_loop: str | None = opt(
        None,
        "Agent loop of rows without agent_name; not given = openai_agent with openai_agent.path, multi_agent with "
        "multi_agent.env, tool_agent with multi_turn.enable, else none: every prompt then gets one response without "
        "any agent loop.",
    )
    agent_loop_config_path: str | None = opt(
        None, "YAML file with agent loops of your own (name, _target_, settings); not given = none.", affects="file"
    )
    openai_agent: OpenAIAgentConfig = section(
        OpenAIAgentConfig, "The program that the agent loop openai_agent runs for each row."
    )
    multi_agent: MultiAgentConfig = section(MultiAgentConfig, "Several players in one episode, all of them the policy.")
    rows_per_sample: int | None = opt(
        None,
        "Most training rows that the agent loop of a sample may give, missing ones being filled with rows that count "
        "nowhere; not given = one for each trained player with multi_agent.env, else 1.",
        ge=1,
    )
    num_workers: int = opt(
        8, "Processes that run agent loops beside rollout servers (mode=async).", ge=1, affects="speed"
    )
    max_concurrent: int = opt(
        1024, "Most trajectories that one process has in progress at a time.", ge=1, affects="speed"
    )
    timeout_s: float | None = opt(
        None,
        "Time limit of a trajectory, in seconds, after which it is aborted; not given = no limit.",
        gt=0,
        affects="limit",
    )
    max_failed_fraction: float = opt(
        0.5, "Part of a batch whose trajectories may be aborted before the run stops.", ge=0, le=1, affects="limit"
    )
    trace_dir: str | None = opt(
        None,
        "Directory for a record of every trajectory as JSONL: turns, tool calls, times, tokens, rewards.",
        affects="place",
    )
    opentelemetry: bool = opt(
        False, "Report trajectories, turns and tool calls as OpenTelemetry spans.", affects="report"
    )

    def problems(self) -> Iterator[str]:
        if self.default_agent_loop == "openai_agent" and self.openai_agent.path is None:
            yield "default_agent_loop=openai_agent: needs the file of the agent; set agent.openai_agent.path"
        if self.default_agent_loop == "multi_agent" and self.multi_agent.env is None:
            yield "default_agent_loop=multi_agent: needs an environment; set agent.multi_agent.env"
        if self.openai_agent.path is not None and self.multi_agent.env is not None and not self.default_agent_loop:
            yield "multi_agent.env: there is openai_agent.path too; choose one with agent.default_agent_loop"
        if self.openai_agent.path is not None and self.timeout_s is None:
            yield (
                f"openai_agent.path={self.openai_agent.path}: an agent may hang, which nothing would end; set "
                "agent.timeout_s"
            )

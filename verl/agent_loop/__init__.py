"""Agents: trajectories of many turns with tools and environments, each a coroutine that talks in tokens."""

from __future__ import annotations

from verl.agent_loop.base import (
    AGENT_LOOPS,
    AgentContext,
    AgentLoopBase,
    AgentLoopOutput,
    EngineGenerator,
    TokenGenerator,
    register,
)
from verl.agent_loop.conversation import Conversation, HistoryRewritten
from verl.agent_loop.multi_agent import MultiAgentLoop
from verl.agent_loop.proxy import OpenAIAgentLoop
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.agent_loop.token_trajectory import TokenTrajectory
from verl.agent_loop.tool_agent import ToolAgentLoop

__all__ = [
    "AGENT_LOOPS",
    "AgentContext",
    "AgentLoopBase",
    "AgentLoopOutput",
    "Conversation",
    "EngineGenerator",
    "HistoryRewritten",
    "MultiAgentLoop",
    "OpenAIAgentLoop",
    "SingleTurnAgentLoop",
    "TokenGenerator",
    "TokenTrajectory",
    "ToolAgentLoop",
    "register",
]

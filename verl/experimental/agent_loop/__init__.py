"""The well-known import path of agent loops; they live in :mod:`verl.agent_loop`."""

from verl.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    register,
)

__all__ = ["AgentLoopBase", "AgentLoopOutput", "SingleTurnAgentLoop", "ToolAgentLoop", "register"]

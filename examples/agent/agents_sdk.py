"""The calculator agent in a framework, the OpenAI Agents SDK (``pip install openai-agents``).

    python examples/agent/run.py --agent agents_sdk

trains the model behind it. The framework runs the conversation and the tool; training gives it an address and a key.
"""

from __future__ import annotations

import re
import ssl
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

#: reading them takes a client longer than asking; hundreds of clients may share them
CERTIFICATES = ssl.create_default_context()


@function_tool
def calculator(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: for example 17*23.
    """
    found = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression)
    return str(int(found[1]) * int(found[2])) if found else "write two numbers with * between them"


async def answer(client: AsyncOpenAI, question: str) -> str:
    """Let an agent answer, with the calculator at hand."""
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="calculator", tools=[calculator], model=model)
    result = await Runner.run(agent, question, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """What training calls for each row; the reward is left to the reward function."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        await answer(client, row["raw_prompt"][-1]["content"])

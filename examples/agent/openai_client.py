"""A calculator agent written with OpenAI's client: an ordinary program that knows nothing of training.

    python examples/agent/run.py --agent openai_client

trains the model behind it. All that training changes is the address and the key that the client is given.
"""

from __future__ import annotations

import json
import re
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

#: reading them takes a client longer than asking; hundreds of clients may share them
CERTIFICATES = ssl.create_default_context()

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example 17*23"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """The product, or what is wrong with the question."""
    found = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression)
    return str(int(found[1]) * int(found[2])) if found else "write two numbers with * between them"


async def answer(client: AsyncOpenAI, question: str) -> str:
    """Let the model answer, with the calculator at hand."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        choice = reply.choices[0]
        messages.append(choice.message)
        # an answer that was cut off for its length is the last one
        if not choice.message.tool_calls or choice.finish_reason == "length":
            return choice.message.content or ""
        for call in choice.message.tool_calls:
            result = calculate(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """What training calls for each row; the reward is left to the reward function."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        await answer(client, row["raw_prompt"][-1]["content"])

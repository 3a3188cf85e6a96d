"""Run Python programs that the model writes, in a sandbox."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from verl.rewards.sandbox.pool import shared_pool
from verl.rewards.sandbox.remote import RemoteSandbox
from verl.rewards.sandbox.spec import Limits, ProgramResult, Status
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import run_in_thread

_MEANING = {
    Status.TIMEOUT: "the program was stopped at its time limit",
    Status.MEMORY: "the program was stopped at its memory limit",
    Status.OUTPUT: "the program was stopped because it wrote too much",
}


class PythonTool(BaseTool):
    """A Python interpreter: each call runs one program from a clean start and answers what it printed.

    Config:
        cpu_s: CPU seconds of a program (10); twice that in wall-clock time.
        memory_limit_mb: memory of a program (512).
        isolation: means that confine it, see ``reward.sandbox.isolation`` (auto).
        processes: programs at the same time, over all tools of the process (one per CPU).
        url: a Sandbox Fusion server that runs the programs instead.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        seconds = float(self.config.get("cpu_s", 10.0))
        self._limits = Limits(cpu_s=seconds, wall_s=2 * seconds, memory_mb=int(self.config.get("memory_limit_mb", 512)))
        self.config.setdefault("timeout_s", 4 * seconds + 30)  # the sandbox ends programs before that

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One parameter, ``code``."""
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "python",
                    "description": "Run a Python program and return what it prints.",
                    "parameters": {
                        "type": "object",
                        "properties": {"code": {"type": "string", "description": "The program."}},
                        "required": ["code"],
                    },
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run ``parameters["code"]``; the answer is its output, and how it failed if it did."""
        result = await run_in_thread(self._run, str(parameters["code"]))
        return ToolResponse(text=_answer(result)), None, {"status": str(result.status)}

    def _run(self, code: str) -> ProgramResult:
        if url := self.config.get("url"):
            return RemoteSandbox(str(url), self._limits).run(code)
        pool = shared_pool(str(self.config.get("isolation", "auto")), self.config.get("processes"))
        with pool.lend() as box:
            return box.run([sys.executable, "-I", "main.py"], files={"main.py": code}, limits=self._limits)


def _answer(result: ProgramResult) -> str:
    parts = [result.stdout.rstrip("\n")]
    if result.status in _MEANING:
        parts.append(f"Error: {_MEANING[result.status]}")
    elif result.status is Status.ERROR:
        # the last line names the exception; those before are frames in a program that the model knows
        lines = [line for line in result.stderr.strip().split("\n") if line.strip()]
        parts.append(f"Error: {lines[-1] if lines else f'exit code {result.exit_code}'}")
    return "\n".join(part for part in parts if part) or "(no output)"

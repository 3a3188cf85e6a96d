"""Search with a retriever behind HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.rewards.http import post_json
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import run_in_thread


class SearchTool(BaseTool):
    """Ask a retriever and show the passages that it finds.

    The server is asked by ``POST <url>`` with ``{"queries": [...], "topk": n, "return_scores": true}`` and answers
    ``{"result": [[{"document": {"contents": text}, "score": s}, ...], ...]}``, one list for each query; a passage may
    also be ``{"contents": text}`` or plain text.

    Config:
        retrieval_service_url: the server's address.
        topk: passages for each query (3).
        request_timeout_s: of one HTTP request (30).
        max_retries: further requests when the server fails (2).
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        url = self.config.get("retrieval_service_url")
        if not url:
            raise ConfigError(f"search tool {self.name!r}: give config.retrieval_service_url, the retriever's address")
        self.url = str(url)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One parameter, ``query_list``."""
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "search",
                    "description": "Search for passages that answer questions.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "query_list": {
                                "type": "array",
                                "items": {"type": "string"},
                                "description": "The questions, each complete in itself.",
                            }
                        },
                        "required": ["query_list"],
                    },
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Search for ``query_list`` (or a single ``query``)."""
        asked = parameters.get("query_list", parameters.get("query"))
        queries = [asked] if isinstance(asked, str) else asked
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ValueError(f"query_list must be a list of texts, got {asked!r}")
        answer = await run_in_thread(
            post_json,
            self.url,
            {"queries": queries, "topk": int(self.config.get("topk", 3)), "return_scores": True},
            timeout_s=float(self.config.get("request_timeout_s", 30.0)),
            max_retries=int(self.config.get("max_retries", 2)),
        )
        results = answer.get("result") if isinstance(answer, Mapping) else None
        if not isinstance(results, list) or len(results) != len(queries):
            raise RewardError(
                f"{self.url} sent no list of results for each of {len(queries)} queries: {str(answer)[:200]}"
            )
        found = sum(len(passages) for passages in results)
        return ToolResponse(text=_as_text(queries, results)), None, {"passages": found}


def _as_text(queries: list[str], results: list[Any]) -> str:
    blocks = []
    for query, passages in zip(queries, results, strict=True):
        lines = [f"Document {number}: {_passage(passage)}" for number, passage in enumerate(passages, start=1)]
        title = f"Results for {query!r}:\n" if len(queries) > 1 else ""
        blocks.append(title + ("\n".join(lines) or "nothing found"))
    return "\n\n".join(blocks)


def _passage(passage: Any) -> str:
    if isinstance(passage, Mapping):
        passage = passage.get("document", passage)
    if isinstance(passage, Mapping):
        passage = passage.get("contents", passage)
    return str(passage)

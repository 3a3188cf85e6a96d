"""The Python tool in the sandbox, and the search tool against a real small retriever."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl.errors import ConfigError
from verl.tools.loading import load_tools
from verl.tools.python_tool import PythonTool
from verl.tools.search_tool import SearchTool
from verl.tools.toolbox import ToolBox, ToolLimits, ToolResult

PASSAGES = ["the capital of France is Paris", "the capital of Italy is Rome", "bread is made of flour"]


def call(tool: Any, **arguments: Any) -> ToolResult:
    box = ToolBox({tool.name: tool}, ToolLimits(max_length=2000), session="s")
    return asyncio.run(box.call(tool.name, arguments))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(no output)"),
        ("print('so far')\n1 / 0", "so far\nError: ZeroDivisionError: division by zero"),
        ("def f(:", "Error: SyntaxError: invalid syntax"),
        ("while True: pass", "Error: the program was stopped at its time limit"),
        ("print('x' * 10_000_000)", None),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", None),
        ("import os; os.kill(os.getppid(), 9)", None),
    ],
)
def test_programs_of_every_kind_get_an_answer(code: str, text: str | None) -> None:
    result = call(PythonTool({"cpu_s": 2, "memory_limit_mb": 256}), code=code)
    assert result.failure in (None, "exception")
    assert len(result.text) < 2100
    if text is not None:
        assert result == ToolResult(text)


def test_nothing_is_left_of_a_program() -> None:
    tool = PythonTool({})
    assert call(tool, code="open('note', 'w').write('x'); print('ok')").text == "ok"
    assert "FileNotFoundError" in call(tool, code="open('note')").text


class Retriever(BaseHTTPRequestHandler):
    """Finds the passages that share most words with a query."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/broken":
            answer: Any = {"oops": 1}
        else:
            answer = {"result": [self.ranked(query, asked["topk"]) for query in asked["queries"]]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def ranked(self, query: str, count: int) -> list[Any]:
        words = set(query.lower().split())
        scored = sorted(((len(words & set(p.lower().split())), p) for p in PASSAGES), key=lambda pair: -pair[0])
        return [{"document": {"contents": passage}, "score": score} for score, passage in scored[:count] if score]

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_search_shows_the_passages_found(url: str) -> None:
    tool = SearchTool({"retrieval_service_url": f"{url}/retrieve", "topk": 1})
    assert call(tool, query_list=["capital Italy"]).text == f"Document 1: {PASSAGES[1]}"
    several = call(tool, query_list=["bread", "xyz"]).text
    assert several == f"Results for 'bread':\nDocument 1: {PASSAGES[2]}\n\nResults for 'xyz':\nnothing found"


def test_searches_that_fail_are_told(url: str) -> None:
    broken = SearchTool({"retrieval_service_url": f"{url}/broken"})
    assert "sent no list of results" in call(broken, query_list=["x"]).text
    silent = SearchTool({"retrieval_service_url": "http://127.0.0.1:9/x", "max_retries": 0})
    assert call(silent, query_list=["x"]).failure == "exception"
    assert "must be a list of texts" in call(silent, query_list=[1]).text
    with pytest.raises(ConfigError, match="give config.retrieval_service_url"):
        SearchTool({})


def load(tmp_path: Path, content: Any) -> dict[str, Any]:
    file = tmp_path / "tools.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_tools(str(file))


PYTHON = "verl.tools.python_tool.PythonTool"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tools: {", "cannot be read"),
        ({"tool": []}, "expected a list under 'tools'"),
        ({"tools": [{"config": {}}]}, "expected class_name, config and tool_schema"),
        ({"tools": [{"class_name": PYTHON, "confg": {}}]}, "has the unknown key 'confg'"),
        ({"tools": [{"class_name": "PythonTool"}]}, "write package.module.Name or file.py:Name"),
        ({"tools": [{"class_name": "verl.tools.python_tool.PythonTol"}]}, "has no 'PythonTol'"),
        ({"tools": [{"class_name": "verl.errors.ConfigError"}]}, "not a class derived from BaseTool"),
        ({"tools": [{"class_name": "verl.tools.base_tool.BaseTool"}]}, "BaseTool has no schema; give tool_schema"),
        ({"tools": [{"class_name": PYTHON, "tool_schema": {"type": "function"}}]}, "tool_schema is not a function"),
        ({"tools": [{"class_name": PYTHON}] * 2}, "two tools are called 'python'"),
    ],
)
def test_a_wrong_tool_file_is_told(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, content)


def test_a_tool_of_the_file_may_have_another_description(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "run", "parameters": {"properties": {"code": {}}}}}
    tools = load(tmp_path, {"tools": [{"class_name": PYTHON, "tool_schema": schema, "config": {"cpu_s": 3}}]})
    assert call(tools["run"], code="print(1)").text == "1"

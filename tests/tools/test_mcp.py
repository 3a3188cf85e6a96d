"""Tools of real MCP servers, over standard streams and HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.vision import make_image_processor, make_vision_tokenizer
from verl.data.images import ImageReader
from verl.errors import ConfigError
from verl.tools.loading import load_tools
from verl.tools.toolbox import ToolBox, ToolLimits, ToolResult
from verl.utils.tokenizer import ImageTextProcessor

pytest.importorskip("mcp")

SERVER = str(Path(__file__).parent / "mcp_server.py")
SILENT = {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"], "start_timeout_s": 1}
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}


def tools_of(tmp_path: Path, **config: Any) -> dict[str, Any]:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [{"class_name": "verl.tools.mcp_tools.MCPTool", "config": config}]}))
    return load_tools(str(file))


def call(tools: dict[str, Any], name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(ToolBox(tools, ToolLimits(), session="s").call(name, arguments))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def check(tools: dict[str, Any]) -> None:
    add = tools["add"].tool_schema.for_template()["function"]
    assert add["description"] == "Add two numbers."
    assert set(add["parameters"]["required"]) == {"a", "b"}
    assert call(tools, "add", a=2, b=3) == ToolResult("5")
    assert call(tools, "add", a=2, b=4) == ToolResult("6")  # another event loop, the same session
    failed = call(tools, "fail", reason="no luck")
    assert failed.failure == "exception"
    assert "no luck" in failed.text or failed.text.startswith("Error: ")


def test_over_http(url: str, tmp_path: Path) -> None:
    tools = tools_of(tmp_path, url=url, tools=["add", "fail"], headers={"X-Key": "secret"})
    assert list(tools) == ["add", "fail"]
    check(tools)
    tools["add"].close()


def test_images_are_shown_to_models_that_read_them(url: str, tmp_path: Path) -> None:
    tools = tools_of(tmp_path, url=url, tools=["look"])
    assert call(tools, "look") == ToolResult("red")  # the text is an answer too
    tokenizer = make_vision_tokenizer()
    processor = ImageTextProcessor(make_image_processor(), tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    box = ToolBox(tools, ToolLimits(), session="s", image_reader=ImageReader(processor))
    shown = asyncio.run(box.call("look", {}))
    assert shown.text == "red"
    assert shown.images.grid_thw.tolist() == [[1, 4, 4]]
    tools["look"].close()


def test_over_standard_streams_until_the_server_dies(tmp_path: Path) -> None:
    tools = tools_of(tmp_path, **STDIO, timeout_s=10)
    try:
        check(tools)
        assert set(tools) == {"add", "fail", "slow", "look", "die"}
        started = time.monotonic()
        for name in ("die", "add"):
            arguments = {"a": 1, "b": 1} if name == "add" else {}
            assert call(tools, name, **arguments).failure in ("exception", "timeout")
        assert time.monotonic() - started < 30
    finally:
        tools["add"].close()
    assert call(tools, "add", a=1, b=1).failure == "exception"


def test_a_call_that_takes_too_long(tmp_path: Path) -> None:
    tools = tools_of(tmp_path, **STDIO, timeout_s=0.5, tools=["slow"])
    assert call(tools, "slow", seconds=3).failure == "timeout"
    tools["slow"].close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs config.command .* or config.url"),
        ({"command": "no-such-program"}, "no-such-program cannot be used"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "cannot be used|did not answer"),
        (SILENT, "did not answer within 1 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be used"),
        ({**STDIO, "tools": ["sub"]}, "has no tool 'sub'; it has add, fail"),
        ({**STDIO, "tols": ["sub"]}, "has no setting 'tols'"),
    ],
)
def test_servers_that_cannot_be_used_are_told(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tools_of(tmp_path, **config)

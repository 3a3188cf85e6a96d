"""A real MCP server for the tests: ``python mcp_server.py stdio`` or ``python mcp_server.py http PORT``."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any

import PIL.Image
from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@server.tool()
def slow(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


@server.tool(structured_output=False)
def look() -> list[Any]:
    """A red square."""
    picture = io.BytesIO()
    PIL.Image.new("RGB", (16, 16), (220, 30, 30)).save(picture, "PNG")
    return ["red", Image(data=picture.getvalue(), format="png")]


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))

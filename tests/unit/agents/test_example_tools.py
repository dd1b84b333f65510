"""The tools in examples/tools do what they promise."""

import asyncio
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from openppo.agents.tools import BaseTool, load_tools

EXAMPLES = Path(__file__).parents[3] / "examples/tools"


def example(name: str) -> BaseTool:
    (tool,) = load_tools(str(EXAMPLES / name))
    return tool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4.5) * 2 ** 8", "1920"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2^3", "8"),
        ("sqrt(2) / 2", "0.7071067811865476"),
        ("round(2.6) + max(1, 2)", "5"),
    ],
)
def test_the_calculator_calculates(expression, value):
    assert asyncio.run(example("calculator.py").execute("", {"expression": expression})) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "(1).real", "'a' * 9", "1 if 1 else 2", "9 ** 9 ** 9", "(" * 999, "1" * 1001]
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression):
    with pytest.raises((ValueError, SyntaxError, OverflowError, MemoryError)):
        asyncio.run(example("calculator.py").execute("", {"expression": expression}))


def test_the_search_finds_the_passage_with_most_of_the_words():
    search = example("search.py")
    first = asyncio.run(search.execute("", {"query": "what does the critic estimate", "n": 2}))
    assert first.startswith("[1] A critic estimates") and "\n\n[2] " in first and "[3]" not in first
    assert asyncio.run(search.execute("", {"query": "zebra"})) == "Nothing was found."


@pytest.fixture
def sandbox() -> BaseTool:
    made = example("sandbox.py")
    made.seconds = 5
    return made


def run(sandbox: BaseTool, *codes: str) -> list[str]:
    async def episode() -> list[str]:
        folder = await sandbox.create()
        said = [(await sandbox.execute(folder, {"code": textwrap.dedent(code)})).text for code in codes]
        await sandbox.release(folder)
        assert not Path(folder).exists()
        return said

    return asyncio.run(episode())


def test_the_sandbox_runs_code_in_a_folder_that_calls_share(sandbox):
    keep = "open('a.txt', 'w').write('kept'); print(1 + 1)"
    said = run(sandbox, keep, "print(open('a.txt').read())", "1 / 0", "x = 1")
    assert said[:2] == ["2\n", "kept\n"]
    assert "ZeroDivisionError" in said[2] and said[3] == "(The code printed nothing.)"


def test_the_sandbox_ends_code_that_takes_too_long_with_its_children(sandbox, tmp_path):
    sandbox.seconds = 1
    mark = tmp_path / "written-later"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    assert run(sandbox, code) == ["Error: the code ran longer than 1 s."]

    async def wait() -> None:
        await asyncio.sleep(3)

    asyncio.run(wait())
    assert not mark.exists()


def test_the_sandbox_limits_memory_files_output_and_secrets(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    memory, file, output, environment = run(
        sandbox,
        "b = bytearray(2 ** 30)",
        "open('big', 'wb').write(bytes(2 ** 25))",
        "while True: print('x' * 1000)",
        "import os; print(os.environ.get('HF_TOKEN'))",
    )
    assert "MemoryError" in memory
    assert "File too large" in file
    assert len(output) == 64 * 2**10
    assert environment == "None\n"


def test_the_sandbox_has_no_network_or_says_so(sandbox):
    limits = sys.modules[type(sandbox).__module__].LIMITS
    (said,) = run(sandbox, "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)")
    if limits:
        assert limits == ["the network: unshare --user --net --pid is not allowed"]
    else:
        assert "Network is unreachable" in said


SERVER = """
try:
    from mcp.server import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("numbers")

@server.tool()
def double(n: int) -> str:
    "Double a number."
    if n < 0:
        raise ValueError("n is negative")
    return str(2 * n)

server.run("stdio")
"""


@pytest.fixture
def mcp(tmp_path: Path) -> Iterator[Path]:
    """A YAML file of the tools of a server with one tool."""
    pytest.importorskip("mcp", reason="the package mcp is not installed: pip install mcp")
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "mcp_client.py").write_text((EXAMPLES / "mcp_client.py").read_text())
    yield tmp_path
    sys.modules.pop("mcp_client", None)


def entry(folder: Path, tool: str, server: str = "server.py") -> str:
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    config = {"command": [sys.executable, str(folder / server)], "tool": tool, "env": env}
    tools = {"tools": [{"class_name": "mcp_client.MCPTool", "config": config}]}
    (folder / "mcp.yaml").write_text(yaml.safe_dump(tools))
    return str(folder / "mcp.yaml")


def test_an_mcp_server_says_its_schema_and_answers_calls(mcp):
    (tool,) = load_tools(entry(mcp, "double"))
    offered = tool.tool_schema.offered()["function"]
    assert (offered["name"], offered["description"]) == ("double", "Double a number.")
    assert offered["parameters"]["properties"]["n"]["type"] == "integer"

    async def episodes() -> list[str]:
        ids = await asyncio.gather(tool.create("a"), tool.create("b"))
        said = await asyncio.gather(*(tool.execute(i, {"n": n}) for n, i in enumerate([*ids, *ids])))
        bad = await tool.execute("a", {"n": -1})
        tool.serving.cancel()
        await asyncio.wait([tool.serving])
        return [response.text for response in [*said, bad]]

    *good, bad = asyncio.run(episodes())
    assert good == ["0", "2", "4", "6"]
    assert bad.startswith("Error: Error executing tool double")


def test_a_server_over_http_is_refused_with_a_remedy(mcp):
    tools = {"tools": [{"class_name": "mcp_client.MCPTool", "config": {"url": "http://localhost", "tool": "double"}}]}
    (mcp / "http.yaml").write_text(yaml.safe_dump(tools))
    with pytest.raises(ValueError, match="http.yaml: an MCP tool needs 'command', .* start a bridge"):
        load_tools(str(mcp / "http.yaml"))


def test_an_unknown_tool_of_an_mcp_server_is_said(mcp):
    with pytest.raises(ValueError, match="mcp.yaml: the MCP server has no tool 'triple'; it has: double."):
        load_tools(entry(mcp, "triple"))


def test_an_mcp_server_that_does_not_start_is_said(mcp):
    with pytest.raises(ValueError, match="mcp.yaml: the MCP server .* does not answer"):
        load_tools(entry(mcp, "double", "missing.py"))

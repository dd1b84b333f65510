"""The tools in examples/tools do what they promise."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
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
    "expression",
    [
        "__import__('os')",
        "(1).real",
        "'a' * 9",
        "1 if 1 else 2",
        "9 ** 9 ** 9",
        "(" * 999,
        "1" * 1001,
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression):
    with pytest.raises((ValueError, SyntaxError, OverflowError, MemoryError)):
        asyncio.run(example("calculator.py").execute("", {"expression": expression}))


def test_the_search_finds_the_passage_with_most_of_the_words():
    search = example("search.py")
    first = asyncio.run(search.execute("", {"query": "what does the critic estimate", "n": 2}))
    assert first.startswith("[1] A critic estimates") and "\n\n[2] " in first and "[3]" not in first
    assert asyncio.run(search.execute("", {"query": "zebra"})) == "Nothing was found."


def play(*numbers: int) -> tuple[list[str], float]:
    """What the game with the secret 7 says to guesses, and its reward."""

    async def episode() -> tuple[list[str], float]:
        game = example("guess.py")
        key = await game.create("key", secret=7)
        hints = [await game.execute(key, {"number": number}) for number in numbers]
        reward = await game.calc_reward(key)
        await game.release(key)
        return hints, reward

    return asyncio.run(episode())


def test_the_guessing_game_rewards_a_right_guess_among_the_first_four():
    assert play(4, 8, 7) == (["higher", "lower", "right"], 1.0)
    assert play(7, 1) == (["right", "higher"], 1.0)
    assert play(1, 2, 3, 4, 7) == (["higher"] * 4 + ["no guess is left"], 0.0)


@pytest.fixture
def sandbox() -> BaseTool:
    made = example("sandbox.py")
    made.seconds = 5
    return made


def run(sandbox: BaseTool, *codes: str) -> list[str]:
    async def episode() -> list[str]:
        folder = await sandbox.create()
        said = [
            (await sandbox.execute(folder, {"code": textwrap.dedent(code)})).text for code in codes
        ]
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


def test_a_sandboxed_process_that_prints_without_end_ends(sandbox):
    write_much = "import os\nwhile True: os.write(1, b'x' * 2**20)"
    for output in run(sandbox, *[write_much] * 4):
        assert output == "x" * 64 * 2**10


def test_the_sandbox_has_no_network_or_says_so(sandbox):
    module = sys.modules[type(sandbox).__module__]
    (said,) = run(sandbox, "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)")
    if module.CONFINED:
        assert "Network is unreachable" in said
    else:
        assert "network" in module.LIMITS[-1]


def test_the_sandbox_names_what_it_does_not_limit(caplog):
    example("sandbox.py")
    (said,) = [
        record.getMessage() for record in caplog.records if "does not limit" in record.getMessage()
    ]
    assert [
        word for word in ("reads", "writes outside its folder", "processors") if word not in said
    ] == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("for _ in range(40): subprocess.Popen(['sleep', '60'])", "more than 32 processes"),
        ("while True: os.fork()", "more than 32 processes"),
        (
            "for n in range(8): os.fork() or keep(100)",
            "more than 512 MiB of memory in all its processes",
        ),
        (
            "for n in range(20): open(str(n), 'wb').write(bytes(2 ** 20))",
            "more than 16 MiB of files",
        ),
        ("for n in range(5000): open(str(n), 'w')", "more than 16 MiB of files"),
    ],
)
def test_the_sandbox_limits_all_processes_and_files_together(sandbox, code, says):
    sandbox.seconds = 60
    keep = "def keep(size):\n    kept = bytearray(b'x') * (size * 2 ** 20)\n    time.sleep(60)\n"
    said = run(sandbox, f"import os, subprocess, time\n{keep}{code}\ntime.sleep(60)", "print(1)")
    assert said[0] == f"Error: the code has {says}."
    assert said[1] == (said[0] if "files" in says else "1\n")


FAMILY = """
import os, subprocess, sys, time
pid = open("/proc/self/status").read().split("NSpid:")[1].split()[0]
open(pid, "w")
if sys.argv[1:] != ["child"]:
    subprocess.Popen([sys.executable, "-c", CODE, "child"])
time.sleep(60)
"""
"""Code with a child; both make a file that is named by their ids outside the sandbox."""


def test_the_sandbox_ends_with_the_process_that_trains(tmp_path):
    code = f"CODE = {FAMILY!r}\n{FAMILY}"
    program = f"""
import asyncio
from openppo.agents.tools import load_tools
(sandbox,) = load_tools({str(EXAMPLES / "sandbox.py")!r})
sandbox.seconds = 60
asyncio.run(sandbox.execute({str(tmp_path)!r}, {{"code": {code!r}}}))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-c", program], env=environment)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    run.kill()
    run.wait()
    until(lambda: not any(psutil.pid_exists(int(file.name)) for file in tmp_path.iterdir()))


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


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

HANGS = """
        import os, pathlib, time
        pathlib.Path(__file__).with_name("pids").joinpath(str(os.getpid())).touch()
        time.sleep(600)
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
        said = await asyncio.gather(
            *(tool.execute(i, {"n": n}) for n, i in enumerate([*ids, *ids]))
        )
        bad = await tool.execute("a", {"n": -1})
        tool.serving.cancel()
        await asyncio.wait([tool.serving])
        return [response.text for response in [*said, bad]]

    *good, bad = asyncio.run(episodes())
    assert good == ["0", "2", "4", "6"]
    assert bad.startswith("Error: Error executing tool double")


def test_an_mcp_server_ends_with_the_process_that_trains(mcp):
    """Though it does not read that its input has ended."""
    (mcp / "pids").mkdir()
    (mcp / "server.py").write_text(SERVER.replace('raise ValueError("n is negative")', HANGS))
    program = f"""
import asyncio
from openppo.agents.tools import load_tools
(tool,) = load_tools({entry(mcp, "double")!r})

async def call():
    await tool.execute(await tool.create("a"), {{"n": -7}})

asyncio.run(call())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=mcp)
    until(lambda: any(mcp.glob("pids/*")))
    run.kill()
    run.wait()
    until(lambda: not any(psutil.pid_exists(int(file.name)) for file in mcp.glob("pids/*")))


def test_a_server_over_http_is_refused_with_a_remedy(mcp):
    tools = {
        "tools": [
            {
                "class_name": "mcp_client.MCPTool",
                "config": {"url": "http://localhost", "tool": "double"},
            }
        ]
    }
    (mcp / "http.yaml").write_text(yaml.safe_dump(tools))
    with pytest.raises(
        ValueError, match="http.yaml: an MCP tool needs 'command', .* start a bridge"
    ):
        load_tools(str(mcp / "http.yaml"))


def test_an_unknown_tool_of_an_mcp_server_is_said(mcp):
    with pytest.raises(
        ValueError, match="mcp.yaml: the MCP server has no tool 'triple'; it has: double."
    ):
        load_tools(entry(mcp, "triple"))


def test_an_mcp_server_that_does_not_start_is_said(mcp):
    with pytest.raises(ValueError, match="mcp.yaml: the MCP server .* does not answer"):
        load_tools(entry(mcp, "double", "missing.py"))

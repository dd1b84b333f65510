"""The script agent.sh, with OpenAI's SDK in an environment of its own, whose model and agents improve."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import REPO
from tests.docs.test_agent_example import demo as demo
from tests.docs.test_agent_example import rows
from tests.unit.jobs.test_serve_agent import serving

PROGRAM = REPO / "examples/agents/openai_sum.py"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy of agent.sh that installs nothing."""
    copy = tmp_path / "agent.sh"
    copy.write_text((REPO / "examples/scripts/agent.sh").read_text())
    (tmp_path / "setup.sh").write_text(f"repo={shlex.quote(str(REPO))}\ninstall() {{ :; }}\n")
    return copy


def command_of(client_python: str) -> str:
    assert "openppo" not in PROGRAM.read_text()
    return f"{shlex.quote(client_python)} -I {shlex.quote(str(PROGRAM))}"


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_the_script_trains_both_agents_and_prints_a_table(
    run: Callable[..., str], script: Path, client_python: str, tmp_path: Path
) -> None:
    small = """--max_samples 4 --max_steps 1 --eval_steps 1 --rollout_batch_size 2 --n_samples_per_prompt 2
        --train_batch_size 4 --generate_max_len 8"""
    words = ["bash", str(script), "1", str(tmp_path / "demo"), *small.split()]
    printed = run(words, tmp_path, PROGRAM=command_of(client_python), SFT_STEPS="2")
    demo = tmp_path / "demo"
    for name, title in (
        ("program", "sums, by a program with a tool"),
        ("game", "a game that is a tool"),
    ):
        assert title in printed
        assert f"report  {demo}/{name}/logs/report.html" in printed
        assert (demo / name / "logs/report.html").is_file()
        (line,) = [row for row in rows(demo / name / "logs/metrics.jsonl") if "reward" in row]
        assert line["agent/agent_error"] == 0
        assert report_of(demo)[name]["episodes"] == 4


def test_the_program_of_the_gateways_page_talks_to_the_tiny_model(
    demo: Path, client_python: str, tmp_path: Path
) -> None:
    page = (REPO / "docs/agents/gateway.md").read_text()
    (flags,) = re.findall(r"serve_agent --pretrain agent_demo/model (.*) --port 8000\n", page)
    (line,) = re.findall(r"^(echo .*) \| python examples/agents/openai_sum.py$", page, flags=re.M)
    with serving(demo / "agent_demo/model", tmp_path, *flags.split()) as (url, _):
        address = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "1"}
        command = f"{line} | {command_of(client_python)}"
        subprocess.run(command, shell=True, env=os.environ | address, check=True)
    logged = " ".join((tmp_path / "stderr").read_text().split())
    assert re.search(r"turn \d+: rendered whole; \d+ tokens read", logged)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_agents_of_the_tiny_model_improve(
    script: Path, client_python: str, tmp_path: Path, seed: str
) -> None:
    """Each interval after training lies above the one before."""
    environment = os.environ | {"PROGRAM": command_of(client_python)}
    demo = tmp_path / "agent_demo"
    subprocess.run(["bash", script, seed, demo], env=environment, check=True)
    report = report_of(demo)
    for name in ("program", "game"):
        print(seed, name, report[name])
        assert report[name]["after"]["interval"][0] > report[name]["before"]["interval"][1]

"""The environment of real clients."""

import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from tests.unit.agents.conftest import chat_tokenizer as chat_tokenizer
from tests.unit.agents.conftest import make_sampler as make_sampler

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


@pytest.fixture(scope="session")
def client_python() -> str:
    """Python with the clients, in a folder of the environment that runs the tests; made once, in half a minute.

    Where it cannot be made tests are skipped, or fail if OPENPPO_REQUIRE_CLIENTS is 1.
    """
    folder = Path(sys.prefix) / "agents_clients"
    # Workers of one run want it at the same moment, and --clear would empty it under another's feet.
    with filelock.FileLock(folder.with_name("agents_clients.lock")):
        if not is_complete(folder):
            make_environment(folder)
    return str(folder / "bin" / "python")


def is_complete(folder: Path) -> bool:
    stamp = folder / "complete"
    return stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text()


def make_environment(folder: Path) -> None:
    venv = [sys.executable, "-m", "venv", "--clear", folder]
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    for command in (venv, [*pip, "--disable-pip-version-check", "-r", REQUIREMENTS]):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            required = os.environ.get("OPENPPO_REQUIRE_CLIENTS") == "1"
            end = pytest.fail if required else pytest.skip
            output = (made.stdout + made.stderr).strip()[-2000:]
            end(f"the environment of real clients cannot be made: {output}")
    (folder / "complete").write_text(REQUIREMENTS.read_text())

"""The environment of real clients."""

import os
import subprocess
import sys
from pathlib import Path

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
    python, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-r",
            REQUIREMENTS,
        ]
        for command in ([sys.executable, "-m", "venv", "--clear", folder], pip):
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode != 0:
                end = (
                    pytest.fail if os.environ.get("OPENPPO_REQUIRE_CLIENTS") == "1" else pytest.skip
                )
                end(f"the environment of real clients cannot be made: {made.stderr.strip()[-500:]}")
        stamp.write_text(REQUIREMENTS.read_text())
    return str(python)

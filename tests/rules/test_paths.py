"""No tracked text says where on a build machine it was made."""

import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

ANYWHERE = re.compile(
    r"(?<![\w.$}>])/(?:root|work)/\w|/(?:home|Users)/(?!me/|you/|somebody/)[\w.-]+/|/tmp/pytest-of-\w"
)
IN_RESULTS = re.compile(ANYWHERE.pattern + r"|(?<![\w.$}>])/(?:tmp|var/tmp|mnt|scratch)/\w")
"""What was measured names no folder of its machine; elsewhere a command may use such a one as an example."""
RESULTS = "benchmarks/results/"


def test_no_tracked_text_names_a_build_machine() -> None:
    if not (REPO / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True)
    found = []
    for name in [name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]:
        pattern = IN_RESULTS if name.startswith(RESULTS) else ANYWHERE
        text = (REPO / name).read_bytes().decode("utf-8", errors="ignore")
        found += [f"{name}: {match[0]}" for match in pattern.finditer(text)] if "\0" not in text else []
    assert found == []

"""The README's first command, as a user runs it, with the claim that it makes."""

import json
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_ppo_raises_exact_match_of_the_quickstart_by_twenty_points(tmp_path: Path) -> None:
    command = ["bash", str(REPO / "examples/scripts/quickstart.sh"), "1", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["before"]["kl"] == 0
    assert report["after"]["exact match"] - report["before"]["exact match"] >= 20
    for shown in ("exact match (greedy), %", "before PPO", "after PPO", "curves  tensorboard"):
        assert shown in done.stdout
    assert f"report  {tmp_path}/run/ppo/logs/report.html" in done.stdout
    assert (tmp_path / "run" / "ppo" / "logs" / "report.html").is_file()

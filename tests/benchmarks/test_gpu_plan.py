"""The plan of benchmarks/gpu: what fits is run, what outlasts its limit is ended, and each row is kept at once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import plan, rows
from tests.fork_server import PYTHON_PATH

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
SLEEPER = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results and work."""
    (tmp_path / "logs").mkdir()
    for module in (plan, rows):
        monkeypatch.setattr(module, "OUT", tmp_path)
        monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(plan, "BEGAN", time.time())
    return tmp_path


def run(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A call of run.sh."""
    command = [
        "bash",
        str(FOLDER / "run.sh"),
        "--out",
        str(folder / "out"),
        "--work",
        str(folder / "work"),
        *words,
    ]
    variables = os.environ | {"PYTHONPATH": PYTHON_PATH, "PYTHON": sys.executable} | environment
    return subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, timeout=1800
    )


def results(folder: Path) -> list[dict[str, Any]]:
    """The rows of a call."""
    return [
        json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()
    ]


def test_every_stage_is_a_documented_function() -> None:
    page = (FOLDER.parents[1] / "docs" / "gpus.md").read_text()
    for name, stage in plan.STAGES.items():
        module, function = stage.function.split(":")
        assert f"\ndef {function}() -> None:" in (FOLDER / f"{module}.py").read_text()
        assert f"| {name} | {stage.seconds} |" in page


def test_an_unknown_stage_ends_with_the_names_of_all(tmp_path: Path) -> None:
    ended = run(tmp_path, "--dry", "start")
    assert ended.returncode == 2
    assert "there is no stage start: name some of environment assets ppo" in ended.stderr


def test_a_stage_that_does_not_fit_is_left_out(out: Path) -> None:
    plan.Plan(["large"], budget=30).run()
    assert (
        "| large | left out: 30 s are left, and it takes about 50 |"
        in (out / "tables.md").read_text()
    )


def test_a_stage_beyond_its_limit_ends_with_all_it_started(out: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    while not (started := plan.descendants(process.pid)):
        time.sleep(0.05)
    plan.end(process)
    assert process.poll() is not None
    assert not any(map(plan.is_running, started))


def test_rows_are_kept_at_once_and_tables_name_no_place(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_STAGE", "parts")
    rows.emit("decode", rows=64, ms=3.7)
    rows.attempt("decode", lambda: Path("/tmp/somebody/missing").read_text(), rows=256)
    assert [row["rows"] for row in rows.read_rows(out / "results.jsonl")] == [64, 256]
    rows.write_tables({"parts": "ended after 40 s"})
    page = (out / "tables.md").read_text()
    assert "| parts | ended after 40 s |" in page and "| 64 | 3.7 |" in page
    assert "FAILED (rows: 256, where:" in page and "No such file or directory" in page
    assert "somebody" not in page and str(out) not in page


@pytest.mark.slow
def test_a_dry_run_measures_each_stage_on_a_cpu(tmp_path: Path) -> None:
    stages = ["environment", "ppo", "parts", "resume"]
    ended = run(tmp_path, "--dry", *stages)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    measured = results(tmp_path)
    assert [row for row in measured if "failed" in row] == []
    assert {row["stage"] for row in measured} == set(stages)
    assert [row["step"] for row in measured if row["table"] == "steps" and row["run"] == "PPO"] == [
        1,
        2,
        3,
    ]
    assert [row["differ by"] for row in measured if row["table"] == "compared"] == [0.0] * 6
    page = (tmp_path / "out" / "tables.md").read_text()
    assert page.startswith("# OpenPPO on a GPU\n\nA dry run on a CPU: its figures mean nothing.")
    assert all(f"| {name} | ended after" in page for name in stages)

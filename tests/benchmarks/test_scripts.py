"""The benchmarks' scripts start, say what they do, and take turns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import Launcher

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = ("cpu_peers", "decode", "gpu", "sweep")
PARTICIPANTS = (
    "openppo_step",
    "trl_step",
    "openrlhf_step",
    "local_decode",
    "vllm_decode",
    "workload",
    "gpu_models",
    "gpu_step",
)

no_pressure = pytest.mark.skipif(
    not Path("/proc/pressure/cpu").exists(), reason="this kernel does not say whether threads wait for a CPU"
)

PARTICIPANT = """
import sys
sys.path.insert(0, sys.argv[1])
import turns
clock = turns.Turns()
print("a library talks")
if len(sys.argv) > 2:
    clock.skip("it is too cold")
clock.ready(cake="1.0")
for turn in clock:
    if turn == 2:
        sys.exit("the cake is eaten")
    clock.report(tokens=turn)
"""


@pytest.mark.parametrize("script", [*COMMANDS, *(f"peers/{name}" for name in PARTICIPANTS)])
def test_help_answers(launcher: Launcher, script: str) -> None:
    ended = launcher.run([BENCHMARKS / f"{script}.py", "--help"], cwd=Path("/"))
    assert ended.returncode == 0, ended.stdout
    assert "usage" in ended.stdout


def converse(lines: str, *arguments: str) -> tuple[list[dict], subprocess.CompletedProcess[str]]:
    """A participant's answers to lines on stdin."""
    command = [sys.executable, "-c", PARTICIPANT, str(BENCHMARKS / "peers"), *arguments]
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
    return [json.loads(line) for line in ended.stdout.splitlines()], ended


@no_pressure
def test_a_participant_answers_each_line_once_and_its_library_may_print() -> None:
    answers, ended = converse("go\ngo\n")
    assert [set(answer) for answer in answers] == [{"ready"}, *[{"total", "stall", "tokens"}] * 2, {"peak_mb"}]
    assert [answer["tokens"] for answer in answers[1:3]] == [0, 1]
    assert 5 < answers[-1]["peak_mb"] < 500  # a Python without torch
    assert "a library talks" in ended.stderr


INTERLEAVED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from peers import interleave
from peers.interleave import Entry, Rounds
interleave.HERE = Path(sys.argv[2])
peers = str(Path(sys.argv[1]) / "peers")
entries = [
    Entry("good", "two_turns.py"),
    Entry("short of cake", "participant.py"),
    Entry("cold", "participant.py", ("cold",)),
    Entry("absent", "participant.py", environment="nowhere"),
]
summaries, versions = interleave.run_cell(entries, [peers], Path(sys.argv[2]), Rounds(1, 2, 0))
print([summary.name for summary in summaries], versions)
"""


@no_pressure
def test_who_cannot_take_part_is_skipped_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "participant.py").write_text(PARTICIPANT)
    (tmp_path / "two_turns.py").write_text(PARTICIPANT.replace("turn == 2", "turn == 99"))
    command = [sys.executable, "-c", INTERLEAVED, str(BENCHMARKS), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    assert "cold is skipped: it is too cold" in ended.stdout
    assert "short of cake is skipped: ended with code 1\n    a library talks\n    the cake is eaten" in ended.stdout
    assert "absent is skipped" in ended.stdout and "bash benchmarks/peers/setup.sh" in ended.stdout
    assert ended.stdout.count("good: ") == 3  # a warm-up and two that count
    assert ended.stdout.splitlines()[-1] == "['good'] {'good': {'cake': '1.0'}}"


@no_pressure
@pytest.mark.slow
def test_a_sweep_of_a_few_responses_runs_on_one_and_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "sweep.py"), "--assets", str(tmp_path / "assets")]
    command += ["--workloads", "w2", "--sizes", "4", "8", "--repeat", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.strip("|").split("|")[:9] for line in ended.stdout.splitlines() if re.match(r"\| [48] ", line)]
    assert [int(row[0]) for row in rows] == [4, 8]
    for responses, tokens, one, _, two, _, ratio, rest, optimizer in ([cell.strip() for cell in row] for row in rows):
        assert int(responses) <= int(tokens) <= 256 * int(responses)
        assert float(ratio) == pytest.approx(float(two) / float(one), rel=0.05)
        assert 0 < float(optimizer.rstrip("%")) <= float(rest.split("%")[0]) < 100
    assert "ms per response; no size is further than" in ended.stdout

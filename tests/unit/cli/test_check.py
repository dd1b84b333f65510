"""openppo check: a report for bug reports, and an exit status for scripts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openppo.build import machine
from openppo.build.machine import Finding, tiny_step
from openppo.cli import check
from openppo.config import CheckConfig
from tests.fork_server import PYTHON_PATH


def test_a_machine_that_can_train_is_reported_with_status_0(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "openppo", "check"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("A training can start here.\n")
    for line in (
        rf"torch +{re.escape(torch.__version__)}",
        r"  ok +CPU +.+ cores usable; [\w ]*",
        r"  ok +memory +process .* GiB available of .* GiB",
        r"  ok +working folder +[\d.]+ GiB free",
        r"  optional +torchrun +not on the PATH: start with python -m torch.distributed.run instead",
        r"  ok +environment +OMP_NUM_THREADS=1",
        r"  ok +cpu float32 +\d+ ms, at most [\d.]+ GiB of the process; attention: \w.*",
        r"  ok +cpu bfloat16 +\d+ ms.*",
    ):
        assert re.search(f"^{line}$", done.stdout, re.MULTILINE), line
    assert str(tmp_path) not in done.stdout and str(Path.home()) not in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_check_under_torchrun_is_refused():
    CheckConfig().validate(1)
    with pytest.raises(ValueError, match="^check runs in one process: start it without torchrun"):
        CheckConfig().validate(2)


def test_wrong_results_of_attention_are_found(monkeypatch):
    def spoil(model):
        with torch.no_grad():
            model.model.norm.weight.mul_(3)

    cpu = torch.device("cpu")
    assert tiny_step(cpu, torch.float32).mark == "ok"
    monkeypatch.setattr(machine, "use_fast_attention", spoil)
    spoiled = tiny_step(cpu, torch.float32)
    assert spoiled.mark == "missing"
    assert re.match(r"its loss is \d.*, and \d.* on the CPU by plain attention", spoiled.remedy)


def test_a_kernel_that_fails_is_reported_in_one_line(monkeypatch):
    def fail(model):
        raise RuntimeError("CUDA error:\n no kernel image")

    monkeypatch.setattr(machine, "use_fast_attention", fail)
    finding = tiny_step(torch.device("cpu"), torch.float32)
    assert (finding.value, finding.mark) == ("fails", "missing")
    assert finding.remedy.startswith("CUDA error: no kernel image; install a torch")


@pytest.mark.parametrize(("needed", "status"), [(True, 1), (False, 0)])
def test_only_what_a_training_needs_decides_the_status(needed, status):
    findings = [
        Finding("devices", "CPU", "fine"),
        Finding("places", "thing", "absent", "install it", needed=needed),
    ]
    text, found = check._report(findings)
    assert found == status
    mark = "missing " if needed else "optional"
    assert text.splitlines() == [
        "devices",
        "  ok        CPU                   fine",
        "places",
        f"  {mark}  thing                 absent: install it",
    ]


def test_missing_packages_end_the_check_before_their_import(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["openppo check"])
    monkeypatch.setattr(check, "print_versions", lambda: None)
    monkeypatch.setattr(check, "missing_packages", lambda: ["peft", "tyro"])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "missing   peft tyro: pip install peft tyro" in printed
    assert printed.endswith("No training can start here until what is missing is mended.\n")

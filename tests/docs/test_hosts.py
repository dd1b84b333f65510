"""The commands of docs/hosts.md and the Slurm script run, on two hosts that are both this machine."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "examples" / "scripts" / "slurm.sh"
DOCUMENT = (REPO / "docs" / "hosts.md").read_text()
SMALL = "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --generate_max_len 4 --max_samples 8"
OF_SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "output"}
Run = Callable[..., str]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with what this machine lacks: ``ssh HOST COMMAND``, ``scontrol`` and an ``srun`` for two nodes."""
    texts = {
        "ssh": 'test "$1" = 127.0.0.1 && exec bash -c "$2"',
        "scontrol": 'test "$*" = "show hostnames gpu[01-02]" && printf "%s\\n" 127.0.0.1 127.0.0.2',
        "srun": """
            test "$1" = --kill-on-bad-exit=1; shift
            for node in 0 1; do SLURM_NODEID=$node "$@" & running+=($!); done
            for each in "${running[@]}"; do wait "$each"; done""",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def free_port() -> str:
    """For the master."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
def test_the_loop_over_ssh_runs(run: Run, workshop: Path, programs: Path) -> None:
    options = f"--pretrain policy --reward_pretrain reward --prompt_data prompts.jsonl --save_path ssh {SMALL}".split()
    yaml = [f"{name[2:]}: {value}" for name, value in zip(options[::2], options[1::2], strict=True)]
    (workshop / "run.yaml").write_text("\n".join(yaml))
    (block,) = (block for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, flags=re.DOTALL) if "ssh" in block)
    replaced = {
        "(gpu01 gpu02)": "(127.0.0.1 127.0.0.1)",
        "--nproc_per_node 8": "--nproc_per_node 1",
        "29500": free_port(),
        ". .venv/bin/activate && ": "",
    }
    for old, new in replaced.items():
        assert old in block
        block = block.replace(old, new)
    run(["bash", "-c", block], workshop, PATH=f"{programs}:{os.environ['PATH']}")
    logs = [(workshop / f"host{i}.log").read_text() for i in (0, 1)]
    assert (workshop / "ssh" / "model.safetensors").is_file(), logs
    assert "step 2/2" in logs[0] and "step " not in logs[1]


def test_the_slurm_script_runs_on_two_nodes(run: Run, workshop: Path, programs: Path) -> None:
    run(
        ["bash", str(SCRIPT), *SMALL.split()],
        workshop,
        PATH=f"{programs}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="gpu[01-02]",
        SLURM_NNODES="2",
        MASTER_PORT=free_port(),
        GPUS="1",
        PRETRAIN="policy",
        REWARD_PRETRAIN="reward",
        PROMPT_DATA="prompts.jsonl",
        SAVE_PATH="slurm",
    )
    assert (workshop / "slurm" / "model.safetensors").is_file()
    assert len((workshop / "slurm" / "logs" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_options_of_sbatch_exist_and_stand_before_any_command() -> None:
    head = SCRIPT.read_text().split("\nset -euo pipefail\n")[0].splitlines()
    options = [re.fullmatch(r"#SBATCH --([\w-]+)=\S+", line) for line in head if line.startswith("#SBATCH")]
    assert {option[1] for option in options if option} == OF_SBATCH
    assert None not in options
    assert all(line.startswith("#") for line in head)


def test_torchrun_waits_longer_than_slurm_and_within_its_notice() -> None:
    text = SCRIPT.read_text()
    notice, patience = (int(re.search(pattern, text)[1]) for pattern in (r"TERM@(\d+)", r"--shutdown_timeout (\d+)"))
    assert 30 < patience < notice

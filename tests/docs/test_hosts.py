"""The commands of docs/hosts.md and the Slurm script run, on two hosts that are both this machine."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "examples" / "scripts" / "slurm.sh"
SMALL = "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --generate_max_len 4 --max_samples 8"
OF_SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "output"}
PROGRAMS = {  # what this machine lacks: ssh HOST COMMAND, scontrol, and srun for two nodes
    "ssh": 'test "$1" = 127.0.0.1 && exec bash -c "$2"',
    "scontrol": 'test "$*" = "show hostnames gpu[01-02]" && printf "%s\\n" 127.0.0.1 127.0.0.2',
    "srun": """test "$1" = --kill-on-bad-exit=1; shift
        for node in 0 1; do SLURM_NODEID=$node "$@" & running+=($!); done
        for each in "${running[@]}"; do wait "$each"; done""",
}


@pytest.fixture
def run_on_two(run: Callable[..., str], workshop: Path, tmp_path: Path) -> Callable[..., str]:
    """Run ``bash WORDS`` with those programs and a free port for the master."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = f"{tmp_path}:{os.environ['PATH']}"
    return lambda *words, **env: run(
        ["bash", *(word.replace("29500", port) for word in words)], workshop, PATH=path, MASTER_PORT=port, **env
    )


@pytest.mark.slow  # the Slurm script says the same to torchrun
def test_the_loop_over_ssh_runs(run_on_two: Callable[..., str], workshop: Path) -> None:
    options = f"--pretrain policy --reward_pretrain reward --prompt_data prompts.jsonl --save_path ssh {SMALL}".split()
    yaml = [f"{name[2:]}: {value}" for name, value in zip(options[::2], options[1::2], strict=True)]
    (workshop / "run.yaml").write_text("\n".join(yaml))
    page = (REPO / "docs" / "hosts.md").read_text()
    (block,) = (block for block in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL) if "ssh" in block)
    replaced = {"(gpu01 gpu02)": "(127.0.0.1 127.0.0.1)", "--nproc_per_node 8": "--nproc_per_node 1"}
    for old, new in (replaced | {". .venv/bin/activate && ": ""}).items():
        assert old in block
        block = block.replace(old, new)
    run_on_two("-c", block)
    logs = [(workshop / f"host{i}.log").read_text() for i in (0, 1)]
    assert (workshop / "ssh" / "model.safetensors").is_file(), logs
    assert "step 2/2" in logs[0] and "step " not in logs[1]


def test_the_slurm_script_runs_on_two_nodes(run_on_two: Callable[..., str], workshop: Path) -> None:
    nodes = {"SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NNODES": "2", "GPUS": "1"}
    models = {"PRETRAIN": "policy", "REWARD_PRETRAIN": "reward", "PROMPT_DATA": "prompts.jsonl", "SAVE_PATH": "slurm"}
    run_on_two(str(SCRIPT), *SMALL.split(), **nodes, **models)
    assert (workshop / "slurm" / "model.safetensors").is_file()
    assert len((workshop / "slurm" / "logs" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_options_of_sbatch_exist_and_torchrun_waits_within_its_notice() -> None:
    text = SCRIPT.read_text()
    head = text.split("\nset -euo pipefail\n")[0].splitlines()
    assert all(line.startswith("#") for line in head), "before any command"
    options = [re.fullmatch(r"#SBATCH --([\w-]+)=\S+", line) for line in head if line.startswith("#SBATCH")]
    assert {option and option[1] for option in options} == OF_SBATCH
    notice, patience = (int(re.search(pattern, text)[1]) for pattern in (r"TERM@(\d+)", r"--shutdown_timeout (\d+)"))
    assert 30 < patience < notice, "longer than Slurm, within its notice"

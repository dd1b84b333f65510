"""The Slurm script runs on two hosts that are both this machine."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "examples" / "scripts" / "slurm.sh"
SMALL = "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --generate_max_len 4 --max_samples 8"
OF_SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "output"}
PROGRAMS = {  # what this machine lacks: scontrol, and srun for two nodes
    "scontrol": 'test "$*" = "show hostnames gpu[01-02]" && printf "%s\\n" 127.0.0.1 127.0.0.2',
    "srun": """test "$1" = --kill-on-bad-exit=1; shift
        for node in 0 1; do SLURM_NODEID=$node "$@" & running+=($!); done
        for each in "${running[@]}"; do wait "$each"; done""",
}


def test_the_slurm_script_runs_on_two_nodes(run: Callable[..., str], workshop: Path, tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": port}
    nodes = {"SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NNODES": "2", "GPUS": "1"}
    models = {"PRETRAIN": "policy", "REWARD_PRETRAIN": "reward", "PROMPT_DATA": "prompts.jsonl", "SAVE_PATH": "slurm"}
    run(["bash", str(SCRIPT), *SMALL.split()], workshop, **path, **nodes, **models)
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

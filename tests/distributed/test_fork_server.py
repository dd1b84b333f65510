"""A forked run is what a started one is: in what it trains, in its process, in how it ends."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork_server import REPO, Launcher

PPO = """train_ppo --pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
    --pretrain_data {tiny}/documents.jsonl --rollout_batch_size 8 --train_batch_size 4 --generate_max_len 6"""
SUPERVISED = "--pretrain {tiny}/actor --train_batch_size 10 --max_epochs 2 --dataset {tiny}"
RUNS = {
    "PPO on one rank": (0, PPO),
    "ZeRO-0": (2, f"{PPO} --zero_stage 0"),
    "ZeRO-2 in bfloat16": (2, f"{PPO} --zero_stage 2 --bf16 --enable_ema"),
    "ZeRO-3": (2, f"{PPO} --zero_stage 3 --gradient_checkpointing"),
    "four ranks": (4, f"{PPO} --zero_stage 3"),
    "LoRA": (2, f"{PPO} --lora_rank 4 --max_epochs 2"),
    "GRPO": (2, f"{PPO} --advantage_estimator group_norm --n_samples_per_prompt 2 --use_kl_loss --kl_estimator k3"),
    "dynamic sampling": (2, f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 4 --dynamic_sampling"),
    "SFT": (2, f"train_sft {SUPERVISED}/sft.jsonl --zero_stage 1 --packing_samples"),
    "reward model": (2, f"train_rm {SUPERVISED}/preference.jsonl --zero_stage 2 --prompt_key prompt"),
}


def left_by(folder: Path) -> dict[str, object]:
    """What a run wrote, without times."""
    lines = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time", "speed/"))} for line in lines]
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} | {"metrics": metrics}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_forked_run_trains_what_a_started_one_trains(
    run: str, tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    ranks, line = RUNS[run]
    command, *flags = line.format(tiny=tiny).split()
    for real in (False, True):
        save_path = ["--save_path", tmp_path / str(real) / "model"]
        launch(ranks, "-m", f"openppo.cli.{command}", *flags, *save_path, real=real)
    forked, started = (left_by(tmp_path / str(real) / "model") for real in (False, True))
    assert len(forked) > 1
    assert forked == started


SHOW = """
import json, os, random, signal, sys, threading, numpy, torch
print(json.dumps([
    sys.argv, os.getcwd(), os.environ.get("GIVEN"), __name__, sys.path[:2], torch.get_num_threads(),
    [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE)], threading.active_count(),
    os.getsid(0) == os.getpid() or "REAL" in os.environ, os.environ.get("RANK"),
]))
print(random.random(), numpy.random.random(), torch.initial_seed(), file=sys.stderr)
"""


@pytest.mark.parametrize("form", ["-c", "-m", "script"])
def test_a_forked_process_is_that_of_python(form: str, tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = {"-c": ["-c", SHOW], "-m": ["-m", "show"], "script": [tmp_path / "show.py"]}[form]
    same = {"cwd": tmp_path, "separate": True, "GIVEN": "a"}
    forked, again = (launcher.run([*words, "b", "c d"], **same) for _ in range(2))
    started = launcher.run([*words, "b", "c d"], real=True, REAL="1", **same)
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert {*forked.stderr.split()}.isdisjoint(again.stderr.split()), "two runs drew the same numbers"


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "1 / 0",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    ],
)
def test_a_forked_process_ends_as_python_does(program: str, launcher: Launcher) -> None:
    forked, started = (launcher.run(["-c", program], separate=True, real=real) for real in (False, True))
    assert forked.stdout == started.stdout
    assert (forked.returncode, forked.stderr.splitlines()[-1:]) == (
        started.returncode,
        started.stderr.splitlines()[-1:],
    )


def test_a_rank_that_fails_ends_the_others_with_status_1(launcher: Launcher) -> None:
    program = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(0)))
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    sys.exit(7)
time.sleep(1000)
"""
    done = launcher.run(["-c", program], ranks=2)
    assert (done.returncode, done.stdout) == (1, "asked to end\n")


def test_what_is_read_at_import_needs_a_real_run(launcher: Launcher) -> None:
    with pytest.raises(AssertionError, match="OMP_NUM_THREADS.*real=True"):
        launcher.run(["-c", ""], OMP_NUM_THREADS="2")


def test_a_script_finds_python_and_torchrun_of_the_server(tmp_path: Path, run: Callable[..., str]) -> None:
    parents = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read().replace('\\0', ' '))"
    (tmp_path / "parents.py").write_text(parents)
    script = "python parents.py && torchrun --standalone --nproc_per_node 2 parents.py && python -V"
    printed = run(["bash", "-ec", script], tmp_path)
    assert printed.count(f"{REPO}/tests/fork_server.py") == 3
    assert printed.splitlines()[-1].startswith("Python 3")

"""Forked programs against started ones: what they train, their process, how they end."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fork_server
from tests.fork_server import ENVIRONMENT, REPO, Launcher

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
    "SFT": (2, f"train_sft {SUPERVISED}/sft.jsonl --zero_stage 1"),
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
import json, os, random, signal, sys, tempfile, threading, time, numpy, torch
print(json.dumps([
    sys.argv, os.getcwd(), os.environ.get("GIVEN"), __name__, __spec__ and __spec__.name, globals().get("__file__"),
    [place for place in sys.path if "_vendor" not in place], torch.get_num_threads(), threading.active_count(),
    [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE)],
    [*signal.pthread_sigmask(signal.SIG_BLOCK, [])], os.umask(0), time.tzname, tempfile.gettempdir(), sys.stdin.read(),
    os.getsid(0) == os.getpid() or "REAL" in os.environ, os.environ.get("RANK"),
]))
print(random.random(), numpy.random.random(), torch.initial_seed(), file=sys.stderr)
"""


@pytest.mark.parametrize("form", ["-c", "-m", "script"])
def test_a_forked_process_has_the_state_of_a_started_one(form: str, tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = {"-c": ["-c", SHOW], "-m": ["-m", "show"], "script": ["show.py"]}[form]
    same = {"cwd": tmp_path, "separate": True, "GIVEN": "a", "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path)}
    before = os.umask(0o027)
    try:
        forked, again = (launcher.run([*words, "b", "c d"], **same) for _ in range(2))
        started = launcher.run([*words, "b", "c d"], real=True, REAL="1", **same)
    finally:
        os.umask(before)
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert {*forked.stderr.split()}.isdisjoint(again.stderr.split()), "two runs drew the same numbers"


THREAD = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
"""


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import sys; sys.exit(3)"],
        ["-c", "import sys; sys.exit('a reason')"],
        ["-c", "import sys; sys.exit(['a'])"],
        ["-c", "1 / 0"],
        ["-c", "def f(x: undefined): pass"],
        ["-c", "raise KeyboardInterrupt"],
        ["-c", "import sys; sys.excepthook = lambda *_: print('hook'); 1 / 0"],
        ["-c", "import os; os.kill(os.getpid(), 9)"],
        ["-c", THREAD],
        ["annotated.py"],
        ["missing.py"],
        ["-m", "missing"],
        ["-m", "missing.part"],
        ["-m", "json"],
        ["-m", "annotated"],
    ],
    ids=" ".join,
)
def test_a_forked_process_ends_as_a_started_one_does(words: list[str], tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "annotated.py").write_text("def f(x: undefined): pass")
    forked, started = (launcher.run(words, cwd=tmp_path, separate=True, real=real) for real in (False, True))
    ends = [(done.returncode, done.stdout, done.stderr.splitlines()[-1:]) for done in (forked, started)]
    assert ends[0] == ends[1]


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
    for name in ("OMP_NUM_THREADS", "HOME", "XDG_CACHE_HOME"):
        with pytest.raises(AssertionError, match=f"{name}.*real=True"):
            launcher.run(["-c", ""], **{name: "2"})


def test_nothing_outlives_its_run(launcher: Launcher) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    left = Path("/proc", launcher.run(["-c", program]).stdout.strip(), "cmdline")
    deadline = time.monotonic() + 30
    while left.exists() and left.read_bytes():  # a zombie has no command line
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_ended_is_replaced(launcher: Launcher) -> None:
    launcher.programs()
    assert launcher._server is not None
    launcher._server.kill()
    launcher._server.wait()
    assert launcher.run(["-c", "print(1)"]).stdout == "1\n"


def test_a_script_finds_python_and_torchrun_of_the_server(tmp_path: Path, run: Callable[..., str]) -> None:
    parents = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read().replace('\\0', ' '))"
    (tmp_path / "parents.py").write_text(parents)
    script = """python parents.py && torchrun --standalone --nproc_per_node 2 parents.py
        echo 'print("stdin")' | python
        echo given | python -c 'print(input())'
        torchrun --standalone --nproc_per_node 1 --max_restarts 1 parents.py"""
    printed = run(["bash", "-ec", script], tmp_path)
    assert printed.count(f"{REPO}/tests/fork_server.py") == 3
    assert "\nstdin\ngiven\n" in printed
    assert "torch.distributed.run" in printed.splitlines()[-1]


def test_a_script_learns_that_its_program_did_not_end(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "SECONDS_UNTIL_A_HANG_IS_CERTAIN", 0.2)
    monkeypatch.setattr(os, "environ", os.environ | ENVIRONMENT)
    with pytest.raises(SystemExit, match="124"):
        fork_server.stand_in(f"{launcher.programs().parent}/socket", "python", ["-c", "import time; time.sleep(9)"])
    assert capsys.readouterr().err == "-c 'import time; time.sleep(9)': timeout\n"

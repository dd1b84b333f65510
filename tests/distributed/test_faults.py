"""Each kind of fault ends all ranks in time, with one report that names rank, phase and step."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.watched import HERE, REPORT, Ended, small_ppo, torchrun
from tests.fork_server import Launcher

Fail = Callable[..., Ended]
SILENT = "--heartbeat_timeout 12"
STALLS = "--stall_timeout 10"


@pytest.fixture
def fail(tiny: Path, tmp_path: Path, launcher: Launcher) -> Fail:
    """``fail("kill", 1, "generation", 2, "--zero_stage 3")`` runs train_ppo with that fault, to its end in time."""

    def run(
        fault: str, rank: int, phase: str, step: int, options: str = "", ranks: int = 2, command: str = "train_ppo"
    ) -> Ended:
        flags = small_ppo(tiny, tmp_path, options) if command == "train_ppo" else options.split()
        words = [str(word) for word in (HERE / "run_faults.py", fault, rank, phase, step, command, *flags)]
        done = launcher.run(words, ranks, cwd=tmp_path)
        ended = Ended(words, done.stdout, done.returncode, time.time())
        assert ended.status != 0
        ended.is_in_time()
        return ended

    return run


GONE = "is gone: its process has ended"
CASES = {
    "kill while loading": ("kill", 1, "loading", 0, "--zero_stage 3", GONE, "-9: killed"),
    "kill in generation": ("kill", 0, "generation", 2, "--zero_stage 2", GONE, "-9: killed"),
    "kill in training": ("kill", 1, "training", 2, "--zero_stage 3", GONE, "-9: killed"),
    "crash in C": ("segfault", 1, "training", 1, "", GONE, "in string_at"),
    "raise": ("raise", 0, "scoring", 2, "", "raised RuntimeError: planted", 'fail(RuntimeError("planted"))'),
    "stall": ("sleep", 1, "experience", 1, f"--zero_stage 3 {STALLS}", "made no progress", "in sleep"),
    "blocked store client": ("wait_in_store", 0, "training", 1, STALLS, "made no progress", "in wait_in_store"),
    "stopped": ("stop", 0, "experience", 1, SILENT, "is gone: no heartbeat for", "--heartbeat_timeout"),
    "GIL held": ("hold", 1, "generation", 1, SILENT, "is gone: no heartbeat for", "in hold"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_reported_with_rank_phase_and_step(fail: Fail, case: str) -> None:
    fault, rank, phase, step, options, what, says = CASES[case]
    ended = fail(fault, rank, phase, step, options)
    assert f"rank {rank} {what}" in ended.row("fault")
    where = f"step {step}" if step else "before the first step"
    assert f"rank {rank}: phase {phase}, {where}" in ended.row("where")
    assert f"rank {1 - rank}: phase" in ended.row("others")
    assert "--load_checkpoint" in ended.row("resume")
    assert says in ended.output
    assert "gloo" not in ended.report, "the cause, not its consequences"


def test_a_lone_rank_that_holds_the_gil_ends_with_its_position(fail: Fail) -> None:
    ended = fail("hold", 0, "experience", 1, SILENT, ranks=0)
    assert ended.output.count("Timeout (0:00:10.8") == 1
    assert "OpenPPO rank 0: phase experience, step 1" in ended.output
    assert "in hold" in ended.output


def test_out_of_memory_is_reported_with_sizes_and_remedies(fail: Fail) -> None:
    ended = fail("exhaust", 1, "training", 1, "--zero_stage 3")
    assert "can't allocate memory" in ended.row("fault")
    assert "rank 1: phase training, step 1" in ended.row("where")
    memory = ended.row("memory")
    assert re.search(r"process \d+\.\d+ GiB, machine \d+\.\d+ GiB available of \d+\.\d+ GiB", memory)
    assert "--micro_train_batch_size 2" in memory
    remedies = ended.row("try")
    assert "reduce memory in training with --micro_train_batch_size, --gradient_checkpointing" in remedies
    assert "--zero_stage 3" not in remedies, "the run has it already"


RAISES = """
import os, time

def fail(score):
    if os.environ["RANK"] == "1":
        time.sleep(1.5)
        print(f"fault at {time.time()}", flush=True)
        raise LookupError("no such answer")
    return score

"""
FORMS = {
    "async": "async def reward_fn(response):\n    return fail(0.0)\n",
    "batch": "def reward_fn(responses):\n    return fail([0.0] * len(responses))\n",
}


@pytest.mark.parametrize(("form", "phase"), [("async", "scoring"), ("batch", "evaluation")])
def test_a_reward_function_that_raises_is_reported(
    fail: Fail, form: str, phase: str, tiny: Path, tmp_path: Path
) -> None:
    """In an evaluation of averaged weights all ranks swap them back before one of them can fail."""
    (tmp_path / "reward.py").write_text(RAISES + FORMS[form])
    evaluation = f"--enable_ema --eval_before_training --eval_data {tiny}/prompts.jsonl"
    options = f"--zero_stage 3 --reward_fn reward.py {evaluation if phase == 'evaluation' else ''}"
    ended = fail("none", 0, "", 0, options)
    assert "rank 1 raised RuntimeError: --reward_fn reward.py raised LookupError" in ended.row("fault")
    assert f"rank 1: phase {phase}" in ended.row("where")
    assert "in fail" in ended.report


SLEEPS = """
import os, time

def reward_fn(responses):
    if os.environ["RANK"] in "{ranks}":
        print(f"fault at {{time.time()}}", flush=True)
        time.sleep(100_000)
    return [0.0] * len(responses)
"""


def test_a_reward_function_that_never_returns_is_named(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SLEEPS.format(ranks="0"))
    ended = fail("none", 0, "", 0, f"--zero_stage 2 --reward_fn reward.py {STALLS}")
    assert "rank 0 made no progress" in ended.row("fault")
    assert "rank 0: phase scoring, step 1" in ended.row("where")
    assert 'reward.py", line 7 in reward_fn' in ended.report


def test_a_failed_rank_does_not_wait_for_its_threads(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SLEEPS.format(ranks="01"))
    ended = fail("raise", 1, "experience", 1, "--zero_stage 2 --reward_fn reward.py")
    assert "rank 1 raised RuntimeError: planted" in ended.row("fault")


def test_a_mistake_that_one_rank_finds_is_one_line(tiny: Path, tmp_path: Path, launcher: Launcher) -> None:
    place = ("refuse", 1, "loading", 0, "train_ppo")
    done = launcher.run([HERE / "run_faults.py", *place, *small_ppo(tiny, tmp_path)], 2, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert lines == ["error on rank 1: --pretrain: planted"]
    assert done.returncode != 0
    assert REPORT not in done.stdout


def test_a_killed_rank_of_supervised_training_is_named(fail: Fail, tiny: Path, tmp_path: Path) -> None:
    options = f"""--pretrain {tiny}/reward --dataset {tiny}/preference.jsonl --prompt_key prompt --train_batch_size 4
        --micro_train_batch_size 1 --zero_stage 3 --save_path {tmp_path}/model"""
    ended = fail("kill", 1, "step", 2, options, command="train_rm")
    assert "rank 1 is gone: its process has ended" in ended.row("fault")
    assert "rank 1: phase step, step 2" in ended.row("where")
    assert "SIGTERM:" not in ended.output, "the launcher's signal to the other rank is not an operator's"


@pytest.mark.slow
def test_the_store_may_end_with_rank_0(tiny: Path, tmp_path: Path) -> None:
    """DeepSpeed's launcher hosts no store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        launcher = f"deepspeed.launcher.runner --num_gpus 2 --master_port {probe.getsockname()[1]}"
    place = ("kill", 0, "training", 1, "train_ppo", *small_ppo(tiny, tmp_path))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, launcher=launcher)
    assert ended.status != 0
    ended.is_in_time()
    assert "rank 0 is gone: its process has ended" in ended.row("fault")
    assert "rank 0: phase training, step 1" in ended.row("where")


def test_the_end_of_the_launcher_ends_the_ranks(tiny: Path, tmp_path: Path) -> None:
    def kill_launcher(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("fault at"):
            process.kill()

    place = ("sleep", 1, "training", 1, "train_ppo", *small_ppo(tiny, tmp_path))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=kill_launcher)
    assert "torchrun" in ended.row("fault")
    assert "phase training, step 1" in ended.row("where")
    ended.is_in_time()


def test_a_silent_launcher_ends_the_ranks(tiny: Path, tmp_path: Path) -> None:
    def stop_launcher(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("fault at"):
            process.send_signal(signal.SIGSTOP)
        elif line.startswith("Timeout"):
            process.kill()

    place = ("sleep", 0, "training", 1, "train_ppo", *small_ppo(tiny, tmp_path, SILENT))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=stop_launcher)
    assert re.search(r"OpenPPO rank \d: phase training, step 1", ended.output)
    ended.is_in_time()
